"""What each estimator, loss and aggregation is called, needs, and where it is. Imports no torch.

A pipeline is checked before anything heavy is loaded, so the facts that the check needs stand here and
the mathematics stands in the modules that `function` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from stages.names import known

INPUTS: dict[str, str] = {
    "token_rewards": "[B, T] float, the reward of each token; a session's own sum to its return",
    "mask": "[B, T] float, 1 = policy token",
    "groups": "[B] int64, equal for the sessions of one uid",
    "valid": "[B] bool, false = the reward is unknown",
    "baseline": "[B] float, what to compare a return with: greedy, or a running mean",
    "log_probs": "[B, T] float, nats, of the policy that drew the tokens",
    "ref_log_probs": "[B, T] float, nats, of the reference model",
    "sum_pi_squared": "[B, T] float, sum over the vocabulary of the squared probabilities",
    "values": "[B, T] float, what the critic expects from each token on",
    "components": "[B, K] float, a session's total of each named reward",
    "weights": "[K] float, of the named rewards",
}
"""What an estimator may ask for; B sessions, padded to T tokens."""
Granularity = Literal["row", "group", "window"]


@dataclass(frozen=True)
class EstimatorNeeds:
    """What an advantage estimator asks of the pipeline around it.

    An estimator of a user's own is declared by an object of this class, in a module that imports no torch.

    Attributes:
        name: What a config calls it.
        granularity: Which sessions must be there before the first of them can be computed: the session alone
            ("row"), all sessions of its uid ("group"), or all sessions of the update ("window").
        inputs: Keyword arguments of the function, all required: keys of `INPUTS`.
        function: ``module:name``. It returns `stages.algorithms.sessions.Advantages`.
        doc: One line, formula included.
        min_group: Fewest sessions of a uid, with a known reward, that give it anything to learn from. An
            estimator with fewer sessions per prompt than this trains on nothing.
        greedy_baseline: Whether its `baseline` is the return of a greedy session of each uid, which needs the
            baseline join before it.
        running_mean: Whether its `baseline` is the running mean of the returns of earlier windows.
        options: Further keyword arguments, name -> default.
        ranges: Option -> lowest and highest value, both allowed. Without one, any finite number.

    Raises:
        ValueError: The declaration contradicts itself.
    """

    name: str
    granularity: Granularity
    inputs: tuple[str, ...]
    function: str
    doc: str
    min_group: int = 1
    greedy_baseline: bool = False
    running_mean: bool = False
    options: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known(self.granularity, get_args(Granularity), "granularities", f"estimator {self.name!r}: ")
        for tensor in self.inputs:
            known(tensor, INPUTS, "inputs", f"estimator {self.name!r}: ")
        if ("baseline" in self.inputs) != (self.greedy_baseline != self.running_mean):
            raise ValueError(
                f"estimator {self.name!r}: an estimator with the input 'baseline' says where it is from, by one of "
                "greedy_baseline and running_mean, and no other does"
            )
        for option in self.ranges:
            known(option, self.options, "options", f"estimator {self.name!r}: ranges: ")
        self.check(self.options)

    def check(self, options: Mapping[str, float]) -> None:
        """Refuse options that the function could not take.

        Raises:
            ValueError: Names the option, what is allowed and what came.
        """
        for name, value in options.items():
            known(name, self.options, f"options of {self.name}")
            lowest, highest = self.ranges.get(name, (-math.inf, math.inf))
            if not (lowest <= value <= highest and math.isfinite(value)):
                raise ValueError(f"{name}: {self.name} expects a number in [{lowest:g}, {highest:g}], got {value}")


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
_TOKEN_ADVANTAGES = "stages.algorithms.token_advantages"
_LOSSES = "stages.algorithms.losses"
_ALONE = ("token_rewards", "mask", "valid")
_OF_SEQUENCES = "stages.algorithms.sequence_losses"
_OF_COVARIANCE = "stages.algorithms.covariance_losses"
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_GROUPED = ("token_rewards", "mask", "groups", "valid")
_SHARE = (0.0, 1.0)
_NOT_NEGATIVE = (0.0, math.inf)

ESTIMATORS: dict[str, EstimatorNeeds] = {
    needs.name: needs
    for needs in (
        EstimatorNeeds(
            "remax",
            "row",
            (*_ALONE, "baseline"),
            f"{_ADVANTAGES}:remax",
            "Return to go minus the total return of the prompt's greedy session: G_t - b.",
            greedy_baseline=True,
        ),
        EstimatorNeeds(
            "grpo",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:grpo",
            "Session return, centred and scaled within its group: (R - mean) / (sample std + 1e-6).",
            min_group=2,
        ),
        EstimatorNeeds(
            "dr_grpo",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:dr_grpo",
            "GRPO without the division by the standard deviation: R - mean.",
            min_group=2,
        ),
        EstimatorNeeds(
            "rloo",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:rloo",
            "Session return minus the mean of the other sessions of its group.",
            min_group=2,
        ),
        EstimatorNeeds(
            "reinforce",
            "window",
            _ALONE,
            f"{_ADVANTAGES}:reinforce",
            "Session return minus the mean over all sessions of the batch.",
        ),
        EstimatorNeeds(
            "remax_clipped",
            "row",
            (*_ALONE, "baseline", "log_probs", "ref_log_probs"),
            f"{_ADVANTAGES}:remax_clipped",
            "The ReMax authors' form: gamma^(T-t+1) clip(R - b, -c, c) - kappa (log pi - log pi_ref)_t.",
            greedy_baseline=True,
            options={"kappa": 0.05, "gamma": 0.99, "clip": 5.0},
            ranges={"kappa": _NOT_NEGATIVE, "gamma": _SHARE, "clip": _NOT_NEGATIVE},
        ),
        EstimatorNeeds(
            "grpo_passk",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:grpo_passk",
            "The best session of a group alone: (R_best - R_second) / (sample std + 1e-6).",
            min_group=2,
        ),
        EstimatorNeeds(
            "gdpo",
            "window",
            ("components", "weights", "mask", "groups", "valid"),
            f"{_ADVANTAGES}:gdpo",
            "The weighted sum of GRPO's advantages for each named reward, whitened over the batch.",
            min_group=2,
        ),
        EstimatorNeeds(
            "opo",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:opo",
            "Session return minus the mean of its group, weighted by length.",
            min_group=2,
        ),
        EstimatorNeeds(
            "gpg",
            "window",
            _GROUPED,
            f"{_ADVANTAGES}:gpg",
            "(R - mean of its group) times sessions / sessions with a return that is not 0.",
            min_group=2,
        ),
        EstimatorNeeds(
            "maxrl",
            "group",
            _GROUPED,
            f"{_ADVANTAGES}:maxrl",
            "Session return, centred and divided by the mean of its group: (R - mean) / mean.",
            min_group=2,
        ),
        EstimatorNeeds(
            "rae",
            "row",
            (*_ALONE, "baseline"),
            f"{_ADVANTAGES}:rae",
            "Session return minus the running mean of the returns of earlier windows.",
            running_mean=True,
        ),
        EstimatorNeeds(
            "reinforce_plus_plus",
            "window",
            _ALONE,
            f"{_TOKEN_ADVANTAGES}:reinforce_plus_plus",
            "Discounted return to go, whitened over the tokens of the batch.",
            options={"gamma": 1.0},
            ranges={"gamma": _SHARE},
        ),
        EstimatorNeeds(
            "reinforce_plus_plus_baseline",
            "window",
            _GROUPED,
            f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
            "Session return minus the mean of its group, whitened over the tokens of the batch.",
            min_group=2,
        ),
        EstimatorNeeds(
            "gae",
            "window",
            (*_ALONE, "values"),
            f"{_TOKEN_ADVANTAGES}:gae",
            "Generalised advantage estimation with a critic, whitened over the tokens of the batch.",
            options={"gamma": 1.0, "lam": 1.0},
            ranges={"gamma": _SHARE, "lam": _SHARE},
        ),
        EstimatorNeeds(
            "optimal_token_baseline",
            "group",
            (*_GROUPED, "log_probs", "sum_pi_squared"),
            f"{_TOKEN_ADVANTAGES}:optimal_token_baseline",
            "Return to go minus its group's mean at the same place, weighted by the squared gradients up to there.",
            min_group=2,
        ),
        EstimatorNeeds(
            "tir_optimal_token_baseline",
            "group",
            (*_GROUPED, "log_probs", "sum_pi_squared"),
            f"{_TOKEN_ADVANTAGES}:tir_optimal_token_baseline",
            "optimal_token_baseline with places that count policy tokens alone.",
            min_group=2,
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
