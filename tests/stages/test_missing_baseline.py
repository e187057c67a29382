"""A uid whose greedy session is killed for good, through the real coordinator, queue and stages, under each policy."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dataflow.batch import Batch, Unit
from dataflow.config import LimitsSection, RunConfig
from dataflow.console import Console
from dataflow.errors import ConfigError, RowError, RunError
from dataflow.inspect import RunView, write_columns
from dataflow.local import run_local
from dataflow.pipeline import Pipeline, StageSpec
from dataflow.service import Status
from dataflow.stage import Outcome, Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.advantage import Advantage, AdvantageConfig
from stages.baseline_join import BaselineJoin, BaselineJoinConfig
from stages.recipes import RLConfig, rl
from stages.return_mean import ReturnMean, returns_file
from stages.reward import Reward, RewardConfig

KILLED = None
UNSCORED = float("nan")
Answers = Sequence[float | None]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what each of its sessions earns: a reward, KILLED in rollout, or UNSCORED."""

    uid: str
    greedy: float | None
    sampled: Answers
    data_source: str = "sums"


class Source(Stage):
    """Fills each window with given prompts."""

    name = "source"
    granularity = "source"
    writes = columns("uid", "__rollout_n__", "__do_sample__", "prompt", "ground_truth", "data_source", "extra")

    def __init__(self, windows: Sequence[Sequence[Prompt]]) -> None:
        super().__init__(StageConfig())
        self.windows = windows

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        rows = [(prompt, sample) for prompt in self.windows[batch.window_index] for sample in (True, False)]
        return {
            "uid": [prompt.uid for prompt, _ in rows],
            "__rollout_n__": [len(prompt.sampled) if sample else 1 for prompt, sample in rows],
            "__do_sample__": [sample for _, sample in rows],
            "prompt": [json.dumps([prompt.greedy, *prompt.sampled]) for prompt, _ in rows],
            "ground_truth": [None] * len(rows),
            "data_source": [prompt.data_source for prompt, _ in rows],
            "extra": ["{}"] * len(rows),
        }


class Rollout(Stage):
    """Answers with what the prompt says each session earns; a session that is killed fails at every attempt."""

    name = "rollout"
    reads = ("prompt",)
    writes = columns("response_text", "response_mask", "sampling", "policy_version_min", "policy_version_max")
    expands = True
    max_attempts = 2

    def __init__(self, *, backwards: bool = False, greedy_version: int = 0) -> None:
        super().__init__(StageConfig())
        self.backwards, self.greedy_version = backwards, greedy_version
        self.attempts: dict[str, int] = {}

    async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
        sessions = list(zip(batch.units, batch["prompt"], strict=True))
        for unit, prompt in reversed(sessions) if self.backwards else sessions:
            self.attempts[unit.id] = self.attempts.get(unit.id, 0) + 1
            greedy, *sampled = json.loads(prompt)
            yield unit, self.answer(unit, greedy if unit.is_baseline else sampled[unit.session])

    def answer(self, unit: Unit, earns: float | None) -> Outcome:
        if earns is KILLED:
            return RowError("killed")
        version = self.greedy_version if unit.is_baseline else 0
        return {
            "response_text": [str(earns)],
            "response_mask": [[1]],
            "sampling": [json.dumps({"temperature": 0.0 if unit.is_baseline else 1.0, "n": 1, "max_tokens": 1})],
            "policy_version_min": [version],
            "policy_version_max": [version],
        }


class Update(Stage):
    """Remembers what it was given to train on."""

    name = "update"
    granularity = "window"
    reads = ("advantages", "baseline_source")
    writes = columns("trained_version")
    one_owner = True

    def __init__(self) -> None:
        super().__init__(StageConfig())
        self.windows: dict[int, dict[str, float]] = {}
        self.sources: dict[str, str] = {}

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        assert not any(unit.is_baseline for unit in batch.units)
        names = [f"{unit.uid}{unit.session}" for unit in batch.units]
        values = [float(array[0]) for array in batch["advantages"]]
        self.windows[batch.window_index] = dict(zip(names, values, strict=True))
        self.sources |= dict(zip(names, batch["baseline_source"], strict=True))
        return {"trained_version": [batch.window_index + 1] * len(batch)}


@dataclass(frozen=True)
class Given(StageSpec):
    """The specification of a stage that is there already."""

    stage: Stage = field(default_factory=Update)

    def build(self) -> Stage:
        return self.stage


@dataclass
class Result:
    """What came of a run."""

    status: Status
    update: Update
    rollout: Rollout
    view: RunView

    @property
    def settled(self) -> dict[str, int]:
        """How many units came to what: "kind outcome" -> units."""
        assert self.status.ledger.balanced
        return {f"{kind} {outcome}": count for (kind, outcome), count in self.status.ledger.settled.items()}

    def shares(self, window: int) -> dict[str, float]:
        """Source of the baseline -> share of the joined sessions of a window, without the zeros."""
        metrics = self.view.metrics().to_pylist()[window]
        found = {
            name.partition("/")[2]: share for name, share in metrics.items() if name.startswith("baseline_source/")
        }
        return {source: share for source, share in found.items() if share}


class SharedReward(Reward):
    """The real reward; its process is started and ended by the fixture, once for all runs."""

    def setup(self, context: StageContext) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedReward]:
    """Grades a response with the number that it says; NaN is no reward."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        "def reward(response, ground_truth):\n    return None if response == 'nan' else float(response)\n",
        encoding="utf-8",
    )
    stage = SharedReward(RewardConfig(function=f"{path}:reward"))
    Reward.setup(stage, StageContext("test", path.parent, "reward-0", 0))
    yield stage
    Reward.close(stage)


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, reward: SharedReward) -> Run:
    """Train on windows of prompts with remax in this process; the options are those of the join."""

    def start(
        *windows: Sequence[Prompt], rollout: Rollout | None = None, max_staleness: int = 0, **options: Any
    ) -> Result:
        config = BaselineJoinConfig(ema_decay=0.5, max_staleness=max_staleness, **options)
        rollout, update = rollout or Rollout(), Update()
        stages: list[Stage] = [
            Source(windows),
            rollout,
            reward,
            BaselineJoin(config),
            Advantage(AdvantageConfig(estimator="remax")),
            *([ReturnMean(StageConfig())] if "ema" in config.on_missing else []),
            update,
        ]
        specs = tuple(Given(use="a test", stage=stage) for stage in stages)
        pipeline = Pipeline(specs, windows=len(windows), rows_per_window=1000, max_staleness=max_staleness)
        pipeline.check()
        write_columns(tmp_path, pipeline.columns.values())
        run_config = RunConfig(limits=LimitsSection(max_failures=None))
        with Console(tmp_path, len(windows), run_config.limits, io.StringIO()) as console:
            status = run_local(run_config, pipeline, tmp_path, "test", console)
        return Result(status, update, rollout, RunView(tmp_path))

    return start


# One uid, b, loses its greedy session in the third window. Beside it, d has one. Before it, windows of a and of c.
A = Prompt("a", 0.5, [1.0, 0.0, 0.5])  # mean 0.5
C = Prompt("c", 1.0, [1.0, 1.0, 0.25])  # mean 0.75
B = Prompt("b", KILLED, [1.0, 0.25, 0.25])
D = Prompt("d", 0.25, [1.0, 0.0, 0.5])
AGAINST_GREEDY = {"d0": 0.75, "d1": -0.25, "d2": 0.25}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("on_missing", "expected", "source"),
    [
        # b_i is the mean of the other two: 0.25, 0.625, 0.625.
        (["leave_one_out", "drop"], {"b0": 0.75, "b1": -0.375, "b2": -0.375}, "leave_one_out"),
        # The mean of 1, 0.25, 0.25 is 0.5: the advantages of leave_one_out times 1 - 1/3.
        (["group_mean", "drop"], {"b0": 0.5, "b1": -0.25, "b2": -0.25}, "group_mean"),
        # Half of the mean of window 0 and half of that of window 1: 0.625.
        (["ema", "drop"], {"b0": 0.375, "b1": -0.375, "b2": -0.375}, "ema"),
        (["zero"], {"b0": 1.0, "b1": 0.25, "b2": 0.25}, "zero"),
        (["drop"], {}, "missing"),
    ],
)
def test_B01_one_uids_greedy_row_killed_for_good_gives_the_advantages_of_the_policy_and_changes_no_other_uid(
    run: Run, on_missing: list[str], expected: dict[str, float], source: str, backwards: bool
) -> None:
    result = run([A], [C], [B, D], rollout=Rollout(backwards=backwards), on_missing=on_missing)
    assert result.update.windows == {
        0: {"a0": 0.5, "a1": -0.5, "a2": 0.0},
        1: {"c0": 0.0, "c1": 0.0, "c2": -0.75},
        2: expected | AGAINST_GREEDY,
    }
    assert result.rollout.attempts["test/train/000002/b#greedy/0"] == 2
    dropped = {} if expected else {"sampled dropped: missing baseline: greedy session failed": 3}
    assert result.settled == {
        "sampled trained": 12 - sum(dropped.values()),
        "baseline used as baseline": 3,
        "baseline failed: rollout": 1,
        **dropped,
    }
    assert [result.shares(window) for window in range(3)] == [{"greedy": 1.0}] * 2 + [{"greedy": 0.5, source: 0.5}]
    assert {result.update.sources[name] for name in expected} <= {source}


@pytest.mark.parametrize("chain", [["fail"], ["ema", "fail"]])
def test_B01_under_fail_the_run_stops_and_names_the_uid(run: Run, chain: list[str]) -> None:
    with pytest.raises(RunError, match=r"no baseline for uid 'b': greedy session failed.*killed"):
        run([B], on_missing=chain)


def test_B01_the_uid_that_has_a_greedy_session_is_trained_on_and_the_other_is_named(run: Run) -> None:
    result = run([Prompt("a", 1.0, [1.0, 0.0]), Prompt("b", KILLED, [1.0, 1.0])])
    assert result.update.windows == {0: {"a0": 0.0, "a1": -1.0}}
    assert result.settled["sampled dropped: missing baseline: greedy session failed"] == 2


@pytest.mark.parametrize("backwards", [False, True])
def test_siblings_that_were_killed_or_not_scored_count_in_no_mean(run: Run, backwards: bool) -> None:
    prompt = Prompt("b", KILLED, [1.0, KILLED, 0.25, UNSCORED])
    result = run([prompt], rollout=Rollout(backwards=backwards), on_missing=["leave_one_out", "drop"])
    assert result.update.windows == {0: {"b0": 0.75, "b2": -0.75}}  # each against the other: 1 - 0.25
    assert result.settled == {
        "sampled trained": 2,
        "sampled failed: rollout": 1,
        "sampled dropped: reward abstain": 1,
        "baseline failed: rollout": 1,
    }


def test_a_lone_survivor_goes_to_the_next_policy_of_the_chain(run: Run) -> None:
    chain = ["leave_one_out", "ema", "drop"]
    alone = Prompt("b", KILLED, [1.0, KILLED, UNSCORED])
    result = run([A], [alone], on_missing=chain)
    assert result.update.windows[1] == {"b0": 0.5}  # 1 - the mean of window 0
    assert result.shares(1) == {"ema": 1.0}


def test_the_running_mean_is_of_the_same_data_source_alone(run: Run) -> None:
    other = Prompt("b", KILLED, [1.0, 0.25], data_source="words")
    result = run([A], [other, D], on_missing=["ema", "zero"])
    assert result.update.windows[1] == {"b0": 1.0, "b1": 0.25} | AGAINST_GREEDY
    assert result.shares(1) == {"greedy": 0.6, "zero": 0.4}


@pytest.mark.parametrize("backwards", [False, True])
def test_the_running_mean_is_of_the_sessions_that_are_trained_on_whatever_the_timing(
    tmp_path: Path, run: Run, backwards: bool
) -> None:
    # In the first window there is no running mean: b is dropped, and does not count.
    result = run([A, B], [B], rollout=Rollout(backwards=backwards), on_missing=["ema", "drop"])
    noted = json.loads(returns_file(tmp_path, 0).read_text(encoding="utf-8"))
    assert noted == {"sums": [1.5, 3]}
    assert result.update.windows[1] == {"b0": 0.5, "b1": -0.25, "b2": -0.25}


def test_one_step_off_the_running_mean_leaves_out_the_window_that_may_not_be_trained_on_yet(run: Run) -> None:
    result = run([A], [C], [B], max_staleness=1, max_version_gap=1, on_missing=["ema", "drop"])
    assert result.update.windows[2] == {"b0": 0.5, "b1": -0.25, "b2": -0.25}  # against window 0 alone: 0.5


@pytest.mark.parametrize(
    ("on_missing", "expected"),
    [("drop", {}), (["leave_one_out", "drop"], {"a0": 1.0, "a1": -1.0, "b0": -1.0, "b1": 1.0})],
)
def test_B08_a_greedy_session_of_another_policy_version_is_handled_by_the_policy(
    run: Run, on_missing: str | list[str], expected: dict[str, float]
) -> None:
    prompts = [Prompt("a", 1.0, [1.0, 0.0]), Prompt("b", 0.0, [0.0, 1.0])]
    result = run(prompts, rollout=Rollout(greedy_version=1), on_missing=on_missing)
    assert result.update.windows.get(0, {}) == expected
    dropped = {} if expected else {"sampled dropped: missing baseline: policy versions are too far apart": 4}
    assert {name: count for name, count in result.settled.items() if "missing" in name} == dropped


def test_B07_equal_sampled_rewards_beside_another_greedy_one_are_trained_on(run: Run) -> None:
    result = run([Prompt("a", 0.0, [1.0] * 4), Prompt("b", 1.0, [0.0])])
    assert result.update.windows == {0: {"a0": 1.0, "a1": 1.0, "a2": 1.0, "a3": 1.0, "b0": -1.0}}


@pytest.mark.parametrize("on_missing", ["drop", "fail", ["leave_one_out", "fail"]])
@pytest.mark.parametrize("lost", [KILLED, UNSCORED])
def test_a_uid_whose_sampled_sessions_are_all_lost_is_named_and_its_greedy_session_is_never_trained_on(
    run: Run, lost: float | None, on_missing: str | list[str]
) -> None:
    result = run([A, Prompt("b", 0.5, [lost, lost])], on_missing=on_missing)
    assert result.update.windows == {0: {"a0": 0.5, "a1": -0.5, "a2": 0.0}}
    outcome = "sampled failed: rollout" if lost is KILLED else "sampled dropped: reward abstain"
    assert result.settled == {
        "sampled trained": 3,
        outcome: 2,
        "baseline used as baseline": 1,
        "baseline dropped: unused baseline": 1,
    }


@pytest.mark.parametrize(
    ("on_missing", "granularity", "notes"),
    [
        (["drop"], "join", False),
        (["ema", "drop"], "join", True),
        (["leave_one_out", "drop"], "group_join", False),
        (["leave_one_out", "ema", "drop"], "group_join", True),
    ],
)
def test_the_recipe_waits_for_groups_and_notes_returns_where_the_chain_needs_it(
    on_missing: list[str], granularity: str, notes: bool
) -> None:
    pipeline = rl.build(RLConfig.model_validate({"max_staleness": 2, "baseline": {"on_missing": on_missing}}))
    assert pipeline.stages["baseline_join"].granularity == granularity
    assert ("return_mean" in pipeline.stages) == notes
    assert ("return_mean" in pipeline.plans["update"].depends_on) == notes
    join = pipeline.stages["baseline_join"].config
    assert isinstance(join, BaselineJoinConfig)
    assert (join.max_staleness, join.max_version_gap) == (2, 2)


@pytest.mark.parametrize("policy", ["leave_one_out", "group_mean"])
def test_a_policy_that_needs_siblings_is_refused_where_a_prompt_has_one_session(policy: str) -> None:
    with pytest.raises(ValidationError, match=rf"'{policy}' compares a session with others.*rollout\.n is 1"):
        RLConfig.model_validate({"rollout": {"n": 1}, "baseline": {"on_missing": [policy, "drop"]}})


def test_B06_a_pipeline_that_lost_its_join_is_refused_by_the_name_of_the_column() -> None:
    stages: list[Stage] = [Source([[A]]), Rollout(), Reward(RewardConfig()), Advantage(AdvantageConfig()), Update()]
    pipeline = Pipeline(tuple(Given(use="a test", stage=stage) for stage in stages), windows=1, rows_per_window=10)
    with pytest.raises(ConfigError, match=r"'advantage' reads column 'baseline'.*written by stage 'baseline_join'"):
        pipeline.check()
