"""Digests of results on fixed inputs, by which the bits of two machines, versions or days are compared."""

import hashlib

import torch
from torch import Tensor

from adjoint.contract.cases import Subject
from adjoint.core.preference import Preference
from adjoint.verify.run import Row, evaluate

CHECK = "digest"
"""The name of the check in rows."""


def digest(*tensors: Tensor | None) -> str:
    """A digest of shapes, dtypes and bits; all NaNs count as one, whatever their payload."""
    whole = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            whole.update(b"none")
            continue
        plain = tensor.detach().cpu().contiguous()
        if plain.is_floating_point():
            plain = torch.where(plain.isnan(), torch.full((), torch.nan, dtype=plain.dtype), plain)
        whole.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:32]


def digests(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """A row for every result of every case, and one for the inputs of each case."""
    rows = []
    for case in subject.cases:
        evaluation = evaluate(subject, case, dtype, device, preference)
        forward, backward = evaluation.guarantees
        digest_of_inputs = digest(*evaluation.inputs, *evaluation.upstream)
        rows.append(evaluation.row(CHECK, dtype, "inputs", f"{case.name}: inputs: {digest_of_inputs}"))
        for (name, promise), result in zip((forward | backward).items(), evaluation.results, strict=True):
            rows.append(evaluation.row(CHECK, dtype, promise.flags, f"{case.name}: {name}: {digest(result)}"))
    return rows
