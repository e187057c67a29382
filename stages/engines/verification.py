"""Whether an engine holds the weights it was given. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dataflow.weights import WeightsRef
from stages.engines.base import WeightsRejected


def check_names(ref: WeightsRef, given: Collection[str], expected: Collection[str]) -> None:
    """Check that a file holds every parameter of the model and nothing else.

    An engine keeps its old values for a parameter that does not come, which no small step would show.

    Raises:
        WeightsRejected: Names the parameters that are missing or unknown.
    """
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if missing or unknown:
        raise WeightsRejected(
            f"weights version {ref.version} ({ref.path}): missing parameters {missing[:5]}, "
            f"unknown parameters {unknown[:5]} of {len(given)} given and {len(expected)} expected"
        )


def verify_update(ref: WeightsRef, scores: Sequence[float], received: Mapping[str, float], bound: float) -> float:
    """Compare what an engine now computes, and what it received, with what the learner published.

    Args:
        ref: What the learner published.
        scores: The engine's log-probabilities (nats) of the probe tokens after the first.
        received: Parameter name -> fingerprint of the tensor that the engine received.
        bound: Largest accepted absolute difference of a probe log-probability, in nats.

    Returns:
        The largest absolute difference, in nats.

    Raises:
        WeightsRejected: A difference exceeds `bound` or is NaN; or the step was smaller than `bound`, so
            that the old weights would pass too, and the fingerprints are not the learner's.
    """
    if len(scores) != len(ref.probe_log_probs) or not scores:
        raise WeightsRejected(
            f"weights version {ref.version}: no probe to verify with: {len(ref.probe_log_probs)} probe "
            f"log-probabilities for {len(ref.probe_ids)} probe ids; publish at least two probe ids"
        )
    differences = [abs(a - b) for a, b in zip(scores, ref.probe_log_probs, strict=True)]
    # Not max(): with a NaN its result depends on the order.
    wrong = [d for d in differences if not d <= bound]
    if wrong:
        raise WeightsRejected(
            f"weights version {ref.version}: {len(wrong)} of {len(scores)} probe log-probabilities differ "
            f"from the learner's by more than {bound} nats (the first by {wrong[0]:.3g})"
        )
    if ref.probe_step < bound:
        _check_fingerprints(ref, received)
    return max(differences)


def _check_fingerprints(ref: WeightsRef, received: Mapping[str, float]) -> None:
    published = dict(ref.fingerprints)
    check_names(ref, received, published)
    wrong = sorted(name for name, value in published.items() if received[name] != value)
    if wrong:
        raise WeightsRejected(
            f"weights version {ref.version}: the fingerprints of {len(wrong)} of {len(published)} parameters "
            f"differ from the learner's: {wrong[:5]}"
        )
