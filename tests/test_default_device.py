"""Everything runs under another default device than that of its tensors, as `torch.set_default_device` sets it.

A tensor without `device=` would then lie elsewhere than the tensors beside it.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import adjoint

SOURCE = Path(adjoint.__file__).parent
PARTS = ("core", "integrations", "ops")
OF_CHECKS = {"cases.py", "reference.py", "values.py"}
"""Files that make inputs of checks, or define results, on the device that is the default."""

FACTORIES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}


def _without_device(code: str) -> list[int]:
    """The lines of calls such as `torch.zeros(3)` that name no device."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def test_new_tensors_name_their_device() -> None:
    files = [file for part in PARTS for file in (SOURCE / part).rglob("*.py") if file.name not in OF_CHECKS]
    found = {str(file.relative_to(SOURCE)): lines for file in files if (lines := _without_device(file.read_text()))}
    assert len(files) > 100 and not found


@pytest.mark.parametrize(("code", "lines"), [("torch.zeros(3)", [1]), ("x = 1\ny = [torch.arange(x)]", [2])])
def test_the_search_finds_them(code: str, lines: list[int]) -> None:
    assert _without_device(code) == lines
    assert _without_device(code.replace(")", ', device="cpu")')) == []


CALLS = """
import torch
with torch.device("meta"):
    import adjoint
torch.set_default_device("meta")
cpu = {"device": "cpu"}
logits = torch.randn(4, 7, requires_grad=True, **cpu)
labels = torch.tensor([0, 6, -100, 2], **cpu)
x, w, bounds = torch.randn(1, 5, 8, requires_grad=True, **cpu), torch.randn(8, 4, **cpu), torch.tensor([0, 2, 5], **cpu)
q, k = torch.nn.functional.normalize(torch.randn(2, 1, 5, 1, 4, **cpu), dim=-1)
v, g = torch.randn(1, 5, 1, 4, requires_grad=True, **cpu), torch.full((1, 5, 1), -0.1, **cpu)
results = (
    adjoint.cross_entropy(logits, labels),
    adjoint.linear_cross_entropy(logits, torch.eye(7, **cpu), labels),
    adjoint.causal_conv1d(x, w, cu_seqlens=bounds),
    adjoint.gated_delta_rule(q, k, v, g, -g, cu_seqlens=bounds)[0],
    adjoint.embedding(labels.clamp(0, 3), logits),
)
for result in results:
    result.sum().backward()
    assert result.is_cpu
assert logits.grad.is_cpu and x.grad.is_cpu and v.grad.is_cpu
"""


def test_the_package_may_be_imported_and_run_under_another_default_device() -> None:
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
