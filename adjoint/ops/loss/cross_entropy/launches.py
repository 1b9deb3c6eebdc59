"""What `cross_entropy` launches: the kernels over rows, on logits that exist."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.launch import Execute, Setup
from adjoint.core.layout import Rows
from adjoint.ops.loss.kernels import RowGradients, RowLosses, RowResults, Targets, Total, Upstream, facts


def forward(setup: Setup) -> Execute:
    """The loss, log-probabilities where they are asked for, and what the backward reads."""
    (tokens, classes), (element, loss) = setup.problem.sizes, facts(setup)
    targets_of, rows, total = (
        Targets(setup, "cross_entropy", tokens, classes),
        RowLosses(setup, classes, False),
        Total(setup),
    )
    setup.copies(logits=(element, tokens * classes), labels=(setup.problem.dtypes[1], tokens))
    has_total = loss.reduction != "none"
    setup.scratch(losses=(torch.float32, tokens * has_total))
    setup.scratch(log_probabilities=(torch.float32, tokens * (not loss.log_probabilities)))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        logits, labels = arguments[:2]
        out, log_probabilities, targets, sizes, count, _slopes = outputs
        if tokens == 0:
            out.zero_()
            count.fill_(1.0)
            return
        memory = setup.memory(workspace)
        targets_of.find(memory, memory.contiguous("labels", labels), targets, count)
        results = RowResults(
            memory["losses"] if has_total else out,
            log_probabilities if loss.log_probabilities else memory["log_probabilities"],
            sizes,
        )
        rows.launch(tokens, memory.rows("logits", logits), None, targets, count, results)
        if has_total:
            total.launch(tokens, results.losses, count, out)
        targets_of.check()

    return execute


def backward(setup: Setup) -> Execute:
    """dlogits, in memory of its own or over the logits."""
    (tokens, classes), (element, loss) = setup.problem.sizes, facts(setup)
    rows = RowGradients(setup, classes, False)
    per_token = tokens if loss.reduction == "none" else 1
    setup.copies(
        logits=(element, tokens * classes), dloss=(torch.float32, per_token),
        dlog_probabilities=(torch.float32, tokens),
    )  # fmt: skip

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dloss, dlog_probabilities, logits, targets, sizes, count = arguments[:6]
        if tokens == 0:
            return
        memory = setup.memory(workspace)
        read = memory.rows("logits", logits)
        upstream = Upstream(
            None if dloss is None else memory.contiguous("dloss", dloss),
            None if dlog_probabilities is None else memory.contiguous("dlog_probabilities", dlog_probabilities),
        )
        into = Rows(outputs[0], read.inner, read.inner * classes, classes) if outputs else read
        rows.launch(tokens, read, None, targets, upstream, count, sizes, count, into)
        if not outputs and read.tensor is not logits:
            logits.copy_(read.tensor)

    return execute
