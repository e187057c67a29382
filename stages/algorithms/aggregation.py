"""From token losses to one number, with divisors counted over the whole mini-batch.

The sum over micro-batches is then the same number, and the same gradient, however the rows are split. Masked positions
are replaced before the first operation, so what they hold (NaN and infinity included) reaches neither value nor
gradient.
"""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.catalog import AGGREGATIONS
from stages.algorithms.tokens import policy_tokens, sequence_slots, sum_by_sequence


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    token_count: int,
    sequence_count: int,
    horizon: int,
    sequences: Tensor | None = None,
) -> Tensor:
    """Reduce the token losses of one micro-batch to its share of the mini-batch's loss.

    Divisors are global, so the shares of all micro-batches add up to the loss of the mini-batch. All rows of a sequence
    have to be in one micro-batch. Where gradients are averaged over D data-parallel ranks, multiply by D.

    Args:
        loss: ``[B, T]``.
        mask: ``[B, T]``, 1 = policy token.
        mode: A key of `AGGREGATIONS`. With ``ℓ_i = Σ_t m_it ℓ_it`` and ``L_i = Σ_t m_it`` of sequence i: ``token-mean``
            ``Σ_i ℓ_i / token_count``; ``token-sum`` ``Σ_i ℓ_i``; ``seq-mean-token-sum`` ``Σ_i ℓ_i / sequence_count``;
            ``seq-mean-token-mean`` ``Σ_i (ℓ_i / L_i) / sequence_count``;
            ``seq-mean-token-sum-norm`` ``Σ_i ℓ_i / (sequence_count · horizon)``.
        token_count: Policy tokens in the whole mini-batch.
        sequence_count: Sequences with a policy token in the whole mini-batch.
        horizon: The longest possible response in tokens; a constant of the run, never the padded width.
        sequences: ``[B] int64``, which sequence each row belongs to; without it, each row is a sequence.

    Returns:
        A scalar. If the mini-batch has no policy token it is 0, with gradient 0.

    Raises:
        ValueError: Shapes differ, unknown mode, a negative count, or a horizon below 1.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregate: expected one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    if token_count < 0 or sequence_count < 0 or horizon < 1:
        raise ValueError(
            "aggregate: expected token_count >= 0, sequence_count >= 0 and horizon >= 1, "
            f"got {token_count}, {sequence_count} and {horizon}"
        )
    policy = policy_tokens("aggregate", mask, loss)
    per_row = loss.where(policy, 0.0).sum(-1)
    if mode == "seq-mean-token-mean":
        slots = sequence_slots("aggregate", mask, sequences)
        per_row = per_row / sum_by_sequence(policy.sum(-1), slots).clamp(min=1)[slots]
    divisors = {"token_count": token_count, "sequence_count": sequence_count, "horizon": horizon}
    total = per_row.sum()
    for name in AGGREGATIONS[mode].divisors:
        total = total / max(divisors[name], 1)
    return total
