"""`python -m dataflow.run --check`: everything that can be wrong is said before anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.run import main

COUNT = """\
import pyarrow as pa
from dataflow import Column, stage

@stage(reads=["response_text"], writes=[Column("words", pa.int32())])
def count_words(batch):
    return {"words": [0] * len(batch)}

@stage(reads=["respose_text"], writes=[Column("words", pa.int32())])
def misspelt(batch):
    return {"words": [0] * len(batch)}

@stage(reads=["response_text"], writes=[Column("words", pa.int32())])
def second_writer(batch):
    return {"words": [0] * len(batch)}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{row}+1=", "ground_truth": row + 1} for row in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(COUNT)
    return path


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    code = main([*arguments, "--check"])
    out, err = capsys.readouterr()
    return code, out + err


def test_a_check_prints_the_resolved_configuration_and_the_graph(
    capsys: pytest.CaptureFixture[str], prompts: Path, own: Path
) -> None:
    code, printed = check(
        capsys,
        f"data.train={prompts}",
        "data.prompts_per_window=4",
        "windows=null",
        f'stages=[{{use: "{own}:count_words"}}]',
    )
    assert code == 0
    assert "prompts_per_window: 4" in printed
    assert "temperature: 1.0" in printed
    assert "baseline_join [join] after reward, rollout" in printed
    assert "count_words [row] after rollout" in printed
    assert "3 windows of at most" in printed


def test_a_check_imports_no_heavy_library_and_starts_nothing(prompts: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from dataflow.run import main; code = main(sys.argv[1:]); "
        "print('heavy:', sorted({'ray', 'vllm', 'torch', 'transformers', 'transfer_queue'} & set(sys.modules))); "
        "sys.exit(code)"
    )
    runs = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", program, f"data.train={prompts}", f"run.dir={runs}", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert not runs.exists()


def test_the_module_is_a_command_with_the_same_exit_codes(prompts: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataflow.run", f"data.train={prompts}", "rollout.temprature=0.7", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert "did you mean 'rollout.temperature'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_key_is_listed_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rollout.n ") and "Sampled sessions per prompt" in line for line in lines)


# What ends with exit code 2; each message names the place and the remedy


def test_C01_a_misspelt_key_is_refused(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    code, printed = check(capsys, f"data.train={prompts}", "estimater=rloo")
    assert (code, "unknown key 'estimater'; did you mean 'estimator'?" in printed) == (2, True)


def test_a_stage_that_reads_a_column_nobody_writes_is_refused(
    capsys: pytest.CaptureFixture[str], prompts: Path, own: Path
) -> None:
    code, printed = check(capsys, f"data.train={prompts}", f'stages=[{{use: "{own}:misspelt"}}]')
    assert code == 2
    assert "'misspelt' reads column 'respose_text', which no stage writes; did you mean 'response_text'?" in printed


def test_two_writers_of_a_column_are_refused(capsys: pytest.CaptureFixture[str], prompts: Path, own: Path) -> None:
    both = f'stages=[{{use: "{own}:count_words"}}, {{use: "{own}:second_writer"}}]'
    code, printed = check(capsys, f"data.train={prompts}", both)
    assert code == 2
    assert "column 'words' has two writers, the stages 'count_words' and 'second_writer'; rename" in printed


def test_a_wrong_option_of_a_stage_is_refused_under_its_full_name(
    capsys: pytest.CaptureFixture[str], prompts: Path, own: Path
) -> None:
    entry = f'stages=[{{use: "{own}:count_words", options: {{minimum: 3}}}}]'
    code, printed = check(capsys, f"data.train={prompts}", entry)
    assert code == 2
    assert "stages[0].options.minimum: " in printed


def test_remax_without_greedy_rows_is_refused(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    code, printed = check(capsys, f"data.train={prompts}", "estimator=remax", "baseline.greedy=false")
    assert code == 2
    assert "baseline.greedy is false; remove that line, or choose an estimator without a baseline" in printed


def test_a_credit_limit_below_one_window_is_refused(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    code, printed = check(capsys, f"data.train={prompts}", "limits.max_rows=5")
    assert code == 2
    assert "limits.max_rows: 5 is smaller than one window's worst case of" in printed
    assert "set it to at least" in printed


def test_a_prompt_file_with_a_reserved_column_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "reserved.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="], "ground_truth": ["2"], "__do_sample__": [True]}), path)
    code, printed = check(capsys, f"data.train={path}")
    assert code == 2
    assert str(path) in printed
    assert "'__do_sample__'" in printed
    assert "ename" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "missing.jsonl"), ("", "missing.jsonl"), ('{"prompt": "a"}\n', "ground_truth")],
)
def test_a_prompt_file_that_is_missing_empty_or_without_answers_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "missing.jsonl"
    if content is not None:
        path.write_text(content)
    code, printed = check(capsys, f"data.train={path}")
    assert code == 2
    assert str(path) in printed
    assert message in printed


def test_a_configuration_file_that_is_missing_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = check(capsys, "none.yaml")
    assert (code, printed) == (2, "error: there is no configuration file 'none.yaml'\n")
