"""What stands in for a missing greedy baseline: named policies, tried in order.

A *chain* is a sequence of policies. The first that applies to a session decides: a number to compare its
return with, or that there is none. ``drop`` and ``fail`` give no number; which of the two it is matters to
the caller alone. `docs/baselines.md` has each policy's formula and bias. Imports neither numpy nor torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Literal, get_args

from stages.algorithms.join import Baseline, Missing, Session

Policy = Literal["leave_one_out", "group_mean", "ema", "zero", "drop", "fail"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
OF_SIBLINGS = frozenset({"leave_one_out", "group_mean"})
"""Policies that need the rewards of all sampled sessions of the uid."""
ALWAYS = frozenset({"zero", "drop", "fail"})
"""Policies that apply to every session: a chain ends with one of them, and with the first."""


def check_chain(chain: Sequence[str]) -> None:
    """Refuse a chain that leaves a case open or has a policy that can never be reached.

    Args:
        chain: Names of known policies.

    Raises:
        ValueError: Says which policy, and what to do.
    """
    if not chain or chain[-1] not in ALWAYS:
        last = f"ends with {chain[-1]!r}, which does not always apply" if chain else "is empty"
        raise ValueError(f"the chain {last}; end it with one of: {', '.join(sorted(ALWAYS))}")
    for place, policy in enumerate(chain):
        if policy in chain[:place]:
            raise ValueError(f"{policy!r} is there twice, and would be tried in vain; remove one")
        if policy in ALWAYS and place < len(chain) - 1:
            raise ValueError(
                f"{policy!r} always applies, so that {', '.join(map(repr, chain[place + 1 :]))} behind it could never "
                "be reached; put it last"
            )


def fall_back(
    sampled: Sequence[Session],
    found: Sequence[Baseline | Missing],
    chain: Sequence[str],
    running_means: Sequence[float | None],
) -> list[Baseline | Missing]:
    """Put in place of each missing baseline what the first policy that applies gives.

    With K sampled sessions of the uid whose reward is ok, of returns R_1 .. R_K:

    - ``leave_one_out``: b_i = Σ_{j≠i} R_j / (K - 1); applies from K = 2 on.
    - ``group_mean``: b_i = Σ_j R_j / K; applies from K = 2 on.
    - ``ema``: the session's entry in `running_means`; applies where that is not None.
    - ``zero``: b_i = 0.

    Siblings of another policy version count: their returns do not depend on the session's own tokens. The order
    of the sessions does not matter, to the last bit.

    Args:
        sampled: The sampled sessions. For a sibling policy: all of each uid that did not fail.
        found: What the join found for each.
        chain: See `check_chain`.
        running_means: For each session, the running mean of its data source, if there is one.

    Returns:
        One result per session. What is still missing has reached ``drop`` or ``fail``; so has every session whose
        own reward is not ok: it has no return to compare, and counts in no mean.
    """
    returns: dict[str, dict[int, float]] = defaultdict(dict)
    for session in sampled:
        if session.status == "ok":
            returns[session.uid][session.session] = session.total_return
    results: list[Baseline | Missing] = []
    for session, result, running in zip(sampled, found, running_means, strict=True):
        if isinstance(result, Missing) and session.status == "ok":
            result = _first_that_applies(chain, returns[session.uid], session.session, running) or result
        results.append(result)
    return results


def _first_that_applies(
    chain: Sequence[str], returns: Mapping[int, float], own: int, running_mean: float | None
) -> Baseline | None:
    others = [value for number, value in returns.items() if number != own]
    for policy in chain:
        if policy == "leave_one_out" and others:
            return Baseline(fsum(others) / len(others), "leave_one_out")
        if policy == "group_mean" and others:
            return Baseline(fsum(returns.values()) / len(returns), "group_mean")
        if policy == "ema" and running_mean is not None:
            return Baseline(running_mean, "ema")
        if policy == "zero":
            return Baseline(0.0, "zero")
    return None


def advance(means: Mapping[str, float], window: Mapping[str, tuple[float, int]], decay: float) -> dict[str, float]:
    """Move running means on by one window: m ← γ m + (1 - γ) mean of the window; the first window's mean as it is.

    Args:
        means: Data source -> running mean so far.
        window: Data source -> (sum, count) of the window's returns; a source without an entry stays as it was.
        decay: γ in [0, 1).
    """
    moved = dict(means)
    for source, (total, count) in window.items():
        mean = total / count
        moved[source] = decay * moved[source] + (1 - decay) * mean if source in moved else mean
    return moved
