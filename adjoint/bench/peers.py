"""Other libraries that do the same work, by the names that `Workload.peers` uses; imported when they are timed.

To add one, write a function from a `Task` to a `Contender` that calls the peer's own kernels, and a line in `PEERS`.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from adjoint.bench.contenders import (
    BACKWARD,
    FORWARD,
    STEP,
    Builder,
    Contender,
    NeedsGpu,
    NotInstalled,
    Task,
    as_tuple,
    through_autograd,
)

EPS = 1e-6
"""The eps of the norms."""

NEED_GPU = frozenset(("FLA", "FlashInfer", "FlashQLA", "Liger", "QuACK"))
"""The labels of the peers that consist of GPU kernels."""

INSTALLED_BY = {"fla-core": "flash-linear-attention"}
"""The names by which pip installs distributions, where they differ."""


@dataclass(frozen=True)
class Peer:
    """A peer: its label in tables, its distribution, the builder of its contender, and its directions."""

    label: str
    distribution: str
    build: Builder
    directions: tuple[str, ...] = (FORWARD, BACKWARD, STEP)

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cuda" or self.label not in NEED_GPU

    @property
    def package(self) -> str:
        """The name by which pip installs it."""
        return INSTALLED_BY.get(self.distribution, self.distribution)

    def build_on_device(self, task: Task) -> Contender:
        """Builds its contender; raises `NeedsGpu` on a device on which it does not run."""
        if not self.runs_on(task.device):
            raise NeedsGpu("its kernels need a GPU")
        return self.build(task)


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _imported(path: str, install: str) -> Any:
    """Imports "module:function". `install` is the name by which pip would install it."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotInstalled(f"pip install {install}") from error


def _autograd(path: str, install: str, call: Callable[..., Any]) -> Builder:
    """Builds a peer that has its own autograd function for both directions: `call(<imported function>, *inputs)`."""
    return lambda task: through_autograd(partial(call, _imported(path, install)), task)


def _liger_swiglu(task: Task) -> Contender:
    """Liger's kernels without its autograd wrapper. The backward overwrites gate and up."""
    module, install = "liger_kernel.ops.swiglu", "liger-kernel"
    swiglu_forward = _imported(f"{module}:swiglu_forward", install)
    swiglu_backward = _imported(f"{module}:swiglu_backward", install)
    gate, up = task.inputs
    if task.direction == FORWARD:
        # Its result is the output, or gate, up and the output.
        return Contender(lambda: as_tuple(swiglu_forward(gate, up))[-1:])
    (upstream,) = task.upstream
    own_gate, own_up = torch.empty_like(gate), torch.empty_like(up)

    def restore() -> None:
        own_gate.copy_(gate)
        own_up.copy_(up)

    def backward() -> tuple[Tensor, ...]:
        result = swiglu_backward(own_gate, own_up, upstream)
        return (own_gate, own_up) if result is None else as_tuple(result)[:2]

    return Contender(backward, restore=restore)


def _fla_rotary(task: Task) -> Contender:
    """FLA's kernel, with one launch for q and one for k and one angle for each pair of columns; in place if ours is."""
    rotate = _imported("fla.modules.rotary:rotary_embedding", "flash-linear-attention")
    q, k, cos, sin = task.inputs
    cos, sin = (x[:, : x.shape[1] // 2].contiguous() for x in (cos, sin))
    in_place = "in_place" in task.workload.subject.keywords
    if not in_place:
        return through_autograd(lambda q, k, *_: (rotate(q, cos, sin), rotate(k, cos, sin)), task)
    own = q.clone(), k.clone()

    def restore() -> None:
        own[0].copy_(q)
        own[1].copy_(k)

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(rotate(x, cos, sin, inplace=True) for x in own)

    return Contender(run, restore=restore)


def _liger_rotary(task: Task) -> Contender:
    """Liger's kernels without its autograd wrapper. They rotate in place, and take tensors with heads before tokens."""
    module, install = "liger_kernel.ops.rope", "liger-kernel"
    rope = _imported(f"{module}:rope_{task.direction}", install)
    *_, q, k, cos, sin = task.arguments
    sources = (q, k) if task.direction == FORWARD else task.upstream
    own = tuple(torch.empty_like(x) for x in sources)

    def restore() -> None:
        for mine, source in zip(own, sources, strict=True):
            mine.copy_(source)

    def run() -> tuple[Tensor, ...]:
        results = rope(*(x.transpose(1, 2) for x in own), cos[None], sin[None])
        return tuple(x.transpose(1, 2) for x in results[:2])

    restore()
    return Contender(run, restore=restore)


def _delta_rule(function: Any, *inputs: Any) -> Any:
    """A peer's `chunk_gated_delta_rule`."""
    *tensors, state, cu_seqlens = inputs
    return function(*tensors, initial_state=state, output_final_state=False, cu_seqlens=cu_seqlens)[0]


def _delta_rule_with_states(function: Any, *inputs: Any) -> Any:
    """The same, with the final states."""
    *tensors, state, cu_seqlens = inputs
    return function(*tensors, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens)


def _fla_gated_delta_rule(call: Callable[..., Any], task: Task) -> Contender:
    os.environ["FLA_FLASH_QLA"] = "0"  # otherwise, with FlashQLA installed, it would run FlashQLA's kernels
    rule = _imported("fla.ops.gated_delta_rule:chunk_gated_delta_rule", "flash-linear-attention")
    return through_autograd(partial(call, rule), task)


def _transformers_gated_delta_rule(function: Any, *inputs: Any) -> Any:
    """The function that transformers' Qwen3.5 runs without FLA, with autograd's gradients."""
    q, k, v, g, beta, state, _ = inputs
    rule = getattr(function, "__wrapped__", function)  # its decorator looks for FLA's kernel first
    repeat = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (q, k))
    return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)


def _flashinfer_gated_delta_rule(task: Task) -> Contender:
    """FlashInfer's kernels for Hopper. Its own rule decides between one sequence at a time and a split along time.

    It takes the decay and not its logarithm, and has no batch axis. Both are converted before the clock starts. One
    sequence at a time it always writes the final states, which nobody else is asked for.
    """
    folder, install = "flashinfer.gdn_kernels.delta_rule_dsl", "flashinfer-python"
    whole = _imported(f"{folder}.delta_rule_sm90:delta_rule_prefill_dsl_sm90", install)
    split = _imported(f"{folder}.delta_rule_cp_sm90:cp_delta_rule_dsl_sm90", install)
    is_split = _imported(f"{folder}.varlen_helper:should_use_cp_host", install)
    q, k, v, g, beta, _, bounds = task.inputs
    if q.shape[0] != 1:
        raise NotImplementedError("FlashInfer takes packed sequences alone")
    q, k, v, strength = (x[0].contiguous() for x in (q, k, v, beta))
    decay, scale, time, heads = g[0].exp().contiguous(), q.shape[-1] ** -0.5, q.shape[0], v.shape[1]
    bounds = torch.tensor([0, time], device=q.device) if bounds is None else bounds.long()
    out, states = torch.empty_like(v), len(bounds) - 1
    final = torch.empty(states, heads, q.shape[-1], v.shape[-1], device=q.device)
    properties = torch.cuda.get_device_properties(q.device)
    capability = {"device_capability": (properties.major, properties.minor)}

    def run() -> tuple[Tensor, ...]:
        if is_split(states * heads, properties.multi_processor_count, properties.name, **capability):
            split(out, None, q, k, v, decay, strength, bounds, scale, max_seqlen=time)
        else:
            whole(out, final, q, k, v, None, decay, strength, bounds, scale)
        return (out[None],)

    return Contender(run, outputs=(out,))


def _quack_experts(task: Task) -> Contender:
    """QuACK's grouped products, the first of which gathers rows and ends in SwiGLU. The sort and the sum are torch's.

    Matrices get the layout that QuACK needs before the clock starts.
    """
    products_with_swiglu = _imported("quack.gemm_interface:gemm_act", "quack-kernels")
    products = _imported("quack.gemm_interface:gemm", "quack-kernels")
    x, gate_up, down, indices, weights = task.inputs
    gate, up = gate_up.chunk(2, 1)
    interleaved = torch.stack((gate, up), 2).flatten(1, 2).transpose(1, 2)
    back, experts = down.transpose(1, 2), torch.arange(down.shape[0] + 1, device=x.device)

    def run() -> tuple[Tensor, ...]:
        order = indices.reshape(-1).sort(stable=True)
        token = (order.indices // indices.shape[1]).int()
        bounds = torch.searchsorted(order.values, experts).int()
        _, hidden = products_with_swiglu(
            x, interleaved, activation="swiglu", cu_seqlens_m=bounds, A_idx=token, store_preact=False
        )
        rows = products(hidden, back, cu_seqlens_m=bounds)
        rows = rows * weights.reshape(-1)[order.indices].to(rows.dtype)[:, None]
        return (torch.zeros_like(x).index_add_(0, token, rows),)

    return Contender(run)


def _fla_step(task: Task) -> Contender:
    """FLA's recurrent kernel, which returns outputs and new states."""
    step = _imported("fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule", "flash-linear-attention")
    q, k, v, g, beta, state, _ = task.inputs
    return Contender(lambda: as_tuple(step(q, k, v, g, beta=beta, initial_state=state, output_final_state=True)))


def _fla_causal_conv1d(task: Task) -> Contender:
    """FLA's Triton kernels, in which the activation has another name."""
    try:
        conv = _imported("fla.modules.conv.causal_conv1d:causal_conv1d", "flash-linear-attention")
    except NotInstalled:  # versions before 0.4 have it in another module
        conv = _imported("fla.modules.convolution:causal_conv1d", "flash-linear-attention")

    def call(x: Tensor, weight: Tensor, bias: Any, state: Any, cu_seqlens: Any) -> Tensor:
        keywords = {"initial_state": state, "activation": "swish", "cu_seqlens": cu_seqlens}
        return as_tuple(conv(x, weight, bias, **keywords))[0]

    return through_autograd(call, task)


def _fla_recompute_w_u(task: Task) -> Contender:
    """FLA's forward kernel. Its running sums of g are logarithms to base 2, computed before the clock starts."""
    recompute = _imported("fla.ops.gated_delta_rule.wy_fast:recompute_w_u_fwd", "flash-linear-attention")
    k, v, beta, G, T, _ = task.inputs
    exponents = G * (1 / math.log(2))
    return Contender(lambda: as_tuple(recompute(k=k, v=v, beta=beta, A=T, g=exponents)))


PEERS = {
    "liger_swiglu": Peer("Liger", "liger-kernel", _liger_swiglu),
    "flashinfer_packed_swiglu": Peer(
        "FlashInfer",
        "flashinfer-python",
        _autograd("flashinfer.activation:silu_and_mul", "flashinfer-python", lambda swiglu, packed: swiglu(packed)),
        directions=(FORWARD,),
    ),
    "flashinfer_rms_norm": Peer(
        "FlashInfer",
        "flashinfer-python",
        _autograd("flashinfer.norm:rmsnorm", "flashinfer-python", lambda norm, x, weight: norm(x, weight, EPS)),
        directions=(FORWARD,),
    ),
    "liger_rms_norm": Peer(
        "Liger",
        "liger-kernel",
        _autograd(  # in the mode that computes in float32, without overwriting dy
            "liger_kernel.ops.rms_norm:LigerRMSNormFunction",
            "liger-kernel",
            lambda norm, x, weight: norm.apply(x, weight, EPS, 0.0, "gemma", False),
        ),
    ),
    "quack_rms_norm": Peer(
        "QuACK",
        "quack-kernels",
        _autograd("quack.rmsnorm:rmsnorm", "quack-kernels", lambda norm, x, weight: norm(x, weight, eps=EPS)),
    ),
    "fla_gated_rms_norm": Peer(
        "FLA",
        "fla-core",
        _autograd(
            "fla.modules.fused_norm_gate:rms_norm_gated",
            "flash-linear-attention",
            lambda norm, x, gate, weight: norm(x, gate, weight, None, "swish", eps=EPS),
        ),
    ),
    "fla_l2_norm": Peer(
        "FLA",
        "fla-core",
        _autograd("fla.modules.l2norm:l2norm", "flash-linear-attention", lambda norm, x: norm(x, EPS)),
    ),
    "fla_causal_conv1d": Peer("FLA", "fla-core", _fla_causal_conv1d),
    "fla_rotary": Peer("FLA", "fla-core", _fla_rotary),
    "liger_rotary": Peer("Liger", "liger-kernel", _liger_rotary),
    "quack_top_8": Peer(  # softmax over the chosen logits, in their dtype; k must be a power of two there
        "QuACK",
        "quack-kernels",
        _autograd("quack.topk:topk", "quack-kernels", lambda top, logits: top(logits, 8, softmax=True)),
    ),
    "quack_experts": Peer("QuACK", "quack-kernels", _quack_experts, directions=(FORWARD,)),
    "liger_linear_cross_entropy": Peer(
        "Liger",
        "liger-kernel",
        _autograd(
            "liger_kernel.ops.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction",
            "liger-kernel",
            lambda loss, hidden, weight, labels, bias: as_tuple(loss.apply(hidden, weight, labels))[0],
        ),
        directions=(STEP,),
    ),
    "quack_linear_cross_entropy": Peer(
        "QuACK",
        "quack-kernels",
        _autograd(
            "quack.linear_cross_entropy:chunked_linear_cross_entropy",
            "quack-kernels",
            lambda loss, hidden, weight, labels, bias: loss(hidden, weight, labels, reduction="mean"),
        ),
        directions=(STEP,),
    ),
    "quack_cross_entropy": Peer(
        "QuACK",
        "quack-kernels",
        _autograd(
            "quack.cross_entropy:cross_entropy",
            "quack-kernels",
            lambda loss, logits, labels: loss(logits, labels, reduction="mean"),
        ),
    ),
    "fla_gated_delta_rule": Peer("FLA", "fla-core", partial(_fla_gated_delta_rule, _delta_rule)),
    "fla_gated_delta_rule_with_states": Peer(
        "FLA", "fla-core", partial(_fla_gated_delta_rule, _delta_rule_with_states)
    ),
    "flashinfer_gated_delta_rule": Peer(
        "FlashInfer", "flashinfer-python", _flashinfer_gated_delta_rule, directions=(FORWARD,)
    ),
    "flash_qla_gated_delta_rule": Peer(
        "FlashQLA", "flash-qla", _autograd("flash_qla:chunk_gated_delta_rule", "flash-qla", _delta_rule)
    ),
    "fla_gated_delta_step": Peer("FLA", "fla-core", _fla_step, directions=(FORWARD,)),
    "transformers_gated_delta_rule": Peer(
        "transformers",
        "transformers",
        _autograd(
            "transformers.models.qwen3_5.modeling_qwen3_5:torch_chunk_gated_delta_rule",
            "transformers, 5.17 or newer",
            _transformers_gated_delta_rule,
        ),
    ),
    "fla_recompute_w_u": Peer("FLA", "fla-core", _fla_recompute_w_u, directions=(FORWARD,)),
}
