"""The `adjoint` command: what it prints, how it refuses, its exit status."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import adjoint
from adjoint.cli import app, env
from adjoint.cli.call import tensor_arguments
from adjoint.contract.cases import Subject
from adjoint.core.op.operator import operators
from adjoint.verify.listing.jobs import subjects


@pytest.fixture(autouse=True)
def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells how wide lines may be."""
    monkeypatch.delenv("COLUMNS", raising=False)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_version_and_help() -> None:
    assert call("--version").output.strip() == f"adjoint {adjoint.__version__}"
    done = call("--help")
    assert done.exit_code == 0
    for command in ("env", "ops", "plan", "verify", "bench", "train", "generate"):
        assert command in done.output
        assert call(command, "--help").exit_code == 0


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "adjoint", "plan", "relu", "--shape", "4"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "unknown op 'relu'" in done.stderr and "Traceback" not in done.stderr


def in_a_terminal_of(encoding: str, *arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "adjoint", *arguments],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("encoding", ("ascii", "cp1252"))
def test_terminals_that_lack_characters_get_their_escapes(encoding: str) -> None:
    """A bound has ½, ≤, η and 2⁻¹⁴⁹."""
    arguments = ("plan", "silu", "--shape", "4x64", "--device", "cpu")
    assert b"u = 2\\u207b" in in_a_terminal_of(encoding, *arguments)
    data = json.loads(in_a_terminal_of(encoding, *arguments, "--json").decode(encoding))
    assert data == json.loads(in_a_terminal_of("utf-8", *arguments, "--json"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", (("env",), ("ops", "silu"), ("plan", "silu", "--shape", "4", "--json")))
def test_an_output_that_cannot_be_written_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "adjoint", *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode() == "the output cannot be written: No space left on device\n"


def test_env_names_versions_and_backends() -> None:
    done = call("env")
    assert done.exit_code == 0, done.output
    for word in (adjoint.__version__, torch.__version__, "triton on cpu", "eager on cpu", "works"):
        assert word in done.output
    if not torch.cuda.is_available():
        assert "torch sees none" in done.output


def test_env_import_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_import_seconds", lambda modules: 2.5 if "adjoint" in modules else 2.0)
    assert "0.50 s more" in call("env", "--import-time").output


def test_import_seconds_are_measured_in_other_processes() -> None:
    assert 0 < env._import_seconds("sys") < 1


# ------------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize(
    ("arguments", "inputs", "keywords"),
    [
        (("silu", "--shape", "4x64"), 1, {}),
        (("swiglu", "--shape", "4x64"), 2, {}),
        (("swiglu", "--shape", "4x64", "--shape", "4x64"), 2, {}),
        (("swiglu", "--shape", "4x64", "--order", "interleaved"), 1, {"order": "interleaved"}),
        (("swiglu[up_gate]", "--shape", "4x64"), 1, {"order": "up_gate"}),
    ],
)
def test_plan_prints_all_of_the_explanation(arguments: tuple[str, ...], inputs: int, keywords: dict[str, str]) -> None:
    done = call("plan", *arguments, "--dtype", "float16", "--device", "cpu")
    assert done.exit_code == 0, done.output
    function = getattr(adjoint, arguments[0].split("[")[0])
    tensors = [torch.empty(4, 64, dtype=torch.float16, device="meta")] * inputs
    expected = str(adjoint.plan(function, *tensors, device="cpu", **keywords))
    assert done.output.rstrip("\n") == expected


TABLE = ("--shape", "50x8")


@pytest.mark.parametrize(
    ("arguments", "inputs", "keywords"),
    [
        (("embedding", "--shape", "3x4", *TABLE), {"ids": (3, 4)}, {}),
        (("embedding", "--shape", "weight=50x8", "--shape", "ids=3x4"), {"ids": (3, 4)}, {}),
        (
            ("embedding", "--shape", "9", *TABLE, "--set", "padding_idx=-1", "--set", "out_of_range=zero"),
            {"ids": (9,)},
            {"padding_idx": -1, "out_of_range": "zero"},
        ),
        (("embedding", "--shape", "9", *TABLE, "--set", "sparse=True"), {"ids": (9,)}, {"sparse": True}),
        (("embedding_bag", "--shape", "3x4", *TABLE), {"ids": (3, 4)}, {}),
        (("embedding_bag", "--shape", "9", *TABLE, "--shape", "5"), {"ids": (9,), "offsets": (5,)}, {}),
        (
            ("embedding_bag", "--shape", "3x4", *TABLE, "--shape", "per_sample_weights=3x4", "--set", "mode=sum"),
            {"ids": (3, 4), "per_sample_weights": (3, 4)},
            {"mode": "sum"},
        ),
        (
            ("embedding_bag", "--shape", "9", *TABLE, "--shape", "5", "--set", "include_last_offset=True"),
            {"ids": (9,), "offsets": (5,)},
            {"include_last_offset": True},
        ),
    ],
)
def test_plan_takes_ids_tables_and_keywords(
    arguments: tuple[str, ...], inputs: dict[str, tuple[int, ...]], keywords: dict[str, Any]
) -> None:
    done = call("plan", *arguments, "--dtype", "float16", "--device", "cpu")
    assert done.exit_code == 0, done.output
    integers = {"ids", "offsets"}
    tensors = {
        name: torch.empty(shape, dtype=torch.int64 if name in integers else torch.float16, device="meta")
        for name, shape in (inputs | {"weight": (50, 8)}).items()
    }
    expected = str(adjoint.plan(getattr(adjoint, arguments[0]), device="cpu", **tensors, **keywords))
    assert done.output.rstrip("\n") == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ("rms_norm", "--shape", "4x64", "--shape", "64"),
        ("rms_norm", "--shape", "4x64", "--shape", "64", "--shape", "residual=4x64"),
        ("cross_entropy", "--shape", "4x64", "--shape", "4"),
        ("linear_cross_entropy", "--shape", "4x64", "--shape", "100x64", "--shape", "4"),
    ],
)
def test_plan_knows_the_tensors_of_overloaded_functions(arguments: tuple[str, ...]) -> None:
    done = call("plan", *arguments, "--device", "cpu")
    assert done.exit_code == 0 and done.output.startswith(f"problem    {arguments[0]}"), done.output


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_plan_knows_every_tensor_of_every_op(subject: Subject) -> None:
    """One that holds gate and up, "packed" in cases, takes the place of gate."""
    assert set(subject.inputs) - {"packed"} <= set(tensor_arguments(subject.function))


def test_plan_takes_a_dtype_for_each_tensor() -> None:
    shapes = ("--shape", "9:int32", *TABLE, "--shape", "accumulate_into=50x8:float32")
    done = call("plan", "embedding", *shapes, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "embedding_backward_into on cpu, bfloat16/int32/float32" in done.output


def test_plan_passes_the_preference_on() -> None:
    options = ("--backend", "eager", "--repeatable", "--plan", "eager")
    done = call("plan", "silu", "--shape", "8", "--device", "cpu", *options)
    assert "preference backend=eager,plan=eager,repeatable" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("relu", "--shape", "4"), ("unknown op 'relu'", "silu", "swiglu")),
        (("silu", "--shape", "4,64"), ("'4,64'", "4x64")),
        (("silu", "--shape", "-4"), ("-4", "4x64")),
        (("silu", "--shape", "4", "--dtype", "int8"), ("'int8'", "bfloat16")),
        (("silu", "--shape", "4", "--device", "tpu"), ("'tpu'", "cuda")),
        (("silu", "--shape", "4", "--backend", "cuda"), ("backend", "triton", "'cuda'")),
        (("silu", "--shape", "4", "--order", "gate_up"), ("silu", "'order'", "reuse_inputs")),
        (("silu", "--shape", "4", "--device-invariant"), ("triton.rows", "eager", "device_invariant")),
        (("silu", "--shape", "4", "--device", "cpu", "--batch-invariant"), ("eager", "batch_invariant")),
        (("silu", "--shape", "4", "--max-workspace-bytes", "-1"), ("max_workspace_bytes", "-1")),
        (("silu", "--shape", "4", "--shape", "4"), ("silu takes x,", "2 shapes")),
        (("swiglu", "--shape", "4x6", "--shape", "4x5"), ("up", "(4, 6)", "(4, 5)")),
        (("swiglu", "--shape", "4x5", "--order", "gate_up"), ("even", "5")),
        (("swiglu", "--shape", "4x6", "--order", "gateup"), ("order", "interleaved", "'gateup'")),
        (("swiglu", "--shape", "gate=4x6", "--shape", "gate=4x6"), ("gate", "twice")),
        (("silu", "--shape", "up=4"), ("silu has no tensor 'up'", "x")),
        (("silu", "--shape", "4", "--set", "reuse_inputs"), ("'reuse_inputs'", "NAME=VALUE")),
        (("silu", "--shape", "4", "--set", "reuse_inputs=yes"), ("reuse_inputs", "True or False", "'yes'")),
        (("moe.route", "--shape", "4x8"), ("moe.route takes k", "--set k=VALUE")),
        (("embedding", "--shape", "9"), ("embedding takes ids, weight, [accumulate_into=]", "weight has no shape")),
        (("embedding", "--shape", "9", "--shape", "5x4", "--shape", "5x4"), ("[accumulate_into=]", "3 shapes")),
        (("embedding", "--shape", "9:float32", "--shape", "5x4"), ("ids must be int32 or int64", "float32")),
        (("embedding", "--shape", "9:int8", "--shape", "5x4"), ("'int8'", "int32")),
        (("embedding", "--shape", "9", "--shape", "5x4x3"), ("weight", "two axes", "(5, 4, 3)")),
        (("embedding", "--shape", "9", "--shape", "5x4", "--dtype", "int64"), ("weight", "int64")),
        (("embedding", "--shape", "9", "--shape", "5x4", "--set", "padding_idx=5"), ("padding_idx", "-5 to 4", "5")),
        (("embedding", "--shape", "9", "--shape", "5x4", "--set", "weight=1"), ("weight", "shape of weight")),
        (("embedding_bag", "--shape", "9", "--shape", "5x4"), ("ids", "offsets", "(9,)")),
        (("embedding_bag", "--shape", "3x3", "--shape", "5x4", "--set", "mode=min"), ("mode", "'max'", "'min'")),
        (("embedding_bag", "--shape", "3x3", "--shape", "5x4", "--set", "sparse=True"), ("'sparse'", "mode")),
    ],
)
def test_plan_refuses_in_a_sentence(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = call("plan", *arguments)
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.output


RULE = ("gated_delta_rule", *(f"--shape={x}" for x in ("1x64x2x64", "1x64x2x64", "1x64x4x64", "1x64x4", "1x64x4")))


@pytest.mark.parametrize(
    ("target", "plan"), [("sm_80", "triton.chunked"), ("sm_90", "gluon.fused"), ("gfx942", "eager.chunked")]
)
def test_plan_for_a_gpu_that_is_not_there(target: str, plan: str) -> None:
    done = call("plan", *RULE, "--target", target)
    assert done.exit_code == 0, done.output
    assert f"plan       {plan}: the first" in done.output
    assert f"gated_delta_rule on {target}," in done.output and f"/{target}/" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "sm_91"), ("unknown target 'sm_91'", "sm_90", "gfx942")),
        (("--target", "sm_90", "--device", "cpu"), ("device= or target=", "cpu", "sm_90")),
    ],
)
def test_plan_refuses_targets_in_a_sentence(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = call("plan", *RULE, *options)
    assert done.exit_code == 2 and all(word in done.stderr for word in words)


def test_plan_as_data() -> None:
    options = ("--shape", "4x64", "--dtype", "float32", "--device", "cpu", "--repeatable")
    data = json.loads(call("plan", "swiglu", *options, "--json").stdout)
    tensors = [torch.empty(4, 64, device="meta")] * 2
    chosen = adjoint.plan(adjoint.swiglu, *tensors, device="cpu", preference=adjoint.Preference(repeatable=True))
    assert data["sku"] == str(chosen.sku) and data["adjoint"]["sku"] == str(chosen.adjoint.sku)  # type: ignore[union-attr]
    assert data["plan"] == chosen.name and data["preference"] == "repeatable"
    facts = {"op": "swiglu", "device": "cpu", "dtypes": ["float32"], "layout": "rows", "target": ""}
    assert data["problem"] == facts | {"sizes": [], "options": []}
    assert data["guarantee"]["y"]["repeatable"] is True
    assert data["guarantee"]["y"]["error"] == {"kind": "derived", "statement": str(chosen.guarantee["y"].error)}
    assert data["not_taken"] == dict(chosen.others)


def test_plan_is_folded_where_lines_have_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = call("plan", *RULE, "--target", "sm_90")
    assert done.exit_code == 0 and max(map(len, done.output.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    whole = call("plan", *RULE, "--target", "sm_90").output
    assert "".join(done.output.split()) == "".join(whole.split()), "folding loses nothing"


def test_env_as_data() -> None:
    data = json.loads(call("env", "--json").stdout)
    assert data["versions"]["adjoint"] == adjoint.__version__ and data["versions"]["torch"] == torch.__version__
    assert data["backends"]["cpu"]["eager"] == ""
    assert len(data["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


# ------------------------------------------------------------------------------------------------- ops


def test_ops_lists_every_plan_with_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(call("ops", "gated_delta_rule", "silu", "--json").stdout)
    (hopper,) = [x for x in listed if x["plan"] == "gluon.fused" and x["direction"] == "backward"]
    assert hopper["op"] == "gated_delta_rule" and hopper["places"] == ["sm_90"]
    assert hopper["dtypes"] == ["bfloat16", "float16"]
    assert ["dq", "repeatable, batch_invariant(sequence); error derived"] in hopper["promises"]
    for operator, op in (("gated_delta_rule", "gated_delta_rule"), ("silu_backward", "silu")):
        (found,) = [o for o in operators() if o.name == operator]
        assert {x["plan"] for x in listed if x["op"] == op} >= {candidate.name for candidate in found.candidates()}
    monkeypatch.setenv("COLUMNS", "80")
    printed = call("ops", "silu").output
    assert "triton.rows, forward: bfloat16, float16; every GPU" in printed and "enumerated" in printed
    assert max(map(len, printed.splitlines())) <= 80
    done = call("ops", "relu")
    assert done.exit_code == 2 and "unknown op 'relu'" in done.stderr


# ---------------------------------------------------------------------------------------------- verify


def test_verify_refuses_unknown_ops_and_devices() -> None:
    done = call("verify", "relu", "--device", "cpu")
    assert done.exit_code == 2 and "relu" in done.stderr and "swiglu" in done.stderr
    done = call("verify", "--device", "cuda:9")
    assert done.exit_code == 2 and "cuda:9" in done.stderr
