"""What is installed: the three packages with their data, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_the_configs_and_neither_tests_nor_scripts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dataflow", "stages", "schemas"}
    for needed in (
        "stages/configs/tiny_cpu.yaml",
        "stages/algorithms/join.py",
        "dataflow/py.typed",
        "schemas/py.typed",
    ):
        assert needed in names


def test_the_driver_of_a_cluster_run_imports_neither_torch_nor_the_queue() -> None:
    code = (
        "import sys, dataflow.cluster\n"
        "from dataflow.run import main\n"
        "assert main(['--check']) == 0\n"
        "heavy = [name for name in ('torch', 'transfer_queue', 'vllm', 'transformers', 'ray') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
