"""transformers' models take their own functions in our tests, whether FLA is installed or not."""

import subprocess
import sys
from pathlib import Path

import pytest

from adjoint.core.kernels import interpreting
from tests.without_fla import MODELS


@pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")
def test_an_installed_fla_is_not_taken(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    package = tmp_path / "fla"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def taken(*arguments, **keywords):\n    raise AssertionError('FLA')\n\n"
        "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = causal_conv1d_fn = causal_conv1d_update = taken\n"
    )
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[1])!r}]
from tests.without_fla import import_models
import_models()
assert "fla" not in sys.modules
from importlib import import_module
for model in {MODELS!r}:
    module = import_module(f"transformers.models.{{model}}.modeling_{{model}}")
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(module, name)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        assert not any(getattr(cell, "__name__", "") == "taken" for cell in cells), (model, name)
import fla
assert fla.chunk_gated_delta_rule
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]
