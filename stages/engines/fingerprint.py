"""One number that tells two tensors apart: how learner and engine agree on what was transferred."""

from __future__ import annotations

import math

import torch

SAMPLED_ELEMENTS = 256


def fingerprint(tensor: torch.Tensor) -> float:
    """Sum, in float64, of up to `SAMPLED_ELEMENTS` elements spaced evenly over the flattened tensor.

    The sum is correctly rounded (`math.fsum`), so it does not depend on the order of addition, on the
    number of threads or on the device. The learner takes it of the tensor as written to the file (same
    dtype); a tensor with a sampled element that is not finite has no fingerprint: NaN, equal to nothing.

    Args:
        tensor: Any shape, any floating dtype.
    """
    flat = tensor.detach().reshape(-1)
    count = min(SAMPLED_ELEMENTS, flat.numel())
    places = torch.arange(count, device=flat.device) * flat.numel() // max(count, 1)
    sample = flat[places].double()
    return math.fsum(sample.tolist()) if bool(sample.isfinite().all()) else math.nan
