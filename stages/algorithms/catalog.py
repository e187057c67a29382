"""What each estimator, loss and aggregation is called, needs, and where it is. Imports no torch.

A pipeline is checked before anything heavy is loaded, so the facts that the check needs stand here and
the mathematics stands in the modules that `function` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EstimatorNeeds:
    """What an advantage estimator asks of the pipeline around it.

    Attributes:
        name: What a config calls it.
        granularity: Which sessions must be there before the first of them can be computed: the session alone
            ("row"), all sessions of its uid ("group"), or all sessions of the update ("window").
        greedy_baseline: Whether each uid needs a greedy session, and the baseline join before it.
        min_group: Fewest sessions of a uid, with a known reward, that give it anything to learn from. A group
            estimator with fewer sessions per prompt than this trains on nothing.
        inputs: Keyword arguments of the function, all required.
        function: ``module:name``. It returns `stages.algorithms.advantages.Advantages`.
        doc: One line, formula included.
    """

    name: str
    granularity: Literal["row", "group", "window"]
    greedy_baseline: bool
    min_group: int
    inputs: tuple[str, ...]
    function: str
    doc: str


@dataclass(frozen=True)
class LossNeeds:
    """What a policy loss asks for.

    Attributes:
        name: What a config calls it.
        options: Optional keyword arguments beside log_probs, old_log_probs, advantages and mask.
        function: ``module:name``. It returns `stages.algorithms.losses.TokenLoss`.
        doc: One line, formula included.
    """

    name: str
    options: tuple[str, ...]
    function: str
    doc: str


@dataclass(frozen=True)
class AggregationNeeds:
    """How token losses become one number.

    Attributes:
        name: The `mode` of `stages.algorithms.losses.aggregate`.
        divisors: Which of its keyword arguments the mode divides by.
        doc: One line, formula included.
    """

    name: str
    divisors: tuple[Literal["tokens", "sequences", "horizon"], ...]
    doc: str


_ADVANTAGES = "stages.algorithms.advantages"
_LOSSES = "stages.algorithms.losses"
_GROUPED = ("token_rewards", "mask", "groups", "valid")

ESTIMATORS: dict[str, EstimatorNeeds] = {
    needs.name: needs
    for needs in (
        EstimatorNeeds(
            name="remax",
            granularity="row",
            greedy_baseline=True,
            min_group=1,
            inputs=("token_rewards", "mask", "valid", "baseline"),
            function=f"{_ADVANTAGES}:remax",
            doc="Return to go minus the total return of the prompt's greedy session: G_t - b.",
        ),
        EstimatorNeeds(
            name="grpo",
            granularity="group",
            greedy_baseline=False,
            min_group=2,
            inputs=_GROUPED,
            function=f"{_ADVANTAGES}:grpo",
            doc="Session return, centred and scaled within its group: (R - mean) / (sample std + 1e-6).",
        ),
        EstimatorNeeds(
            name="dr_grpo",
            granularity="group",
            greedy_baseline=False,
            min_group=2,
            inputs=_GROUPED,
            function=f"{_ADVANTAGES}:dr_grpo",
            doc="GRPO without the division by the standard deviation: R - mean.",
        ),
        EstimatorNeeds(
            name="rloo",
            granularity="group",
            greedy_baseline=False,
            min_group=2,
            inputs=_GROUPED,
            function=f"{_ADVANTAGES}:rloo",
            doc="Session return minus the mean of the other sessions of its group.",
        ),
        EstimatorNeeds(
            name="reinforce",
            granularity="window",
            greedy_baseline=False,
            min_group=1,
            inputs=("token_rewards", "mask", "valid"),
            function=f"{_ADVANTAGES}:reinforce",
            doc="Session return minus the mean over all sessions of the batch.",
        ),
    )
}

LOSSES: dict[str, LossNeeds] = {
    needs.name: needs
    for needs in (
        LossNeeds(
            name="ppo_clip",
            options=("clip_low", "clip_high", "dual_clip"),
            function=f"{_LOSSES}:ppo_clip",
            doc="PPO's clipped ratio with the dual clip: max(-A r, -A clip(r)), at most -A c where A < 0.",
        ),
        LossNeeds(
            name="policy_gradient",
            options=(),
            function=f"{_LOSSES}:policy_gradient",
            doc="-A log pi; no ratio and no clip, so exact for rows of the current policy only.",
        ),
    )
}

AGGREGATIONS: dict[str, AggregationNeeds] = {
    needs.name: needs
    for needs in (
        AggregationNeeds("token-mean", ("tokens",), "Mean over policy tokens; long sessions weigh more."),
        AggregationNeeds("token-sum", (), "Sum over policy tokens."),
        AggregationNeeds("seq-mean-token-sum", ("sequences",), "Mean over sessions of the token sum."),
        AggregationNeeds("seq-mean-token-mean", ("sequences",), "Mean over sessions of the token mean."),
        AggregationNeeds(
            "seq-mean-token-sum-norm",
            ("sequences", "horizon"),
            "Mean over sessions of the token sum, divided by a constant horizon (Dr. GRPO).",
        ),
    )
}
