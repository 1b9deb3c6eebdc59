"""What a stranger gets: a cheap import, the right files, one version."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import adjoint

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORT = """
import sys, time
start = time.perf_counter()
import torch
between = time.perf_counter()
before = set(sys.modules)
import adjoint
end = time.perf_counter()
added = set(sys.modules) - before
print(between - start, end - between)
heavy = {"numpy", "torch._dynamo", "triton", "adjoint.contract", "adjoint.integrations", "adjoint.known_answers"}
print(sorted(added & heavy), torch.cuda.is_initialized())
print(sorted(name for name in added if name.startswith("adjoint.") and name.endswith(".kernels")))
"""


def import_in_a_new_process() -> tuple[float, float, str, str]:
    """Seconds for torch, seconds more for adjoint, what that imported and initialised, and kernel modules."""
    command = [sys.executable, "-c", IMPORT]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    of_torch, of_adjoint = map(float, lines[0].split())
    return of_torch, of_adjoint, lines[1], lines[2]


def test_importing_is_cheap_and_touches_no_gpu() -> None:
    runs = [import_in_a_new_process() for _ in range(2)]
    of_torch, of_adjoint, imported, kernels = min(runs)
    print(f"\nimport torch {of_torch:.2f} s, then import adjoint {of_adjoint:.2f} s")
    assert imported == "[] False", "heavy modules imported; whether CUDA was initialised"
    assert kernels == "['adjoint.core.kernels']", "a family's kernels import Triton: they wait for their first use"
    assert of_adjoint < 0.5 * of_torch + 0.5


def test_the_version_is_the_changelogs() -> None:
    assert "version" in PROJECT["dynamic"], "the version is read from adjoint.__version__"
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == adjoint.__version__


def test_the_dependencies_are_few() -> None:
    names = {re.split(r"[<>=;\s]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"torch", "triton", "jaxtyping", "rich", "typer"}


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        assert re.split(r"[<>=;\s]", requirement)[0] in pins, requirement


@pytest.mark.parametrize("module", ["", "moe", "gated_delta", "nn", "integrations"])
def test_dir_shows_public_names_alone(module: str) -> None:
    shown: Any = getattr(adjoint, module) if module else adjoint
    names = set(dir(shown)) - {"__version__"}
    assert names == set(shown.__all__) and all(getattr(shown, name) is not None for name in names)


def test_what_is_imported_late_is_an_attribute() -> None:
    code = (
        "import sys, adjoint\n"
        "assert 'adjoint.integrations' not in sys.modules\n"
        "assert callable(adjoint.integrations.fla.chunk_gated_delta_rule)\n"
        "assert callable(adjoint.integrations.transformers.register_experts)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for missing in (lambda: adjoint.integration, lambda: adjoint.integrations.liger):
        with pytest.raises(AttributeError, match="has no attribute"):
            missing()


def test_the_sdist_holds_docs_examples_and_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="an sdist is built without a build environment")
    left_out = (".git", ".venv", "peers", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(*left_out))
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True)
    with tarfile.open(tmp_path / f"adjoint-{adjoint.__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("docs", "examples", "tests", "adjoint", "benchmarks")
    expected = {
        str(path.relative_to(source))
        for folder in folders
        for path in (source / folder).rglob("*")
        if path.suffix in (".py", ".md", ".json")
    }
    files = {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "mkdocs.yml", "mkdocs_pages.py"}
    assert expected | files <= held, sorted((expected | files) - held)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="77", reason="a wheel is built without a build environment")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "adjoint", source / "adjoint", ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = built.glob("*.whl")
    assert path.name.startswith(f"adjoint-{adjoint.__version__}-")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "adjoint").rglob("*")
        if path.suffix in (".py", ".json", ".txt") or path.name == "py.typed"
    }
    assert "adjoint/py.typed" in shipped
    assert "adjoint/ops/activation/schedules.json" in shipped
    assert shipped == sources


def test_the_wheel_holds_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    held = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "Apache License" in wheel.read(held["licenses/LICENSE"]).decode()
    assert "adjoint = adjoint.cli:main" in wheel.read(held["entry_points.txt"]).decode()
    metadata = wheel.read(held["METADATA"]).decode()
    assert f"Version: {adjoint.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_families_are_imported_from_by_name() -> None:
    from adjoint.gated_delta import gate  # type: ignore[import-not-found]
    from adjoint.moe import route  # type: ignore[import-not-found]

    assert route is adjoint.moe.route and gate is adjoint.gated_delta.gate
