"""Advantage: lays sessions out as padded rows, calls a pure estimator, and cuts the result into turns again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from dataflow.batch import Batch, Unit
from dataflow.errors import Drop, RunError
from dataflow.stage import Stage, StageConfig, StageContext, import_object
from schemas.catalog import columns
from stages.algorithms.catalog import KL_KINDS
from stages.algorithms.returns import place_rewards, session_return
from stages.estimators import RewardKeys, check_reward_keys, resolve, weights_of
from stages.names import known
from stages.return_mean import RunningMeans

TOKEN_COLUMNS = {
    "log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "values": "values",
}
"""Input of an estimator -> the column that it is read from."""


class KlInRewardConfig(StageConfig):
    """A penalty on the distance to the initial policy, as a part of the reward of each token."""

    coef: float = Field(0.001, gt=0)
    """Coefficient."""
    kind: str = "k1"
    """Estimate of the KL: k1, abs, k2 or k3."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return known(value, [kind for kind in KL_KINDS if not kind.endswith("+")], "kinds of KL in the reward")


class AdvantageConfig(StageConfig):
    """Options of the advantage stage."""

    estimator: str = "remax"
    """Name of an estimator in `stages.algorithms.catalog`, or the import path of an `EstimatorNeeds`."""
    options: dict[str, float] = {}
    """Options of the estimator."""
    reward_keys: RewardKeys = []
    """For gdpo: the names in `reward_info` whose numbers are compared, or each with its weight."""
    ema_decay: float = Field(0.9, ge=0, lt=1)
    """Weight of the past in the running mean of rae, per window."""
    max_staleness: int = 0
    """How many of the windows before one may not be trained on yet when it is filled; the running mean leaves them
    out."""
    kl_in_reward: KlInRewardConfig | None = None
    """Penalty on the distance to the initial policy, in the reward of each token; a baseline is of the task alone."""
    filtered: bool = False
    """Whether groups are filtered before; see `stages.filter_groups`."""

    @model_validator(mode="after")
    def _fits_the_estimator(self) -> AdvantageConfig:
        needs = resolve(self.estimator)
        needs.check(self.options)
        check_reward_keys(needs, self.reward_keys)
        return self


@dataclass(frozen=True)
class _Session:
    """One session of a batch: the masks of its turns and of the whole, its token rewards, whether they are known."""

    unit: Unit
    rows: slice
    turns: Sequence[np.ndarray[Any, Any]]
    mask: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    valid: bool


class Advantage(Stage):
    """Computes `advantages` and `returns`. What it waits for and reads follows from the estimator's needs.

    A session whose reward is unknown has no advantage: it takes no part in any statistic and is dropped under its
    reward's status.
    """

    Config = AdvantageConfig
    name = "advantage"
    writes = columns("advantages", "returns")
    batch_rows = 256
    config: AdvantageConfig

    def __init__(self, config: AdvantageConfig) -> None:
        super().__init__(config)
        self._needs = needs = resolve(config.estimator)
        self.granularity = needs.granularity
        self.min_group = needs.min_group
        self.reads = (
            "response_mask",
            "reward",
            "reward_semantics",
            "token_rewards",
            "reward_status",
            *(("baseline",) if needs.greedy_baseline else ()),
            *(("data_source",) if needs.running_mean else ()),
            *(("reward_info",) if "components" in needs.inputs else ()),
            *(column for name, column in TOKEN_COLUMNS.items() if name in self._token_inputs()),
            # Not looked at: what the filter drops must be gone before it costs anything.
            *(("group_spread",) if config.filtered else ()),
        )

    def setup(self, context: StageContext) -> None:
        """Import the estimator, and look where the returns of earlier windows are noted."""
        self._estimate = import_object(self._needs.function, f"estimator {self._needs.name!r}: function")
        self._means = RunningMeans(context.run_dir, self.config.ema_decay)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Estimate the advantages of a batch's sessions.

        Raises:
            ValueError: A session whose reward is ok has no value, or one of another length, in a token column.
            RunError: Its reward has no number of a name in `reward_keys`.
        """
        sessions = [self._session(batch, unit, rows) for unit, rows in batch.sessions()]
        inputs = self._inputs(batch, sessions)
        options = {**self._needs.options, **self.config.options}
        result = self._estimate(**{name: inputs[name] for name in self._needs.inputs}, **options)
        advantages, returns = result.advantages.numpy(), result.returns.numpy()
        self._report(batch, sessions, advantages)
        if "baseline" in inputs:
            self._report_moments(batch, sessions, inputs["baseline"].tolist())
        few = self._too_few(sessions)
        return {
            "advantages": self._cut(batch, sessions, advantages, few),
            "returns": self._cut(batch, sessions, returns, few),
        }

    @staticmethod
    def _session(batch: Batch, unit: Unit, rows: slice) -> _Session:
        turns = batch["response_mask"][rows]
        rewards = place_rewards(
            batch["reward"][rows], batch["reward_semantics"][rows.start], turns, batch["token_rewards"][rows]
        )
        valid = all(status == "ok" for status in batch["reward_status"][rows])
        return _Session(unit, rows, turns, np.concatenate(turns), rewards, valid)

    def _inputs(self, batch: Batch, sessions: Sequence[_Session]) -> dict[str, Any]:
        """The tensors that the estimator asks for, and those that every one may."""
        import torch

        needs = self._needs
        uids = {uid: place for place, uid in enumerate(dict.fromkeys(one.unit.uid for one in sessions))}
        inputs: dict[str, Any] = {
            "token_rewards": _padded([one.rewards for one in sessions]),
            "mask": _padded([one.mask for one in sessions]),
            "groups": torch.tensor([uids[one.unit.uid] for one in sessions]),
            "valid": torch.tensor([one.valid for one in sessions]),
        }
        for name, column in TOKEN_COLUMNS.items():
            if name in self._token_inputs():
                inputs[name] = _padded([_tokens(batch, column, one) for one in sessions])
        if "baseline" in needs.inputs:
            inputs["baseline"] = torch.tensor(self._baselines(batch, sessions), dtype=torch.float32)
        if "components" in needs.inputs:
            weights = weights_of(self.config.reward_keys)
            found = [[_component(batch, key, one) for key in weights] for one in sessions]
            inputs["components"] = torch.tensor(found, dtype=torch.float32)
            inputs["weights"] = torch.tensor(list(weights.values()), dtype=torch.float32)
        if self.config.kl_in_reward is not None:
            inputs["token_rewards"] = _with_kl(batch, self.config.kl_in_reward, inputs)
        return inputs

    def _token_inputs(self) -> set[str]:
        """Inputs of the estimator, and of the KL penalty."""
        return {*self._needs.inputs, *(("log_probs", "ref_log_probs") if self.config.kl_in_reward else ())}

    def _baselines(self, batch: Batch, sessions: Sequence[_Session]) -> list[float]:
        """What the join found; or the running mean over the windows that are surely trained on, 0 before the first."""
        if self._needs.greedy_baseline:
            return [batch["baseline"][one.rows.start] for one in sessions]
        means = self._means.after(batch.window_index - self.config.max_staleness)
        return [means.get(batch["data_source"][one.rows.start], 0.0) for one in sessions]

    def _too_few(self, sessions: Sequence[_Session]) -> set[str]:
        """Groups in which too few sessions have a reward to be compared with."""
        known: dict[str, int] = {}
        for one in sessions:
            known[one.unit.uid] = known.get(one.unit.uid, 0) + one.valid
        return {uid for uid, count in known.items() if self.min_group > 1 and count < self.min_group}

    def _report(self, batch: Batch, sessions: Sequence[_Session], advantages: Any) -> None:
        moved: dict[str, bool] = {}
        for one, row in zip(sessions, advantages, strict=True):
            used = row[: len(one.mask)][one.mask != 0]
            moved[one.unit.uid] = moved.get(one.unit.uid, False) or bool(np.any(used))
            if one.valid and len(used):
                batch.report({"advantage/abs_mean": float(np.abs(used).mean())}, 1)
        if self.granularity != "row":  # else a uid's sessions may come in several batches
            for moves in moved.values():
                batch.report({"advantage/zero_group_share": not moves}, 1)

    @staticmethod
    def _report_moments(batch: Batch, sessions: Sequence[_Session], baselines: Sequence[float]) -> None:
        """Report per session what tells how much the baseline narrows the returns: R, R² and (R - b)²."""
        for one, baseline in zip(sessions, baselines, strict=True):
            if one.valid and np.any(one.mask):
                total = float(one.rewards.sum(dtype=np.float64))
                moments = {"return/mean": total, "return/square": total**2, "advantage/square": (total - baseline) ** 2}
                batch.report(moments, 1)

    @staticmethod
    def _cut(batch: Batch, sessions: Sequence[_Session], values: Any, few: set[str]) -> list[Any]:
        """From one row per session to one array per turn; what cannot be trained on is dropped by its reason."""
        result: list[Any] = []
        for one, row in zip(sessions, values, strict=True):
            bad = next((f"reward {status}" for status in batch["reward_status"][one.rows] if status != "ok"), None)
            reason = bad or ("partial group" if one.unit.uid in few else None)
            start = 0
            for mask in one.turns:
                result.append(Drop(reason) if reason else row[start : start + len(mask)])
                start += len(mask)
        return result


def _tokens(batch: Batch, column: str, session: _Session) -> np.ndarray[Any, Any]:
    """A token column of one session, ``[T]``; zeros if its reward is unknown, so that it takes no part anyway."""
    if not session.valid:
        return np.zeros(len(session.mask), np.float32)
    for turn, (values, mask) in enumerate(zip(batch[column][session.rows], session.turns, strict=True)):
        if values is None or len(values) != len(mask):
            got = "null" if values is None else f"{len(values)} values"
            raise ValueError(
                f"column {column!r}, uid {session.unit.uid!r}, session {session.unit.session}, turn {turn}: expected a "
                f"value for each of {len(mask)} tokens, got {got}; correct the stage that writes it"
            )
    return np.concatenate(batch[column][session.rows])


def _component(batch: Batch, key: str, session: _Session) -> float:
    """A session's total of one named reward, under the semantics of its rewards; 0 if its reward is unknown."""
    if not session.valid:
        return 0.0
    values = []
    for text in batch["reward_info"][session.rows]:
        info = json.loads(text)
        value = info.get(key)
        if not isinstance(value, int | float):
            numbers = ", ".join(name for name, one in info.items() if isinstance(one, int | float)) or "none"
            raise RunError(
                f"reward_keys: the reward of uid {session.unit.uid!r}, session {session.unit.session} has no number "
                f"{key!r}; its numbers are: {numbers}. Return it beside the score, or correct reward_keys"
            )
        values.append(float(value))
    once = batch["reward_semantics"][session.rows.start] == "trajectory"
    return session_return(values, "trajectory" if once else "step", session.turns)


def _padded(arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Stack 1-D arrays of several lengths into ``[B, T] float32``, zeros behind."""
    import torch

    width = max((len(array) for array in arrays), default=0)
    stacked = np.zeros((len(arrays), width), np.float32)
    for row, array in enumerate(arrays):
        stacked[row, : len(array)] = array
    return torch.from_numpy(stacked)


def _with_kl(batch: Batch, config: KlInRewardConfig, inputs: Mapping[str, Any]) -> Any:
    """Token rewards less the penalty, ``r_t - coef KL_t`` on policy tokens."""
    from stages.algorithms.kl import kl_penalty

    tensors = {name: inputs[name] for name in ("log_probs", "ref_log_probs", "mask")}
    kl = kl_penalty(config.kind, **tensors)
    if tokens := float(inputs["mask"].sum()):
        batch.report({"reward/kl": float(kl.sum()) / tokens}, tokens)
    return inputs["token_rewards"] - config.coef * kl
