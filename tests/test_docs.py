"""README and docs say what is true: every block runs, every output and table is the real one.

A ```text block right after a ```python block is its output. Blocks of a document share one
namespace and run top to bottom, on the CPU, in a process of their own.

`python -m tests.test_docs` writes outputs and tables anew, for review in the diff.
"""

import doctest
import importlib
import json
import os
import re
import runpy
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint
from adjoint.core.guarantee import Guarantee
from adjoint.core.problem import Problem
from adjoint.ops.activation import plans
from adjoint.verify.certificate import kernel_code, load
from adjoint.verify.certificate.page import certificate_page
from adjoint.verify.report import summary
from tests import forks

ROOT = Path(__file__).parents[1]
CERTIFICATE = ROOT / "docs" / "nvidia-h200"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRITON_MODULES = re.compile(
    r"adjoint\.(ops\..*\.(\w*kernels|\w*launch|forward|backward|triton\.\w+)|device\.(faults|grouping\.kernels)|__main__)"
)
MODULES = sorted(
    name
    for path in (ROOT / "adjoint").rglob("*.py")
    if not TRITON_MODULES.fullmatch(
        name := ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    )
)

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)

# ------------------------------------------------------------------------------------------ blocks


@dataclass(frozen=True)
class Block:
    """A fenced block: `start` is the line of its opening fence, counted from 0; `end` that of its closing one."""

    language: str
    lines: tuple[str, ...]
    start: int
    end: int

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            yield Block(lines[start].removeprefix("```"), tuple(lines[start + 1 : number]), start, number)
            start = None
    assert start is None, "a fence is not closed"


def outputs(text: str) -> list[tuple[Block, Block | None]]:
    """Each Python block with the block that shows its output, if there is one."""
    found = list(blocks(text))
    lines = text.splitlines()
    pairs: list[tuple[Block, Block | None]] = []
    for block, after in zip(found, [*found[1:], None][: len(found)], strict=True):
        if block.language == "python":
            shown = after is not None and after.language == "text" and not any(lines[block.end + 1 : after.start])
            pairs.append((block, after if shown else None))
    return pairs


RUN_BLOCKS = """
import contextlib, io, json, sys
import adjoint

name, blocks = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
printed = []
for line, code in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(compile("\\n" * line + code, name, "exec"), namespace)
    printed.append(stream.getvalue())
print(json.dumps(printed))
"""
"""Reads a document and its blocks, and runs them."""


def plain_environment() -> dict[str, str]:
    """No GPU, no interpreter, one thread, this checkout: the same output everywhere."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return kept | fixed | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}


def run(arguments: list[str], given: str = "") -> str:
    done = forks.python(*arguments, environment=plain_environment(), stdin=given)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def printed_by(document: Path) -> list[tuple[Block, Block | None, str]]:
    """Each Python block of a document, the block that shows its output, and what it really prints."""
    pairs = outputs(document.read_text(encoding="utf-8"))
    code = [(block.start + 1, block.text) for block, _ in pairs]
    results = json.loads(run(["-c", RUN_BLOCKS], json.dumps([str(document), code])))
    return [(block, shown, result) for (block, shown), result in zip(pairs, results, strict=True)]


@each_document
def test_every_python_block_runs_and_prints_what_is_shown(document: Path) -> None:
    for block, shown, printed in printed_by(document):
        assert bool(printed) == (shown is not None), f"{document.name}:{block.start + 1} prints {printed!r}"
        if shown is not None:
            assert shown.text == printed, f"{document.name}:{shown.start + 1} is not what the block above prints"


# ---------------------------------------------------------------------------------------- commands


def commands(document: Path) -> list[str]:
    found = blocks(document.read_text(encoding="utf-8"))
    lines = [line for block in found if block.language in ("bash", "console") for line in block.lines]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]


RUN_COMMANDS = """
import json, sys
from adjoint.cli import app
for arguments in json.load(sys.stdin):
    try:
        app(arguments)
    except SystemExit as done:
        if done.code:
            sys.exit(f"adjoint {arguments} gives {done.code}")
"""


def test_every_adjoint_command_is_one() -> None:
    """Cheap ones run; the others are parsed: `--help` still rejects unknown options."""
    lines = {tuple(shlex.split(command)) for document in DOCUMENTS for command in commands(document)}
    ours = sorted(line[1:] for line in lines if line[:1] == ("adjoint",))
    assert len(ours) > 3
    run(["-c", RUN_COMMANDS], json.dumps([[*c, *(() if c[0] in ("env", "plan") else ("--help",))] for c in ours]))


@each_document
def test_every_make_target_is_one(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in commands(document):
        name, *arguments = shlex.split(command) or [""]
        if name == "make":
            assert {argument for argument in arguments if "=" not in argument} <= targets, command


# ------------------------------------------------------------------------------------------ tables

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPERATORS = {"swiglu": plans.SWIGLU, "swiglu_backward": plans.SWIGLU_BACKWARD}


def activation_guarantees() -> str:
    """The guarantees of swiglu, as candidates state them; rows that differ in the dtype alone are one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    everything: list[Guarantee] = []
    for name, device in (("triton.rows", "cuda"), ("eager.float32", "cpu"), ("eager", "cpu")):
        for dtype in DTYPES:
            for operator, candidates in OPERATORS.items():
                candidate = next(c for c in candidates if c.name == name)
                problem = Problem(operator, torch.device(device, 0), (dtype,), "rows")
                if candidate.refuse(problem):
                    continue
                stated = candidate.guarantee(problem)
                everything += stated.values()
                for output, guarantee in stated.items():
                    row = (name, output, guarantee.flags, guarantee.accumulator, error_cell(guarantee))
                    rows.setdefault(row, []).append(str(dtype).removeprefix("torch."))
    merged: dict[tuple[str, ...], list[str]] = {}
    for (name, output, *rest), dtypes in rows.items():
        merged.setdefault((name, ", ".join(dtypes), *rest), []).append(f"`{output}`")
    domains = list(dict.fromkeys(guarantee.domain for guarantee in everything))
    lines = ["| plan | dtype | output | bits | arithmetic | error |", "|---|---|---|---|---|---|"]
    for (name, dtypes, flags, accumulator, error), named in merged.items():
        lines.append(f"| {name} | {dtypes} | {', '.join(named)} | {flags} | {accumulator} | {error} |")
    return "\n".join((*lines, "", f"Domain: {domains[0]}. Of `eager.float32`: {domains[1]}."))


def error_cell(guarantee: Guarantee) -> str:
    """An error statement that fits a table's cell, without the dtype it names."""
    return re.sub(r"every (float|bfloat)\d+ ", "every ", str(guarantee.error)).replace("|", "\\|")


TABLES = {"guarantees:activation": activation_guarantees}


def with_tables(text: str) -> str:
    """A document with every generated table as it should be."""
    for name, table in TABLES.items():
        begin, end = (re.escape(f"<!-- {name}:{edge} -->") for edge in ("begin", "end"))
        text = re.sub(f"({begin}\n).*?({end})", lambda match: f"{match[1]}{table()}\n{match[2]}", text, flags=re.S)  # noqa: B023
    return text


@each_document
def test_tables_show_the_stated_guarantees(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.test_docs"


def test_the_tables_have_their_places() -> None:
    start, benchmarks = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("start.md", "benchmarks.md"))
    for text, name in (*((start, name) for name in TABLES), (benchmarks, "bench:activation")):
        assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1


def test_the_readme_is_short() -> None:
    text = DOCUMENTS[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and "Qwen3-Next" in text.splitlines()[0]


def test_the_lines_that_patch_a_model_run_on_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a folder in place of the weights that the README names, which are not here."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # for device_map
    from tests.models.small import small_model
    from tests.without_fla import import_models

    import_models()
    (sketch,) = (block for block in blocks(DOCUMENTS[0].read_text(encoding="utf-8")) if block.language == "py")
    assert len([line for line in sketch.lines if line]) <= 5
    code, count = re.subn(r'from_pretrained\("[^"]+"', f"from_pretrained({str(tmp_path)!r}", sketch.text)
    assert count == 1
    small_model("qwen3_next").save_pretrained(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert "gated_delta_rule" in capsys.readouterr().out
    ids = torch.arange(1, 13, device=names["model"].device)[None]
    report = adjoint.audit(names["model"], {"input_ids": ids, "labels": ids})
    assert report.is_sound and {"gated_delta_rule", "moe.experts"} <= {entry.op for entry in report.entries}


def test_the_certificate_of_the_gpu_and_the_link_to_it() -> None:
    """Both files or none, with a link; a run that passed, of all ops, on the GPU that the name says."""
    page, link = CERTIFICATE.with_suffix(".html"), f"](docs/{CERTIFICATE.name}.html)"
    assert page.exists() == CERTIFICATE.with_suffix(".json").exists()
    assert page.exists() == (link in DOCUMENTS[0].read_text(encoding="utf-8")), "the README links it once it is there"
    if page.exists():
        assert not _what_is_wrong_with(load(CERTIFICATE), page.read_text(encoding="utf-8"))


def test_the_readme_names_the_kernels_that_changed_since_the_certificate() -> None:
    """Each family whose source is not what the certificate has a digest of, as `embedding`, and no other."""
    paragraphs = DOCUMENTS[0].read_text(encoding="utf-8").split("\n\n")
    (paragraph,) = (text for text in paragraphs if f"](docs/{CERTIFICATE.name}.html)" in text)
    named = set(re.findall(r"`(\w+)`", paragraph)) & kernel_code().keys()
    changed = _changed_since(load(CERTIFICATE))
    assert named == changed, "README.md, under Checked, names the families whose kernels the certificate is not of"


def _changed_since(certificate: dict[str, Any]) -> set[str]:
    """The families whose kernels are not those that a certificate has a digest of."""
    return {family for family, digest in kernel_code().items() if certificate["kernel_code"].get(family) != digest}


def _what_is_wrong_with(certificate: dict[str, Any], page: str) -> list[str]:
    """Why a certificate is not one of an H200 on which everything was checked and passed."""
    plans = {entry["op"]: entry["plans"] for entry in certificate["ops"]}
    families = {op: family for family, ops in summary.names().items() for op in ops}
    ours = {op for op, family in families.items() if op in plans or family not in _changed_since(certificate)}
    rights = {
        "a check failed": certificate["verdict"] == "passed"
        and not certificate["failed"]
        and certificate["passed"] > 0,
        "failures are listed": not certificate["failures"] and not any(c["failed"] for c in certificate["checks"]),
        "an error is past its bound": all(float(e["share"]) <= 1 for e in certificate["errors"]),
        "the run was not finished": certificate["complete"] and certificate["shard"] == "1/1",
        "it is of another GPU": "H200" in certificate["device"]
        and any("/sm_90/" in sku for sku in certificate["skus"]),
        "no driver is named": bool(certificate["versions"]["driver"] and certificate["versions"]["cuda"]),
        "an op is missing": plans.keys() == ours,  # but for new ones, whose family the README says has changed
        "the kernels for Hopper did not run": all(
            any(name.startswith("gluon.") for name in plans.get(op, ())) for op in ("gated_delta_rule", "moe.experts")
        ),
        "the page is another's": page == certificate_page(certificate),
    }
    return [reason for reason, right in rights.items() if not right]


def _good_certificate() -> dict[str, Any]:
    """What a run on an H200 would leave."""
    plans = {"gated_delta_rule": ["gluon.fused"], "moe.experts": ["gluon.grouped", "triton.grouped"]}
    check = {"dtype": "bfloat16", "plan": "triton", "check": "accuracy", "promise": "≤ ½ ulp", "measured": "y: 0.9"}
    names = [op for family in summary.names().values() for op in family]
    return {
        "schema": 1, "date": "2026-11-18 12:00 UTC", "device": "NVIDIA H200", "depth": "quick", "source": "ab" * 32,
        "versions": {"torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.95"}, "shard": "1/1", "complete": True,
        "seconds": 99.0, "verdict": "passed", "passed": 9, "failed": 0, "kernel_code": kernel_code(),
        "ops": [{"op": op, "plans": plans.get(op, []), "checks": 1, "failures": 0, "share": 0.9} for op in names],
        "skus": ["silu/triton/silu_forward_rows/r1/sm_90/bfloat16"], "failures": [], "digests": [],
        "checks": [{"op": op, "checks": 1, "failed": 0, **check} for op in names],
        "errors": [{"op": "silu", "dtype": "bfloat16", "plan": "triton", "output": "y", "share": 0.9, "promise": ""}],
    }  # fmt: skip


def test_a_certificate_that_does_not_say_so_is_refused() -> None:
    good = _good_certificate()
    assert not _what_is_wrong_with(good, certificate_page(good))
    failure = {"op": "silu", "dtype": "", "plan": "", "check": "accuracy", "measured": "y", "detail": "off"}
    eager = [{**entry, "plans": ["triton.chunked"]} for entry in good["ops"]]
    changes: dict[str, dict[str, Any]] = {
        "a check failed": {"verdict": "failed", "failed": 1},
        "failures are listed": {"failures": [failure]},
        "an error is past its bound": {"errors": [{**good["errors"][0], "share": 1.01}]},
        "the run was not finished": {"complete": False, "verdict": "unfinished"},
        "it is of another GPU": {"device": "NVIDIA A100", "skus": ["silu/triton/silu_forward_rows/r1/sm_80/bfloat16"]},
        "no driver is named": {"versions": {**good["versions"], "driver": None}},
        "an op is missing": {"ops": good["ops"][1:]},
        "the kernels for Hopper did not run": {"ops": eager},
    }
    for reason, change in changes.items():
        changed = good | change
        assert reason in _what_is_wrong_with(changed, certificate_page(changed))
    assert _what_is_wrong_with(good, certificate_page(good | {"passed": 8})) == ["the page is another's"]
    (first, *_), others = summary.names(), good["ops"][1:]
    changed = good | {"ops": others, "kernel_code": good["kernel_code"] | {first: "of other kernels"}}
    assert not _what_is_wrong_with(changed, certificate_page(changed)), "a new op of a family that is named as changed"


# --------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(example: Path) -> None:
    assert run([str(example)])


def test_the_example_of_fine_tuning_refuses_what_it_cannot_train_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some of the three arguments, or a text without tokens: a sentence, not the small model or a traceback."""
    example = runpy.run_path(str(ROOT / "examples" / "finetune.py"))
    monkeypatch.setattr("sys.argv", ["finetune.py", str(tmp_path), "text.txt"])
    with pytest.raises(SystemExit, match=r"usage: .*FOLDER TEXT OUTPUT"):
        example["main"]()
    with pytest.raises(SystemExit, match="no tokens"):
        example["batches"]([], 84, 2)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md", *EXAMPLES], ids=lambda path: path.name)
def test_no_paths_of_a_machine(document: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:work|tmp|root|home)\b", document.read_text(encoding="utf-8"))


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def anchor_of(heading: str) -> str:
    """The anchor that the site, and other readers of Markdown, give a heading: words joined by hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode())
    return re.sub(r"[-\s]+", "-", kept.strip().lower())


def anchors_of(document: Path) -> set[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text(encoding="utf-8"))
    return {anchor_of(heading) for heading in re.findall(r"(?m)^#+ (.+)$", text)}


@each_document
def test_anchors_of_links_are_headings(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
        led_to = document.parent / target if target else document
        assert anchor in anchors_of(led_to), f"{target}#{anchor}"


def test_the_menu_of_the_site_names_pages_that_are_there() -> None:
    listed = re.findall(r"(?m)^ +(?:- )?[^:#\n]*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    made = set(re.findall(r'"([\w-]+\.md)":', (ROOT / "mkdocs_pages.py").read_text(encoding="utf-8")))
    assert {"index.md", "concepts.md", "gated-delta-error.md", "api.md"} <= set(listed)
    for name in set(listed) - made:
        assert (ROOT / "docs" / name).exists(), name


# --------------------------------------------------------------------------------------- rewriting


def rewrite(document: Path) -> None:
    """Puts the real outputs and tables into a document."""
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
    lines = document.read_text(encoding="utf-8").splitlines(keepends=True)
    for _, shown, printed in reversed(printed_by(document)):
        if shown is not None:
            lines[shown.start + 1 : shown.end] = [printed]
    document.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for _document in DOCUMENTS:
        rewrite(_document)
