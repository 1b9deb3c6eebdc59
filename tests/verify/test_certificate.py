"""The certificate: what it holds, both of its files, and what a comparison of two tells apart."""

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adjoint.cli import app
from adjoint.verify.certificate import comparison, load


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stem = tmp_path_factory.mktemp("certificate") / "here"
    ops = ("l2_norm", "embedding", "normalize")
    done = call("verify", *ops, "--device", "cpu", "--jobs", 1, "--certificate", stem)
    assert done.exit_code == 0 and "here.json" in done.output and "here.html" in done.output, done.output
    return stem


@pytest.fixture
def certificate(files: Path) -> dict[str, Any]:
    return load(files)


def test_it_holds_what_was_promised_and_measured(certificate: dict[str, Any]) -> None:
    assert certificate["verdict"] == "passed" and certificate["failed"] == 0 and certificate["depth"] == "quick"
    assert {"python", "torch", "adjoint", "driver", "triton"} <= certificate["versions"].keys()
    assert {"gated_delta", "moe", "device"} <= certificate["kernel_code"].keys()
    assert all(len(digest) == 32 for digest in certificate["kernel_code"].values())
    assert any(sku.startswith("l2_norm_backward/eager/") and "/r" in sku for sku in certificate["skus"])
    assert {check["check"] for check in certificate["checks"]} >= {"accuracy", "repeats", "batch invariance", "poison"}
    assert all(0 <= error["share"] <= 1 for error in certificate["errors"]) and len(certificate["errors"]) > 10
    outputs = {(d["op"], d["output"]) for d in certificate["digests"]}
    assert outputs >= {
        ("l2_norm", "y"),
        ("l2_norm", "dx"),
        ("l2_norm", "inputs"),
        ("embedding", "dweight"),
        ("embedding", "out"),
    }


class _Structure(HTMLParser):
    """Whether every element that is opened is closed, and what a page asks of others."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.requests: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.requests += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(files: Path) -> None:
    text = files.with_suffix(".html").read_text(encoding="utf-8")
    structure = _Structure()
    structure.feed(text)
    assert not structure.open and not structure.requests and "@import" not in text and "url(" not in text
    assert "Every check passed" in text and "l2_norm" in text and 'name="viewport"' in text


def test_a_certificate_is_like_itself(files: Path) -> None:
    done = call("certificate", "compare", files, files.with_suffix(".json"))
    assert done.exit_code == 0, done.output
    assert done.output.strip().endswith("results have the same bits on both") and done.output.count("\n") == 1


def _digest_of(certificate: dict[str, Any], op: str, output: str) -> dict[str, Any]:
    return next(d for d in certificate["digests"] if (d["op"], d["output"]) == (op, output))


def test_other_bits_break_a_promise_or_are_told_apart(certificate: dict[str, Any]) -> None:
    other = copy.deepcopy(certificate)
    copied = _digest_of(other, "embedding", "out")
    assert "device_invariant" in copied["bits"]
    copied["digest"] = "0" * 32
    (words,) = comparison.compare(certificate, other).broken
    assert "embedding" in words and "every device" in words

    other = copy.deepcopy(certificate)
    product = _digest_of(other, "normalize", "dx")
    assert "device_invariant" not in product["bits"] and "repeatable" in product["bits"]
    product["digest"] = "0" * 32
    (words,) = comparison.compare(certificate, other).broken
    assert "same machine" in words
    other["device"] = "another GPU"
    found = comparison.compare(certificate, other)
    assert not found.broken and "normalize" in found.bits[0] and found.machine[0].endswith("| another GPU")

    _digest_of(other, "normalize", "inputs")["digest"] = "1" * 32
    assert "other inputs" in comparison.compare(certificate, other).bits[0]


def test_plans_on_kernels_and_in_pytorch_are_compared_where_every_device_is_promised(
    certificate: dict[str, Any],
) -> None:
    other = copy.deepcopy(certificate)
    for digest in other["digests"]:
        digest["plan"] = digest["plan"].replace("eager", "triton")
    assert comparison.compare(certificate, other).same_bits > 0
    for digest in other["digests"]:
        digest["digest"] = "0" * 32
    found = comparison.compare(certificate, other)
    assert found.broken and all("every device" in words for words in found.broken)


def test_errors_failures_and_missing_plans_are_named(certificate: dict[str, Any], tmp_path: Path) -> None:
    other = copy.deepcopy(certificate)
    other["errors"][0]["share"] = 0.5 * certificate["errors"][0]["share"]
    gone = other["skus"].pop()
    row = {"op": "l2_norm", "dtype": "float32", "plan": "eager", "check": "accuracy", "measured": "y", "detail": "off"}
    other["failures"] = [row]
    found = comparison.compare(certificate, other)
    assert certificate["errors"][0]["op"] in found.errors[0] and found.missing == [f"{gone} ran on the first only"]
    assert found.broken == ["the second failed: l2_norm float32 eager: accuracy: y: off"]
    for name, data in (("a.json", certificate), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(data))
    done = call("certificate", "compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["missing"] == found.missing


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"schema": 1}')
    for path, words in ((tmp_path / "rows.json", "--certificate"), (tmp_path / "nowhere.json", "No such file")):
        done = call("certificate", "compare", path, path)
        assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.output
    done = call("verify", "silu", "--device", "cpu", "--certificate", tmp_path / "no" / "folder")
    assert done.exit_code == 2 and "there is no folder" in done.stderr
