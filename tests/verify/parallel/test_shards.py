"""Shards of a run, the files they are saved in, and what may be merged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adjoint.core.errors import ArgumentError
from adjoint.verify.parallel import shards
from adjoint.verify.parallel.shards import Part, Shard, read_shard
from tests.verify import listings

LISTED = listings.list_sound()
SUITE = shards.describe(LISTED, "a GPU", {"torch": "2.13.0", "triton": "3.7.1"})


def part(index: int, count: int = 3) -> Part:
    shard = Shard(index, count)
    return Part(SUITE, shard, {position: LISTED[position].run() for position in shard.positions(len(LISTED))})


def parts(*indices: int) -> list[tuple[Path, Part]]:
    return [(Path(f"{place}.json"), part(index)) for place, index in enumerate(indices)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_shards_are_the_whole_without_overlap(count: int) -> None:
    positions = [position for index in range(1, count + 1) for position in Shard(index, count).positions(len(LISTED))]
    assert sorted(positions) == list(range(len(LISTED)))


def test_a_shard_is_every_nth_job() -> None:
    assert read_shard("2/3") == Shard(2, 3)
    assert [*read_shard("2/3").positions(7)] == [1, 4]


@pytest.mark.parametrize("text", ["0/3", "4/3", "x", "", "1", "1/0", "0/0", "-1/3", "1/3/3", "1.5/3", " 1/3"])
def test_other_words_are_no_shard(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--shard must be I/N with I from 1 to N, such as 2/4, not '.*'"):
        read_shard(text)


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    shards.save(part(2), tmp_path / "part.json")
    assert shards.load(tmp_path / "part.json") == part(2)


def test_the_parts_are_the_whole_in_the_order_of_the_jobs() -> None:
    whole = shards.merge(parts(3, 1, 2))
    assert whole == part(1, 1) and whole.is_complete
    assert [row.check for row in whole.all_rows] == [job.check for job in LISTED]


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((), "needs the files of all shards"),
        ((1, 3), "no file has shard 2/3"),
        ((2,), "no file has shard 1/3 or 3/3"),
        ((1, 2, 3, 2), r"shard 2/3 is in 1\.json and again in 3\.json"),
    ],
)
def test_shards_that_are_missing_or_doubled_are_refused(indices: tuple[int, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        shards.merge(parts(*indices))


CHANGES: dict[str, tuple[Callable[[Part], Part], str]] = {
    "device": (lambda p: replace(p, suite=replace(p.suite, device="another")), "device is a GPU .* another"),
    "version": (
        lambda p: replace(p, suite=replace(p.suite, versions={"torch": "2.11.0", "triton": "3.7.1"})),
        r"torch is 2\.13\.0 .* 2\.11\.0",
    ),
    "source": (lambda p: replace(p, suite=replace(p.suite, source="0")), "source is"),
    "labels": (lambda p: replace(p, suite=replace(p.suite, labels="0")), "labels is"),
    "jobs": (lambda p: replace(p, suite=replace(p.suite, jobs=6)), "jobs is 7 .* 6"),
    "number of shards": (lambda p: part(2, 4), "number of shards is 3 .* 4"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parts_of_different_runs_are_refused(name: str) -> None:
    change, words = CHANGES[name]
    first, second, third = parts(1, 2, 3)
    with pytest.raises(ArgumentError, match=rf"0\.json and 1\.json are no parts of one run: {words}"):
        shards.merge([first, (second[0], change(second[1])), third])


def test_a_part_that_was_interrupted_is_refused() -> None:
    first, (path, second), third = parts(1, 2, 3)
    second = replace(second, rows={1: second.rows[1]})
    with pytest.raises(ArgumentError, match=r"1\.json has 1 of the 2 checks of shard 2/3"):
        shards.merge([first, (path, second), third])


def test_the_order_of_the_jobs_is_part_of_the_suite() -> None:
    assert shards.describe(LISTED, "a GPU", SUITE.versions) == SUITE
    assert shards.describe(LISTED[::-1], "a GPU", SUITE.versions).labels != SUITE.labels


def test_every_file_of_the_package_is_part_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adjoint.__file__", str(tmp_path / "__init__.py"))
    digests = set()
    for name, content in (("__init__.py", ""), ("ops/kernels.py", "1"), ("ops/kernels.py", "2"), ("a.json", "{}")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        digests.add(shards.digest_source())
    assert len(digests) == 4


def _content(path: Path) -> dict[str, Any]:
    shards.save(part(1), path)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: "no JSON", "JSONDecodeError"),
        (lambda content: "[]", "TypeError"),
        (lambda content: "{}", "'schema'"),
        (lambda content: json.dumps(content | {"schema": 0}), "its schema is 0, and this version reads 1"),
        (lambda content: json.dumps(content | {"jobs": [{"position": 0}]}), "'rows'"),
    ],
)
def test_other_files_are_refused(change: Callable[[dict[str, Any]], str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_text(change(_content(path)))
    with pytest.raises(ArgumentError, match=rf"part\.json cannot be read as a file of --save: .*{words}"):
        shards.load(path)
