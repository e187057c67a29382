"""The baseline join: which greedy session is the baseline of which sampled session, and if none, why.

A pure function over plain records, joined by uid alone. A session of another decoding, policy version or
budget is not a baseline, and what cannot be had is said, never replaced by 0. What then stands in for it is
a policy of its own (`fallback`). Imports numpy, not torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stages.algorithms.returns import Semantics, session_return

BaselineSource = Literal["greedy", "leave_one_out", "group_mean", "ema", "zero"]
"""Where a baseline comes from: the greedy session of the uid, or a fallback of `stages.algorithms.fallback`."""
SOURCES: tuple[BaselineSource, ...] = get_args(BaselineSource)


@dataclass(frozen=True, eq=False)
class Turn:
    """One trajectory row, as far as the join reads it.

    Attributes:
        turn: Its place in the session, from 0.
        reward: Task reward; None or NaN if unknown.
        status: `reward_status` of the row; "ok" is the only good one.
        mask: ``[T]``, 1 = policy token.
        sampling: The sampling parameters that the engine was given, as recorded (the decoded JSON).
        version_min: Oldest policy version that drew a token of the row.
        version_max: Newest policy version that drew a token of the row.
        token_rewards: ``[T]``, under ``token`` semantics.
    """

    turn: int
    reward: float | None
    status: str
    mask: NDArray[Any]
    sampling: Mapping[str, object]
    version_min: int
    version_max: int
    token_rewards: NDArray[Any] | None = None

    @property
    def policy_tokens(self) -> int:
        """How many tokens of the turn the policy drew."""
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, eq=False)
class Session:
    """One generation run of a prompt: its turns, or its failure.

    Attributes:
        uid: The draw of the prompt; what the join joins by.
        session: Number of the session within its prompt row.
        semantics: Reward semantics of its turns.
        turns: Given in any order, kept in turn order.
        failure: Why the session has no rows to show; empty if it did not fail.

    Raises:
        ValueError: The turns are not 0..K-1, each once; or there are none and no failure.
    """

    uid: str
    session: int
    semantics: Semantics
    turns: Sequence[Turn] = field(default=())
    failure: str = ""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.turns, key=lambda turn: turn.turn))
        numbers = [turn.turn for turn in ordered]
        if numbers != list(range(len(numbers))) or not (numbers or self.failure):
            raise ValueError(
                f"uid {self.uid!r}, session {self.session}: expected turns 0, 1, .. once each, got {numbers}"
            )
        object.__setattr__(self, "turns", ordered)

    @property
    def status(self) -> str:
        """Status of its reward: "ok", or that of the first turn that is not."""
        return next((turn.status for turn in self.turns if turn.status != "ok"), "ok")

    @property
    def total_return(self) -> float:
        """The sum of all turns' rewards, or the one reward of the trajectory; see `session_return`."""
        return session_return(
            [turn.reward for turn in self.turns],
            self.semantics,
            [turn.mask for turn in self.turns],
            [turn.token_rewards for turn in self.turns],
        )


class MissingReason(StrEnum):
    """Why a sampled session has no greedy baseline. Counted and shown under these texts."""

    NO_SESSION = "no greedy session"
    SEVERAL = "several greedy sessions"
    FAILED = "greedy session failed"
    NOT_GREEDY = "recorded sampling is not greedy"
    EMPTY = "greedy session has no policy token"
    REWARD = "greedy reward is not ok"
    SEMANTICS = "reward semantics differ"
    VERSION = "policy versions are too far apart"
    BUDGET = "cut off by another max_tokens"


@dataclass(frozen=True)
class Baseline:
    """What the return of a sampled session is compared with: a total return, or what stands in for one."""

    value: float
    source: BaselineSource = "greedy"


@dataclass(frozen=True)
class Missing:
    """No baseline, and why: a reason to count by and the values that decided it."""

    reason: MissingReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


def is_greedy(sampling: Mapping[str, object]) -> bool:
    """Whether recorded sampling parameters prove that every token was the most likely one.

    They do if the temperature is recorded as 0 and nothing recorded says otherwise (``greedy`` false, or more
    than one sample). At temperature 0 top-p and top-k have no effect. What is not recorded proves nothing.
    """
    temperature = sampling.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return False
    return temperature == 0 and sampling.get("greedy", True) is True and sampling.get("n", 1) == 1


def join_baselines(
    sampled: Sequence[Session], greedy: Iterable[Session], *, max_version_gap: int
) -> list[Baseline | Missing]:
    """Find the baseline of each sampled session, by uid.

    Neither the order of sessions nor that of their turns matters. Uids that nobody sampled are ignored.

    Args:
        sampled: Sessions that did not fail.
        greedy: Sessions that were asked to be greedy, failed ones included.
        max_version_gap: Largest accepted distance, in policy versions, between a token of the greedy session
            and a token of the sampled one.

    Returns:
        One result per sampled session, in the order of `sampled`.
    """
    by_uid: dict[str, list[Session]] = defaultdict(list)
    for session in greedy:
        by_uid[session.uid].append(session)
    judged = {uid: _judge(sessions) for uid, sessions in by_uid.items()}
    results: list[Baseline | Missing] = []
    for session in sampled:
        verdict = judged.get(session.uid, Missing(MissingReason.NO_SESSION))
        if isinstance(verdict, Baseline):
            verdict = _mismatch(session, by_uid[session.uid][0], max_version_gap) or verdict
        results.append(verdict)
    return results


def _judge(sessions: Sequence[Session]) -> Baseline | Missing:
    """What the greedy sessions of one uid are worth by themselves, whoever asks."""
    if len(sessions) > 1:
        return Missing(MissingReason.SEVERAL, f"expected one, got {len(sessions)}")
    session = sessions[0]
    if session.failure:
        return Missing(MissingReason.FAILED, session.failure)
    for turn in session.turns:
        if not is_greedy(turn.sampling):
            return Missing(MissingReason.NOT_GREEDY, f"turn {turn.turn}: {dict(turn.sampling)}")
    if not any(turn.policy_tokens for turn in session.turns):
        return Missing(MissingReason.EMPTY)
    for turn in session.turns:
        if turn.status != "ok":
            return Missing(MissingReason.REWARD, f"turn {turn.turn}: {turn.status}")
    value = session.total_return
    return Baseline(value) if math.isfinite(value) else Missing(MissingReason.REWARD, f"total return is {value}")


def _mismatch(sampled: Session, greedy: Session, max_version_gap: int) -> Missing | None:
    """Why this greedy session, good by itself, cannot be compared with this sampled one."""
    if sampled.semantics != greedy.semantics:
        return Missing(MissingReason.SEMANTICS, f"greedy {greedy.semantics}, sampled {sampled.semantics}")
    ours, theirs = _versions(sampled), _versions(greedy)
    gap = max(theirs[1] - ours[0], ours[1] - theirs[0])
    if gap > max_version_gap:
        return Missing(
            MissingReason.VERSION,
            f"greedy {theirs[0]}..{theirs[1]}, sampled {ours[0]}..{ours[1]}, allowed gap {max_version_gap}",
        )
    return _cut_off(sampled, greedy)


def _versions(session: Session) -> tuple[int, int]:
    return min(turn.version_min for turn in session.turns), max(turn.version_max for turn in session.turns)


def _cut_off(sampled: Session, greedy: Session) -> Missing | None:
    """Whether the greedy session would have gone otherwise under the token budget of the sampled one.

    Budgets are compared at the first turn; those of later turns depend on what was said before.
    """
    ours, theirs = (session.turns[0].sampling.get("max_tokens") for session in (sampled, greedy))
    if ours == theirs:
        return None
    if isinstance(ours, int) and isinstance(theirs, int):
        budget = min(ours, theirs)
        if all(turn.policy_tokens < _own_budget(turn, budget) for turn in greedy.turns):
            return None
    return Missing(MissingReason.BUDGET, f"greedy {theirs}, sampled {ours} tokens")


def _own_budget(turn: Turn, budget: int) -> int:
    own = turn.sampling.get("max_tokens")
    return min(own, budget) if isinstance(own, int) else budget
