"""The operations of a token and the peak of a device, for the share of the peak in a run's display."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from adjoint.models.config import HybridConfig
from adjoint.models.hybrid import HybridLM


def flops_of_token(config: HybridConfig, length: int) -> float | None:
    """The operations of forward and backward for one token of a row with one sequence, as torch's counter counts them.

    The result is None if they cannot be counted. The model is on the meta device, so nothing is computed. Operations
    that activation checkpointing repeats do not count.
    """
    model = HybridLM(config, device="meta")
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            loss = model(ids, labels=ids).loss
            assert loss is not None
            loss.backward()
    except NotImplementedError:  # an op that has no shape function
        return None
    return counter.get_total_flops() / length


def peak_of(device: torch.device) -> float | None:
    """TF/s of one large product of bfloat16 matrices, measured here; None on a CPU."""
    if device.type != "cuda":
        return None
    from adjoint.bench.measurement.timing import matrix_ceiling

    return matrix_ceiling(device)
