"""What each estimator, loss and aggregation is called, needs, and where it is. Imports no torch.

A pipeline is checked before anything heavy is loaded, so the facts that the check needs stand here and
the mathematics stands in the modules that `function` names.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class SelectionNeeds:
    """A choice of tokens that a loss treats apart, made over a whole mini-batch before its micro-batches.

    Attributes:
        function: ``module:name``. It returns ``[B, T] bool``, the loss's argument ``selected``.
        inputs: Keyword arguments of the function, all required.
        options: Its optional keyword arguments, with their defaults.
    """

    function: str
    inputs: tuple[str, ...]
    options: Mapping[str, float]


@dataclass(frozen=True)
class LossNeeds:
    """What a policy loss asks for.

    Attributes:
        name: What a config calls it.
        function: ``module:name``. It returns `stages.algorithms.losses.TokenLoss`.
        doc: One line, formula included.
        options: Keyword arguments beside the tensors, with their defaults; None where a value has to be given.
        ratio: Whether it weighs each token by its ratio to the old policy. If that is the policy that drew the tokens,
            importance weights would count the same ratio twice.
        sequences: Whether it takes ``sequences``, which row belongs to which.
        aggregation: The one aggregation that it is defined with; empty if any will do.
        needs_batch: What is computed over the whole mini-batch first.
    """

    name: str
    function: str
    doc: str
    options: Mapping[str, float | None]
    ratio: bool = True
    sequences: bool = False
    aggregation: str = ""
    needs_batch: SelectionNeeds | None = None

    @property
    def all_options(self) -> dict[str, float | None]:
        """What a config may set, with defaults: options of the loss and of its selection."""
        return {**self.options, **(self.needs_batch.options if self.needs_batch else {})}


@dataclass(frozen=True)
class AggregationNeeds:
    """How token losses become one number.

    Attributes:
        name: The `mode` of `stages.algorithms.aggregation.aggregate`.
        divisors: Which of its keyword arguments the mode divides by.
        doc: One line, formula included.
    """

    name: str
    divisors: tuple[Literal["token_count", "sequence_count", "horizon"], ...]
    doc: str


_ADVANTAGES = "stages.algorithms.advantages"
_LOSSES = "stages.algorithms.losses"
_OF_SEQUENCES = "stages.algorithms.sequence_losses"
_OF_COVARIANCE = "stages.algorithms.covariance_losses"
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
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
            function=f"{_LOSSES}:ppo_clip",
            doc="PPO's clipped ratio with the dual clip: max(-A r, -A clip(r)), at most -A c where A < 0.",
            options={**_CLIP, "dual_clip": 3.0},
        ),
        LossNeeds(
            name="policy_gradient",
            function=f"{_LOSSES}:policy_gradient",
            doc="-A log pi; no ratio and no clip, so exact for rows of the current policy only.",
            options={},
            ratio=False,
        ),
        LossNeeds(
            name="gspo",
            function=f"{_OF_SEQUENCES}:gspo",
            doc="PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios.",
            options={"clip_low": 3e-4, "clip_high": 4e-4},
            sequences=True,
            aggregation="seq-mean-token-mean",
        ),
        LossNeeds(
            name="sapo",
            function=f"{_LOSSES}:sapo",
            doc="A soft gate in place of the clip: -A sigmoid(tau (r - 1)) 4 / tau.",
            options={"tau_positive": 1.0, "tau_negative": 1.05},
            aggregation="seq-mean-token-mean",
        ),
        LossNeeds(
            name="cispo",
            function=f"{_LOSSES}:cispo",
            doc="The clipped ratio as a weight without gradient: -A sg(clip(r)) log pi.",
            options=_CLIP,
        ),
        LossNeeds(
            name="geo_mean",
            function=f"{_OF_SEQUENCES}:geo_mean",
            doc="GMPO: -mean(A) times the geometric mean of a sequence's clipped ratios.",
            options={"clip_low": 0.4, "clip_high": 0.4},
            sequences=True,
            aggregation="seq-mean-token-mean",
        ),
        LossNeeds(
            name="dro",
            function=f"{_LOSSES}:dro",
            doc="-A log pi + beta / 2 (log pi - log pi_old)^2.",
            options={"beta": None},
            ratio=False,
        ),
        LossNeeds(
            name="dppo_tv",
            function=f"{_LOSSES}:dppo_tv",
            doc="-A sg(min(r, max_ratio)) log pi, without tokens whose probability moved too far along A.",
            options={**_CLIP, "max_ratio": 20.0},
        ),
        LossNeeds(
            name="dppo_kl",
            function=f"{_LOSSES}:dppo_kl",
            doc="As dppo_tv, with the KL of 'this token or another' in place of the difference.",
            options={**_CLIP, "max_ratio": 20.0},
        ),
        LossNeeds(
            name="clip_cov",
            function=f"{_OF_COVARIANCE}:clip_cov",
            doc="PPO's clipped ratio without a few random tokens of high covariance between A and log pi.",
            options=_CLIP,
            needs_batch=SelectionNeeds(
                function=f"{_OF_COVARIANCE}:select_clip_cov",
                inputs=("log_probs", "old_log_probs", "advantages", "mask", "row_ids", "seed"),
                options={**_CLIP, "share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
            ),
        ),
        LossNeeds(
            name="kl_cov",
            function=f"{_OF_COVARIANCE}:kl_cov",
            doc="-A r, plus coef |log pi - log pi_old| on the tokens of highest covariance between A and log pi.",
            options={"coef": 0.1},
            needs_batch=SelectionNeeds(
                function=f"{_OF_COVARIANCE}:select_kl_cov",
                inputs=("log_probs", "advantages", "mask", "row_ids"),
                options={"share": 2e-4},
            ),
        ),
    )
}

AGGREGATIONS: dict[str, AggregationNeeds] = {
    needs.name: needs
    for needs in (
        AggregationNeeds("token-mean", ("token_count",), "Mean over policy tokens; long sessions weigh more."),
        AggregationNeeds("token-sum", (), "Sum over policy tokens."),
        AggregationNeeds("seq-mean-token-sum", ("sequence_count",), "Mean over sessions of the token sum."),
        AggregationNeeds("seq-mean-token-mean", ("sequence_count",), "Mean over sessions of the token mean."),
        AggregationNeeds(
            "seq-mean-token-sum-norm",
            ("sequence_count", "horizon"),
            "Mean over sessions of the token sum, divided by a constant horizon (Dr. GRPO).",
        ),
    )
}

KL_KINDS: dict[str, str] = {
    "k1": "d = log pi - log pi_ref: unbiased, may be negative; its gradient has mean 0.",
    "abs": "|d|.",
    "k2": "d^2 / 2: biased; its gradient is that of the KL.",
    "k3": "exp(-d) + d - 1: unbiased, never negative; its gradient is that of the reverse KL.",
    "k1+": "Value of k1, gradient of k2.",
    "abs+": "Value of abs, gradient of k2.",
    "k3+": "Value of k3, gradient of k2.",
}
"""Estimates of KL(pi || pi_ref) per token; see `stages.algorithms.kl.kl_penalty`."""

CORRECTION_LEVELS: dict[str, str] = {
    "token": "A weight for each token.",
    "sequence": "One weight for all tokens of a sequence, the product of theirs.",
}
CORRECTION_MODES: dict[str, str] = {
    "truncate": "Weights above the upper bound become the bound.",
    "mask": "Weights outside the bounds become 0.",
}
REJECTION_KINDS: dict[str, str] = {
    "k1": "log(pi_rollout / pi), bounded on both sides.",
    "k2": "Half the square of k1, bounded above.",
    "k3": "pi / pi_rollout - 1 - log(pi / pi_rollout), bounded above.",
}
REJECTION_LEVELS: dict[str, str] = {
    "token": "Each token by itself.",
    "seq_sum": "A whole sequence, by the sum over its tokens.",
    "seq_mean": "A whole sequence, by the mean over its tokens.",
    "seq_max": "A whole sequence, by its largest token.",
}
