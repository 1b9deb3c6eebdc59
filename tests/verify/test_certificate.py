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


def test_what_one_of_them_lacks_of_a_plan_that_both_ran_is_named(certificate: dict[str, Any]) -> None:
    other = copy.deepcopy(certificate)
    other["digests"].remove(_digest_of(other, "embedding", "out"))
    (check,) = [c for c in other["checks"] if (c["op"], c["dtype"], c["check"]) == ("l2_norm", "float32", "repeats")]
    other["checks"].remove(check)
    (error,) = [e for e in other["errors"] if (e["op"], e["dtype"], e["output"]) == ("l2_norm", "float32", "dx")]
    other["errors"].remove(error)
    found = comparison.compare(certificate, other)
    assert len(found.missing) == 3 and not found.broken
    assert found.missing[0] == "l2_norm float32 eager: repeats was checked on the first only"
    assert found.missing[1] == "l2_norm float32 eager: the error of dx was measured on the first only"
    assert found.missing[2].startswith("embedding ") and "out of " in found.missing[2]
    assert found.missing[2].endswith("has a digest on the first only")
    assert all(words.endswith("on the second only") for words in comparison.compare(other, certificate).missing)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema": 1, "digests": []}', "it lacks versions, kernel_code, skus"),
        ('{"schema": 9}', "its schema is 9, and this version reads 1"),
        ("[1]", "it is no certificate"),
        ("{", "cannot be read as a file of verify --certificate"),
        (b"\xff\xfe", "cannot be read as a file of verify --certificate"),
        (None, "No such file"),
    ],
)
def test_wrong_files_are_refused(content: str | bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = call("certificate", "compare", path, path)
    assert done.exit_code == 2 and words in done.stderr and not isinstance(done.exception, ValueError)


@pytest.mark.parametrize("value", (7, [7], {"a": 7}, [{"op": 7}]), ids=("number", "list", "object", "entries"))
@pytest.mark.parametrize("name", ("versions", "kernel_code", "skus", "checks", "errors", "digests", "failures"))
def test_a_file_with_something_else_where_a_part_should_be_is_refused(
    name: str, value: object, certificate: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(certificate))
    (tmp_path / "b.json").write_text(json.dumps({**certificate, name: value}))
    done = call("certificate", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert done.exit_code == 2 and f"what it has as {name} is of another form" in done.stderr


def test_a_certificate_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "taken.html").mkdir()
    (tmp_path / "taken.json").write_text("kept")
    done = call("verify", "silu", "--device", "cpu", "--certificate", tmp_path / "taken")
    assert done.exit_code == 2 and "taken.html cannot be written: Is a directory" in done.stderr
    assert "silu" not in done.output.replace(str(tmp_path), "") and (tmp_path / "taken.json").read_text() == "kept"
    done = call("verify", "silu", "--device", "cpu", "--certificate", tmp_path / "no" / "folder")
    assert done.exit_code == 2 and "there is no folder" in done.stderr
