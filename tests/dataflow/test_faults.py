"""Faults put into whole runs in memory: each strikes where it says, as often as it says, and is recorded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  here, so that no stage's deadline passes while it is imported

from dataflow.config import Fault
from dataflow.errors import ConfigError
from dataflow.stage import StageConfig
from dataflow.testing.faults import check_faults, struck_faults
from dataflow.testing.storm import APART, draw_storm, violations
from tests.run.toy import Ran, Update, pipeline_of, run_toy

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
STAGES = ("source", "rollout", "reward", "baseline_join", "advantage")
ALONE = {"batch_rows": 1}
SOON = {"deadline_s": 1.0}
COLUMNS = ("uid", "session", "outcome", "reward", "baseline", "advantages")


def run(run_dir: Path, *faults: Fault, **options: Any) -> Ran:
    """Run two windows to the end. No deadline passes on a busy machine, but for stages that are given one."""
    settings = {stage: {"deadline_s": 60.0} | options.pop(stage, {}) for stage in STAGES}
    return asyncio.run(run_toy(run_dir, faults, windows=2, **settings, **options))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that no fault struck."""
    return run(tmp_path_factory.mktemp("calm"))


@dataclass(frozen=True)
class Trace:
    """What a fault leaves in the counts of a run.

    Attributes:
        again: Units of the reward that were granted again.
        late: Whether reports came too late to count.
        unread: Rows of the reward that were written and not accepted.
        failures: The exception of each failed attempt.
    """

    again: int = 0
    late: bool = False
    unread: int = 0
    failures: tuple[str, ...] = ()


# The claims of the reward are one unit each, so a fault that strikes once is about one unit.
@pytest.mark.parametrize(
    ("fault", "trace"),
    [
        ({"kind": "kill", "where": "before"}, Trace(again=1)),
        ({"kind": "kill", "where": "written"}, Trace(again=1, unread=1)),
        ({"kind": "kill", "where": "reported"}, Trace()),
        ({"kind": "hang", "seconds": 3}, Trace(again=1, failures=("TimeoutError",))),
        ({"kind": "slow", "seconds": 0.1}, Trace()),
        ({"kind": "raise"}, Trace(again=1, failures=("InjectedFault",))),
        ({"kind": "drop"}, Trace(again=1, unread=1)),
        ({"kind": "duplicate"}, Trace(late=True)),
        ({"kind": "late", "seconds": 5}, Trace(again=1, late=True, unread=1)),
    ],
    ids=lambda value: "-".join(str(part) for part in value.values()) if isinstance(value, dict) else "",
)
def test_each_kind_of_fault_strikes_where_it_says_and_the_run_comes_to_the_same(
    tmp_path: Path, calm: Ran, fault: dict[str, Any], trace: Trace
) -> None:
    ran = run(tmp_path, Fault(stage="reward", window=1, **fault), reward=ALONE | SOON)
    (struck,) = struck_faults(tmp_path)
    assert {name: struck[name] for name in ("fault", "kind", "stage", "delivery")} == {
        "fault": 0, "kind": fault["kind"], "stage": "reward", "delivery": 0,
    }  # fmt: skip
    assert struck["unit"].startswith("toy/train/000001/1-")
    assert violations(ran.view, calm.view, COLUMNS) == []
    assert ran.update.weights == calm.update.weights
    ledger = ran.status.ledger
    found = Trace(
        ledger.redelivered.get("reward", 0),
        ledger.late > 0,
        len(ran.written("reward", "reward")) - ran.units,
        tuple(ran.view.failures()["error"].to_pylist()),
    )
    assert found == trace


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["kill", "hang", "raise", "late", "slow", "drop", "duplicate"])
def test_every_stage_but_the_one_with_one_owner_can_be_struck_by_every_kind(
    tmp_path: Path, calm: Ran, stage: str, kind: Any
) -> None:
    seconds = {"hang": 3.0, "late": 0.1, "slow": 0.1}.get(kind, 0.0)
    ran = run(tmp_path, Fault(kind=kind, stage=stage, window=1, seconds=seconds), **{stage: SOON})
    assert [(record["kind"], record["stage"]) for record in struck_faults(tmp_path)] == [(kind, stage)]
    assert ran.update.weights == calm.update.weights


@pytest.mark.parametrize(
    ("chosen", "units"),
    [
        ({"window": 1}, {f"1-{prompt}{session}" for prompt in "01" for session in ("/0", "/1", "#greedy/0")}),
        ({"uid": "0-1"}, {"0-1/0", "0-1/1", "0-1#greedy/0"}),
        ({"greedy": True}, {f"{window}-{prompt}#greedy/0" for window in "01" for prompt in "01"}),
        ({"greedy": False, "uid": "1-0"}, {"1-0/0", "1-0/1"}),
        ({"window": 0, "uid": "1-0"}, set()),
    ],
)
def test_a_fault_strikes_the_units_that_it_names_and_no_others(
    tmp_path: Path, chosen: dict[str, Any], units: set[str]
) -> None:
    run(tmp_path, Fault(kind="duplicate", stage="reward", times=None, **chosen), reward=ALONE)
    assert {record["unit"].partition("/train/")[2][7:] for record in struck_faults(tmp_path)} == units


def test_what_is_drawn_depends_neither_on_the_run_nor_on_the_order_nor_on_the_workers(tmp_path: Path) -> None:
    fault = Fault(kind="duplicate", stage="reward", times=None, probability=0.4)

    def drawn(name: str, workers: int, seed: int = 0) -> set[str]:
        run(tmp_path / name, fault, run_id=name, seed=seed, reward=ALONE | {"workers": workers})
        return {record["unit"].partition("/train/")[2] for record in struck_faults(tmp_path / name)}

    once = drawn("one", 1)
    assert 0 < len(once) < 12
    assert drawn("another", 3) == once
    assert drawn("seed", 1, seed=1) != once


@pytest.mark.slow
def test_a_fault_strikes_as_often_as_it_may_whatever_the_number_of_processes(tmp_path: Path) -> None:
    fault = Fault(kind="slow", stage="reward", times=3, seconds=0.001)
    run(tmp_path, fault, Fault(kind="drop", stage="reward", times=1), reward=ALONE)
    before = [record["fault"] for record in struck_faults(tmp_path)]
    assert sorted(before) == [0, 0, 0, 1]
    (tmp_path / "faults" / "000.001.taken").unlink()  # as if it had struck twice so far
    script = (
        "import asyncio, pathlib; from dataflow.config import Fault; from tests.run.toy import run_toy\n"
        f"fault = Fault.model_validate_json({fault.model_dump_json()!r})\n"
        f"patient = {{name: {{'deadline_s': 60}} for name in {STAGES}}}\n"
        f"asyncio.run(run_toy(pathlib.Path({str(tmp_path)!r}), [fault], windows=2, **patient))\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=100)
    assert sorted(record["fault"] for record in struck_faults(tmp_path)) == [0, 0, 0, 0, 1]


def test_a_fault_that_may_strike_without_limit_strikes_every_time(tmp_path: Path) -> None:
    ran = run(tmp_path, Fault(kind="raise", stage="reward", uid="0-1", greedy=True, times=None), reward=ALONE)
    assert len(struck_faults(tmp_path)) == 10  # max_attempts of these stages
    assert ran.outcomes()["0-1", True] == "failed: reward"
    assert ran.settled == {
        "baseline failed: reward": 1,
        "sampled dropped: missing baseline: greedy session failed": 2,
        "sampled trained": 6,
        "baseline used as baseline": 3,
    }


def test_a_worker_that_breaks_when_all_work_is_done_does_not_fail_the_run(tmp_path: Path, calm: Ran) -> None:
    late = Fault(kind="late", stage="reward", window=1, seconds=6)
    broken = Fault(kind="kill", stage="reward", window=1, where="reported", times=None)
    ran = run(tmp_path, late, broken, reward=SOON)
    assert ran.status.finished
    assert ran.update.weights == calm.update.weights
    assert struck_faults(tmp_path)[-1]["delivery"] == 0  # the late one, whose work others had done
    assert not any(ran.left.values())


def test_the_stage_with_one_owner_is_left_alone(tmp_path: Path, calm: Ran) -> None:
    fault = Fault(kind="kill", stage="update")
    with pytest.raises(ConfigError, match=r"faults\[0\]\.stage: 'update' has one owner"):
        check_faults([fault], pipeline_of(Update(StageConfig())))
    assert run(tmp_path, fault).update.weights == calm.update.weights
    assert struck_faults(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "kill", "stage": "rewards"}, r"stage: there is no stage 'rewards'; the stages are: source, rollout"),
        ({"kind": "kill", "stage": "reward", "window": 6}, r"window: there is no window 6; the run has 6"),
        ({"kind": "kill", "stage": "source", "uid": "0-1"}, r"uid: stage 'source' fills whole windows"),
        ({"kind": "kill", "stage": "source", "greedy": False}, r"greedy: stage 'source' fills whole windows"),
        ({"kind": "kill", "stage": "advantage", "greedy": True}, r"greedy: stage 'advantage' never works on greedy"),
        ({"kind": "slow", "stage": "reward"}, r"seconds: a fault of kind 'slow' takes some; it is 0"),
        ({"kind": "late", "stage": "reward"}, r"seconds: a fault of kind 'late' takes some; it is 0"),
        ({"kind": "drop", "stage": "reward", "seconds": 1}, r"seconds: a fault of kind 'drop' takes none"),
        ({"kind": "drop", "stage": "reward", "where": "written"}, r"where: a fault of kind 'drop' has one place"),
    ],
)
def test_a_fault_that_could_not_strike_is_refused_with_its_key_and_the_reason(fault: dict[str, Any], said: str) -> None:
    pipeline = pipeline_of(Update(StageConfig()))
    good = Fault(kind="hang", stage="reward")
    with pytest.raises(ConfigError, match=r"faults\[1\]\." + said):
        check_faults([good, Fault.model_validate(fault)], pipeline)
    check_faults([good], pipeline)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_is_drawn_from_its_seed_and_no_unit_is_struck_so_often_that_it_is_given_up(seed: int) -> None:
    pipeline = pipeline_of(Update(StageConfig()), 6, source={"placement": "light"}, reward={"placement": "light"})
    faults = draw_storm(pipeline, 5.0, seed, 24)
    assert len(faults) == 24
    assert faults == draw_storm(pipeline, 5.0, seed, 24) != draw_storm(pipeline, 5.0, seed + 1, 24)
    check_faults(faults, pipeline)
    process = {"source": "light", "reward": "light"}
    apart = [(process.get(fault.stage, fault.stage), fault.window) for fault in faults if fault.kind in APART]
    assert len(set(apart)) == len(apart)
    once = [(fault.kind, fault.stage, fault.window) for fault in faults]
    assert len(set(once)) == len(once)


def test_a_storm_that_finds_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"60 faults are too many for 5 stages in 2 windows.*draw fewer"):
        draw_storm(pipeline_of(Update(StageConfig()), 2), 5.0, 0, 60)


def test_the_comparison_names_the_first_row_that_differs(tmp_path: Path, calm: Ran) -> None:
    fault = Fault(kind="raise", stage="reward", uid="1-1", greedy=True, times=None)
    found = violations(run(tmp_path, fault).view, calm.view, COLUMNS)
    assert len(found) == 2
    assert found[0].startswith("settled units: ")
    assert found[1] == (
        "toy/train/000001, uid 1-1, session 0: outcome is 'dropped: missing baseline: greedy session failed'; "
        "expected 'trained'"
    )
