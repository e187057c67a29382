"""Hundreds of small runs in memory, each under a storm of faults: what they come to is what a calm run comes to."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
import torch  # noqa: F401  here, so that no stage's deadline passes while it is imported

from dataflow.batch import address
from dataflow.config import Fault
from dataflow.stage import StageConfig
from dataflow.testing.faults import struck_faults
from dataflow.testing.storm import Kind, Where, draw_storm, violations
from tests.run.toy import LEASE_S, PROMPTS, SAMPLED, Ran, Update, pipeline_of, run_toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
T = TypeVar("T")

WINDOWS, FAULTS = 6, 20
SEEDS, BESIDE = 160, 10  # of storms alone, and beside each set of faults that last: two hundred in all
TOGETHER = 40  # runs in one event loop: most of a run's time is spent on waiting for deadlines
STAGES = ("source", "rollout", "reward", "baseline_join", "advantage")


def together(runs: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Run coroutines in one event loop, with threads for all the writes that are late."""

    async def gather() -> list[T]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3 * len(runs)))
        return await asyncio.gather(*(run() for run in runs))

    handler = signal.getsignal(signal.SIGUSR1)  # each run's console sets one
    try:
        return asyncio.run(gather())
    finally:
        signal.signal(signal.SIGUSR1, handler)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that no fault struck."""
    return asyncio.run(run_toy(tmp_path_factory.mktemp("calm"), windows=WINDOWS))


def storm(seed: int) -> list[Fault]:
    """Twenty faults for a run of the test's stages."""
    return draw_storm(pipeline_of(Update(StageConfig()), WINDOWS), LEASE_S, seed, FAULTS)


def problems(ran: Ran, expected: Ran, faults: Sequence[Fault]) -> list[str]:
    """What a run under faults came to otherwise than the other, and what later stages read that was not accepted."""
    found = []
    ledger = ran.status.ledger
    if not ledger.balanced or any(ledger.in_flight.values()):
        found.append(f"ledger {ledger}")
    if ran.settled != expected.settled:
        found.append(f"{ran.settled} where {expected.settled} was expected")
    if [unit.numbers for unit in ran.update.trained] != [unit.numbers for unit in expected.update.trained]:
        found.append("other units were trained on, or with other rewards, baselines or advantages")
    if ran.update.weights != expected.update.weights:
        found.append("other weights")
    if any(ran.left.values()):
        found.append(f"left in the queue: {ran.left}")
    struck = {record["fault"] for record in struck_faults(ran.view.path)}
    found += [f"did not strike: {fault}" for number, fault in enumerate(faults) if number not in struck]
    return found + unaccepted_reads(ran)


def unaccepted_reads(ran: Ran) -> list[str]:
    """Values that a stage read and that are not the ones of the accepted delivery: each call writes its own."""
    events = ran.events()
    done = Counter((event["unit"], event["stage"]) for event in events if event["outcome"] == "done")
    found = [f"accepted {times} times: {pair}" for pair, times in done.items() if times > 1]
    accepted = {(e["unit"], e["stage"]): e["delivery"] for e in events if e["outcome"] == "done"}
    engine, info = ran.written("rollout", "engine"), ran.written("reward", "reward_info")
    for unit, stage in accepted:
        if stage == "reward":
            made = engine[address(f"{unit}/0", accepted[unit, "rollout"])]
            graded = info[address(f"{unit}/0", accepted[unit, "reward"])]
            if json.loads(graded)["read"] != made:
                found.append(f"reward of {unit} read {graded}; accepted was {made}")
    prompts: dict[str, set[str]] = defaultdict(set)
    for trained in ran.update.trained:
        unit = trained.unit.id
        prompts[trained.unit.window] |= {trained.prompt, json.loads(trained.engine)["read"]}
        expected = tuple(
            column[address(f"{unit}/0", accepted[unit, stage])]
            for stage, column in (("rollout", engine), ("reward", info))
        )
        if (trained.engine, trained.reward_info) != expected:
            found.append(f"update read {trained}; accepted were {expected}")
    found += [
        f"prompts of {window} are of several calls: {calls}" for window, calls in prompts.items() if len(calls) > 1
    ]
    return found


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_a_storm_of_faults_of_all_kinds_leaves_no_trace(tmp_path: Path, calm: Ran, first: int) -> None:
    seeds = range(first, first + TOGETHER)
    storms = {seed: storm(seed) for seed in seeds}
    runs = together([partial(run_toy, tmp_path / str(seed), storms[seed], windows=WINDOWS) for seed in seeds])
    found = {seed: problems(ran, calm, storms[seed]) for seed, ran in zip(seeds, runs, strict=True)}
    assert {seed: wrong for seed, wrong in found.items() if wrong} == {}
    for faults in storms.values():
        assert len(faults) == FAULTS
        assert {fault.kind for fault in faults} == set(get_args(Kind))
        assert {fault.where for fault in faults if fault.kind == "kill"} == set(get_args(Where))
    assert {fault.stage for faults in storms.values() for fault in faults} == set(STAGES)
    # Else nothing of this was put to the test: reports came too late, and rows were written that nobody read.
    assert all(ran.status.ledger.late and ran.status.ledger.redelivered for ran in runs)
    assert sum(len(ran.written("reward", "reward_info")) for ran in runs) > len(runs) * WINDOWS * PROMPTS * (
        SAMPLED + 1
    )
    assert violations(runs[0].view, calm.view, ("uid", "outcome", "reward", "advantages", "baseline")) == []


# Faults that strike at every attempt: (stage, whether its greedy units; None is both), each in a window of its own.
LASTING = [
    [("rollout", True), ("reward", False), ("advantage", None)],
    [("rollout", False), ("reward", None), ("baseline_join", None)],
    [("rollout", None), ("reward", True), ("advantage", None)],
    [("baseline_join", None), ("rollout", True), ("reward", True)],
]


def lasting(places: Sequence[tuple[str, bool | None]]) -> list[Fault]:
    """A fault of kind `raise` at each place, which never ends: the first in window 1, for its first uid, and so on."""
    return [
        Fault(kind="raise", stage=stage, greedy=greedy, window=window, uid=f"{window}-0", times=None)
        for window, (stage, greedy) in enumerate(places, start=1)
    ]


def outcomes(faults: Sequence[Fault]) -> dict[tuple[str, bool], str]:
    """What becomes of the greedy and of the sampled units of each uid, by the rule of docs/model.md."""
    uids = [f"{window}-{prompt}" for window in range(WINDOWS) for prompt in range(PROMPTS)]
    expected = {(uid, greedy): "used as baseline" if greedy else "trained" for uid in uids for greedy in (True, False)}
    for fault in faults:
        assert fault.uid is not None
        greedy, sampled = (fault.uid, True), (fault.uid, False)
        alone = fault.stage in ("rollout", "reward")
        if not alone or not fault.greedy:
            expected[sampled] = f"failed: {fault.stage}"
        if alone and fault.greedy is not False:
            expected[greedy] = f"failed: {fault.stage}"
        if fault.greedy:
            expected[sampled] = "dropped: missing baseline: greedy session failed"
        elif fault.stage == "baseline_join" or fault.greedy is False:
            expected[greedy] = "dropped: unused baseline"
    return expected


def test_a_storm_beside_faults_that_last_costs_the_struck_units_alone(tmp_path: Path) -> None:
    # A generator that raises ends all that it was given, so a claim of rollout is one unit here.
    alone = {"rollout": {"batch_rows": 1}}
    fatal = [lasting(places) for places in LASTING]
    faults = {
        (case, seed): storm(seed) + fatal[case] for case in range(len(fatal)) for seed in range(SEEDS, SEEDS + BESIDE)
    }
    faults |= {(case, None): fatal[case] for case in range(len(fatal))}
    runs = dict(
        zip(
            faults,
            together(
                [
                    partial(run_toy, tmp_path / f"{number}", mine, windows=WINDOWS, **alone)
                    for number, mine in enumerate(faults.values())
                ]
            ),
            strict=True,
        )
    )
    for (case, seed), ran in runs.items():
        assert ran.outcomes() == outcomes(fatal[case]), (case, seed)
    found = {place: problems(ran, runs[place[0], None], faults[place]) for place, ran in runs.items()}
    assert {place: wrong for place, wrong in found.items() if wrong} == {}
