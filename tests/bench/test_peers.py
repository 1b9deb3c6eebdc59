"""Who takes part beside us, and that each peer gets its arguments as it wants them."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import ops
from adjoint.bench import contenders, peers
from adjoint.bench.contenders import Task
from adjoint.bench.measurement import run
from adjoint.ops.activation.swiglu import cases
from adjoint.ops.gated_delta.rule import cases as rules
from adjoint.ops.gated_delta.rule import layers
from adjoint.ops.moe.experts import cases as experts
from tests.bench.small import CPU, higher_first, routing, rows_of, small, workload_of


@pytest.mark.parametrize("family", ops.FAMILIES)
def test_torch_compile_takes_part_in_every_family_and_direction(family: str) -> None:
    workloads = [w for module in ops.cases(family) for w in module.WORKLOADS if "cuda" in w.devices]
    directions = {direction for w in workloads for direction in w.directions}
    able = {
        direction
        for w in workloads
        for direction in w.directions
        if run.COMPILED in run.builders_of(w, direction, compile=True, peers=None)
    }
    assert able == directions


STRONGEST = {
    "swiglu 32768×2048": {"Liger"},
    "swiglu[gate_up]": {"FlashInfer"},
    "rms_norm 32768": {"Liger", "QuACK", "FlashInfer"},
    "gated_rms_norm": {"FLA"},
    "l2_norm": {"FLA"},
    "moe.route 32768 tokens, 256": {"QuACK"},
    "moe.experts": {"QuACK"},
    "gated_delta_rule 32768": {"FLA", "FlashQLA", "FlashInfer"},
    "decode 1 ": {"FLA"},
}


@pytest.mark.parametrize("text", STRONGEST)
def test_peers_that_have_the_op_take_part(text: str) -> None:
    workload = next(w for module in ops.cases() for w in module.WORKLOADS if w.name.startswith(text))
    builders = run.builders_of(workload, contenders.FORWARD, compile=False, peers=None)
    assert set(builders) >= STRONGEST[text]


def test_a_peer_is_asked_for_the_directions_it_has() -> None:
    workload = workload_of(rules, "8192 tokens")
    forward, backward = (
        run.builders_of(workload, way, compile=False, peers=None) for way in (contenders.FORWARD, contenders.BACKWARD)
    )
    assert "FlashInfer" in forward and "FlashInfer" not in backward and "FlashQLA" in backward


def test_the_rule_is_timed_on_gates_as_they_are_elsewhere() -> None:
    names = [w.name for w in rules.WORKLOADS]
    for text in ("slow decay", "FlashQLA's gates", "initial gates", ", 16 sequences", ", 64 sequences", " 4096 tokens"):
        assert any(text in name for name in names), text
    generator = torch.Generator().manual_seed(0)

    def made(gates: str) -> Tensor:
        g = layers.layer(4096, 1, 16, 1, gates)(torch.float32, CPU, generator)[3]
        assert g is not None and g.shape == (1, 4096, 16) and g.dtype == torch.float32 and bool((g <= 0).all())
        return g

    undecayed = (made("FlashQLA's gates") == 0).all(1).sum()
    assert int(undecayed) == 4, "a quarter of the heads"
    initial = -made("initial gates")
    assert float(initial.min()) >= 0.01 * 0.001 and float(initial.max()) <= 16 * 0.1
    rates = initial.amax(1) / initial.amin(1)
    assert bool((rates > 50).all()) and bool((rates <= 100.001).all()), "softplus(dt) from 0.001 to 0.1 in every head"
    assert float(made("slow decay").mean()) > -0.01 > float(made("").mean())


def test_the_rule_in_torch_is_the_rule_and_compiles() -> None:
    time, heads = 128, 2
    inputs = layers.layer(time, 1, heads, 1, "")(torch.float32, CPU, torch.Generator().manual_seed(0))
    out = layers.in_torch(*inputs)
    q, k, v, g, beta, *_ = (x if x is None else x.double() for x in inputs)
    exact, _ = adjoint.gated_delta_rule(q, k, v, g, beta)  # type: ignore[arg-type]
    ceiling = adjoint.plan(adjoint.gated_delta_rule, *inputs[:5]).guarantee["o"].recorded
    assert ceiling.measure(out, exact).holds
    compiled = torch.compile(layers.in_torch, backend="aot_eager", fullgraph=True, dynamic=False)
    assert ceiling.measure(compiled(*inputs), exact).holds


def module_at(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """Puts a module with these functions where a peer would be."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), SimpleNamespace())
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(**functions))


@pytest.mark.parametrize("split", [True, False])
def test_flashinfer_gets_decays_and_no_batch_axis(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(out: Tensor, *rest: Any) -> None:
        q, k, v, alpha, beta, bounds, scale = rest
        values = [x[None] for x in (q, k, v, alpha.log(), beta)]
        out.copy_(adjoint.gated_delta_rule(*values, scale=scale, cu_seqlens=bounds)[0][0])

    def whole(out: Tensor, state: Tensor, q: Tensor, k: Tensor, v: Tensor, initial: None, *rest: Any) -> None:
        assert not split and initial is None and state.shape == (2, 2, layers.K, layers.V)
        rule(out, q, k, v, *rest)

    def in_parts(out: Tensor, state: None, *rest: Any, max_seqlen: int) -> None:
        assert split and state is None and max_seqlen == 128
        rule(out, *rest)

    def is_split(programs: int, processors: int, name: str, device_capability: tuple[int, int]) -> bool:
        assert (programs, processors, name, device_capability) == (4, 132, "GPU", (9, 0))
        return split

    folder = "flashinfer.gdn_kernels.delta_rule_dsl"
    module_at(monkeypatch, f"{folder}.delta_rule_sm90", delta_rule_prefill_dsl_sm90=whole)
    module_at(monkeypatch, f"{folder}.delta_rule_cp_sm90", cp_delta_rule_dsl_sm90=in_parts)
    module_at(monkeypatch, f"{folder}.varlen_helper", should_use_cp_host=is_split)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    inputs = layers.layer(128, 1, 2, 2, "")(torch.float32, CPU, torch.Generator().manual_seed(0))
    task = Task(workload_of(rules, "4 sequences"), contenders.FORWARD, inputs, ())
    contender = peers.PEERS["flashinfer_gated_delta_rule"].build(task)
    (out,) = contender.run()
    expected, _ = adjoint.gated_delta_rule(*inputs[:5], cu_seqlens=inputs[6])  # type: ignore[arg-type]
    promised = adjoint.plan(adjoint.gated_delta_rule, *inputs[:5], cu_seqlens=inputs[6]).guarantee["o"]
    assert out.shape == expected.shape and promised.recorded.measure(out, expected.double()).holds
    assert contender.outputs[0].data_ptr() == out.data_ptr()


def test_quack_gets_interleaved_matrices_and_sorted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(A: Tensor, B: Tensor, cu_seqlens_m: Tensor, A_idx: Tensor | None = None) -> Tensor:
        rows = A if A_idx is None else A[A_idx.long()]
        ends = cu_seqlens_m.tolist()
        return torch.cat([rows[a:b] @ B[e] for e, (a, b) in enumerate(pairwise(ends))])

    def with_swiglu(A: Tensor, B: Tensor, activation: str, store_preact: bool, **rest: Tensor) -> tuple[None, Tensor]:
        assert activation == "swiglu" and not store_preact
        both = product(A, B, **rest)
        return None, F.silu(both[:, ::2]) * both[:, 1::2]

    module_at(monkeypatch, "quack.gemm_interface", gemm=product, gemm_act=with_swiglu)
    generator = torch.Generator().manual_seed(0)
    inputs = experts._routed(12, 8, 4, 6, 2, False)(torch.float32, CPU, generator)
    task = Task(experts.WORKLOADS[0], contenders.FORWARD, inputs, ())
    (out,) = peers.PEERS["quack_experts"].build(task).run()
    wide = [x if x is None or not x.is_floating_point() else x.double() for x in inputs]
    exact = adjoint.moe.experts(*wide)  # type: ignore[arg-type]
    promised = adjoint.plan(adjoint.moe.experts, *inputs).guarantee["y"]
    assert promised.error.measure(out, exact, *wide).holds


def test_quack_chooses_experts_and_is_compared_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def topk(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
        assert softmax
        chosen = higher_first(x.detach())[:, :k]
        return torch.softmax(x.gather(1, chosen).float(), -1).to(x.dtype), chosen.int()

    module_at(monkeypatch, "quack.topk", topk=topk)
    monkeypatch.setattr(peers, "NEED_GPU", ())  # this one does not
    rows = rows_of(replace(routing(), peers=("quack_top_8",)))
    assert rows["QuACK", "forward"].status == rows["QuACK", "backward"].status == run.OK, rows["QuACK", "backward"]
    assert rows["QuACK", "backward"].ties == 64


@pytest.mark.parametrize("returns", ["everything", "the output alone"])
def test_liger_overwrites_its_inputs_and_is_given_fresh_ones(returns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(a: Tensor, b: Tensor) -> Any:
        c = F.silu(a) * b
        return (a, b, c) if returns == "everything" else c

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> Any:
        da, db = cases.SWIGLU.reference_backward(dc.double(), a.double(), b.double())
        a.copy_(da)
        b.copy_(db)
        return (a, b) if returns == "everything" else None

    module = SimpleNamespace(swiglu_forward=forward, swiglu_backward=backward)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.swiglu", module)
    monkeypatch.setattr(peers, "NEED_GPU", frozenset())  # these kernels do not
    rows = rows_of(small(peers=("liger_swiglu",)))
    assert rows["Liger", "forward"].status == rows["Liger", "backward"].status == run.OK
