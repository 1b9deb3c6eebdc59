"""What stands beside a time: its spread, what it was compared with, and the state of the source."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.bench import contenders, environment, peers
from adjoint.bench.measurement import run
from adjoint.bench.report import pictures, results, tables
from adjoint.contract.cases import Workload, normal
from adjoint.ops.activation.swiglu import cases as activations
from adjoint.ops.embedding.bag import cases as bags
from adjoint.ops.embedding.embedding import cases as embeddings
from tests.bench.small import CPU, higher_first, routing, rows_of, workload_of

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------------------------------- ties


def softmax_and(order: Any) -> Any:
    """The router in torch, with the experts that `order(logits)` ranks first."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = order(logits)[:, :8]
        shares = torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True), chosen

    return route


def test_another_order_of_ties_is_counted_and_is_no_error() -> None:
    row = rows_of(routing(baseline=softmax_and(higher_first)))[run.EAGER, "backward"]
    assert row.status == run.OK and row.error is not None and row.error < torch.finfo(torch.bfloat16).eps / 2
    assert row.ties == 64
    assert "64 ties in another order" in "".join(tables._cells(row, 1.0))


def test_the_order_of_torch_itself_is_counted() -> None:
    baseline = softmax_and(lambda logits: torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 8).indices)
    row = rows_of(routing(baseline=baseline))[run.EAGER, "backward"]
    assert row.status == run.OK and row.ties is not None and 0 < row.ties <= 64


def test_our_own_order_has_no_ties_and_is_held_to_its_guarantee() -> None:
    rows = rows_of(routing())
    assert rows[run.OURS, "backward"].ties is None and rows[run.OURS, "backward"].guarantee
    same = rows_of(routing(baseline=softmax_and(lambda logits: logits.sort(descending=True, stable=True).indices)))
    assert same[run.EAGER, "backward"].ties == 0


@pytest.mark.parametrize("wrong", ["worse experts", "one expert twice"])
def test_a_worse_choice_is_an_error_and_no_tie(wrong: str) -> None:
    def order(logits: Tensor) -> Tensor:
        if wrong == "worse experts":
            return logits.sort(descending=False, stable=True).indices
        return logits.sort(descending=True, stable=True).indices[:, :1].expand(-1, 8)

    row = rows_of(routing(baseline=softmax_and(order), directions=("backward",)))[run.EAGER, "backward"]
    assert row.status == run.FAILED and row.ties == 0


# -------------------------------------------------------------------------------------------- spread


def saved_row(contender: str, microseconds: float, spread: tuple[float, float] | None, **changes: Any) -> run.Row:
    row = run.Row("activation", "w", "forward", contender, run.OK, 10**6, microseconds, microseconds / 100, 1e-3)
    return replace(row, quartiles=spread, **changes)


def table_of(tmp_path: Path, *rows: run.Row, ceiling: float = 4000.0) -> str:
    path = results.save(run.Result(CPU, ceiling, rows), "c", tmp_path)
    return results.markdown(results.load(path), "activation")


def test_a_lead_within_the_spread_is_not_bold(tmp_path: Path) -> None:
    ours = saved_row(run.OURS, 100.0, (99.0, 101.5))
    assert "| 100.0 | 101.0 (1.01×) |" in table_of(tmp_path, ours, saved_row("Liger", 101.0, (100.0, 102.0)))
    assert "| **100.0** | 104.0 (1.04×) |" in table_of(tmp_path, ours, saved_row("Liger", 104.0, (103.0, 105.0)))
    ahead = saved_row("Liger", 90.0, (89.0, 91.0))
    assert "| 100.0 | **90.0** (0.90×) |" in table_of(tmp_path, ours, ahead)
    rough = replace(ahead, status=run.INACCURATE, error=0.1)
    assert "| **100.0** | 90.0 (0.90×), error 0.1 |" in table_of(tmp_path, ours, rough)


def test_a_lead_whose_spread_nobody_saved_is_bold_where_it_is_larger_than_any_spread(tmp_path: Path) -> None:
    ours = saved_row(run.OURS, 100.0, None)
    for theirs, cell in ((102.0, "| 100.0 |"), (111.9, "| 100.0 |"), (112.1, "| **100.0** |")):
        table = table_of(tmp_path, ours, saved_row("Liger", theirs, None))
        assert cell in table and "by more than 12% in rows that were saved without quartiles" in table
    assert "| 100.0 | 99.0 (0.99×) |" in table_of(tmp_path, ours, saved_row("Liger", 99.0, (98.9, 99.1)))
    (content,) = results.saved(ROOT / results.FOLDER)
    rows = [row for row in content["rows"] if row.get("quartiles")]
    spreads = sorted((row["quartiles"][1] - row["quartiles"][0]) / row["microseconds"] for row in rows)
    assert spreads[-1] < results.UNKNOWN_SPREAD


def test_a_spread_is_that_of_all_rounds() -> None:
    entry = object.__new__(run._Entry)
    entry.row = run.Row("f", "w", "forward", "c", run.OK, 1)
    entry.rounds = [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [2.0, 2.0, 2.0]]
    entry._first = entry._last = ()  # the same bits: no second verdict
    entry.contender = contenders.Contender(lambda: ())
    entry.finish()
    assert entry.row.microseconds == 2.0 and entry.row.quartiles == (2.0, 5.0)


def small_swiglu(**changes: Any) -> Workload:
    return replace(workload_of(activations, "swiglu "), make=normal((12, 32), (12, 32)), peers=(), **changes)


def test_every_time_has_its_spread_its_sku_and_the_state_of_the_source(tmp_path: Path) -> None:
    rows = rows_of(small_swiglu(), rounds=2)
    for (contender, direction), row in rows.items():
        low, high = row.quartiles or (0.0, 0.0)
        assert 0 < low <= high
        plan = "swiglu/" if direction == "forward" else "swiglu_backward/"
        assert row.sku.startswith(plan) and "/r" in row.sku if contender == run.OURS else not row.sku
    content = json.loads(results.save(run.Result(CPU, 1.0, tuple(rows.values())), "c", tmp_path).read_text())
    for row in content["rows"]:
        assert row["quartiles"] and bool(row["sku"]) == (row["contender"] == run.OURS)
    (one,) = content["runs"]
    assert len(one["source"]) == 16 and "driver" in one["versions"]


def test_saved_times_have_their_spread_their_sku_and_their_commit() -> None:
    """All but those of the first days, whose runs say no commit: these are shown with no more than they have.

    The commit 19fa184 knew of one way to learn the driver's version, a tool that was not there; it did not guess."""
    (content,) = results.saved(ROOT / results.FOLDER)
    assert any(one.get("commit") for one in content["runs"])
    for number, one in enumerate(content["runs"]):
        rows = [row for row in content["rows"] if row["run"] == number and row["status"] == run.OK]
        assert one.get("commit") or one["date"] <= "2026-11-16", one["command"]
        if one.get("commit"):
            assert one["versions"]["driver"] or one["commit"].startswith("19fa184")
            assert all(row["quartiles"] for row in rows)
            assert all(row["sku"] for row in rows if row["contender"] == run.OURS)


def test_a_step_names_the_plans_of_both_directions() -> None:
    forward, backward = rows_of(small_swiglu(directions=(contenders.STEP,)))[run.OURS, contenders.STEP].sku.split("; ")
    assert forward.startswith("swiglu/") and backward.startswith("swiglu_backward/")


def test_the_commit_says_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "adjoint" / "bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    assert environment.commit() is None
    (package.parent / "__init__.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert environment.commit() is None, "a checkout of something else"
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = environment.commit()
    assert commit is not None and len(commit) == 40
    (package / "new.py").write_text("")
    assert environment.commit() == f"{commit}+"
    run_of = {"versions": {}, "copy_ceiling_gb_per_s": 1.0, "date": "d", "command": "c"}
    shown = results._conditions({"device": "GPU"}, run_of | {"commit": f"{commit}+", "source": "0123"})
    assert f"commit {commit[:12]}+; `c`" in shown
    assert "source 0123; `c`" in results._conditions({"device": "GPU"}, run_of | {"commit": None, "source": "0123"})


# --------------------------------------------------------------------------------- more than a copy


def test_rows_above_a_copy_are_explained_by_their_bytes(tmp_path: Path) -> None:
    reads_more = saved_row(run.OURS, 100.0, (99.0, 101.0), written_bytes=10**6 // 3)
    table = table_of(tmp_path, reads_more, ceiling=9.0)
    assert "| 10 | 111.1%¹ |" in table and "¹ Above 100%: 67% of its bytes are reads" in table
    plain = table_of(tmp_path, replace(reads_more, written_bytes=10**6 // 2), ceiling=9.0)
    assert "nothing that was saved with it says why" in plain
    assert "Above 100%" not in table_of(tmp_path, reads_more, ceiling=20.0)
    row = {"written_bytes": 2**20, "bytes": 2**21}
    assert "fit in the L2 of 50 MiB" in results._above_a_copy(row, {"l2_bytes": 50 * 2**20})
    assert "the text above this table" in results._above_a_copy({"bytes": 1}, {})


def test_a_row_that_is_looked_up_twice_is_read_once() -> None:
    ids, table = torch.tensor([3, 3, 3, 1]), torch.zeros(9, 4, dtype=torch.bfloat16)
    forward = workload_of(embeddings, "zipf").forward_bytes
    assert callable(forward) and forward(ids, table) == (2 + 4) * 4 * 2
    forward = workload_of(bags, "[sum]").forward_bytes
    assert callable(forward) and forward(ids.view(2, 2), table, None, None) == (2 + 2) * 4 * 2


# -------------------------------------------------------------------------------------- saved tables

DOCUMENTS = ("docs/benchmarks.md",)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_those_of_the_saved_results(document: str, tmp_path: Path) -> None:
    """As `adjoint bench --readme` writes them."""
    copy = tmp_path / "copy.md"
    shutil.copy(ROOT / document, copy)
    results.update_readme(copy, ROOT / "benchmarks" / "results")
    assert copy.read_text() == (ROOT / document).read_text(), "run: adjoint bench --readme"


@pytest.mark.parametrize(("kind", "file"), [("speed", "speed.svg"), ("errors", "speed-errors.svg")])
def test_pictures_are_those_of_the_saved_results(kind: str, file: str) -> None:
    """As `adjoint bench --readme --plot docs/speed.svg` draws them."""
    (content,) = results.saved(ROOT / results.FOLDER)
    assert pictures.PICTURES[kind](content) == (ROOT / "docs" / file).read_text(encoding="utf-8")


def test_pictures_show_every_op_that_has_a_peer_and_every_right_result() -> None:
    (content,) = results.saved(ROOT / results.FOLDER)
    libraries = {peer.label for peer in peers.PEERS.values()}
    shown = [row for rows in pictures.rows_beside_peers(content) for row in rows]
    timed = (row for row in content["rows"] if row["contender"] in libraries and row["status"] in run.TIMED)
    beside = {row["workload"].split()[0] for row in timed}
    assert {row["workload"].split()[0] for row in shown} == beside and len(beside) >= 7
    for rows in pictures.rows_beside_peers(content):
        key = rows[0]["workload"], rows[0]["direction"]
        right = [row for row in content["rows"] if (row["workload"], row["direction"]) == key and row["status"] == "ok"]
        assert len(rows) == len(right)


def test_the_readme_names_everyone_who_is_ahead_in_its_picture() -> None:
    (content,) = results.saved(ROOT / results.FOLDER)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = readme[readme.index("Where another is ahead") : readme.index("[docs/benchmarks.md]")]
    ahead = [row for rows in pictures.rows_beside_peers(content) for row in rows if row["ratio"] < 1]
    assert {(row["contender"], f"{row['ratio']:.2f}") for row in ahead}
    for row in ahead:
        assert row["contender"] in listed and f"{row['ratio']:.2f}" in listed, row
    assert len(ahead) == len(re.findall(r"0\.\d\d", listed))


def test_saved_results_are_drawn_as_svg_or_refused(tmp_path: Path) -> None:
    (content,) = results.saved(ROOT / results.FOLDER)
    pictures.draw("speed", [content], tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<svg ")
    for contents, path, words in (
        ([content], tmp_path / "x.png", "svg"),
        ([], tmp_path / "x.svg", "no saved results"),
        ([content], tmp_path / "no" / "x.svg", "cannot write"),
    ):
        with pytest.raises(adjoint.ArgumentError, match=words):
            pictures.draw("speed", contents, path)


def test_every_family_with_saved_results_has_a_table() -> None:
    saved = {row["family"] for content in results.saved(ROOT / results.FOLDER) for row in content["rows"]}
    text = "".join((ROOT / document).read_text() for document in DOCUMENTS)
    assert saved and all(f"<!-- bench:{family}:begin -->" in text for family in saved)


def test_results_of_an_earlier_version_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    old = {
        "family": "activation", "workload": "w", "direction": "forward", "status": "ok", "bytes": 10, "ratio": 1.0,
        "error": 1e-3, "guarantee": "", "note": "", "gb_per_s": 5.0, "run": 0,
    }  # fmt: skip
    content = {
        "schema": 1, "device": "GPU", "device_type": "cuda", "dtype": "bfloat16",
        "runs": [{"date": "d", "command": "c", "versions": {"torch": "2"}, "copy_ceiling_gb_per_s": 4.0}],
        "rows": [old | {"contender": run.OURS, "microseconds": 2.0, "share_of_copy_ceiling": 1.25},
                 old | {"contender": "Liger", "microseconds": 3.0, "share_of_copy_ceiling": 0.8}],
    }  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    table = results.markdown(results.load(tmp_path / "gpu.json"), "activation")
    assert "| **2.0** | 3.0 (1.00×) | 5 | 125.0%¹ |" in table
    assert "saved without quartiles" in table and "saved without the bytes it wrote" in table
    assert "GPU, copy ceiling 4 GB/s; torch 2; d; `c`." in table


@pytest.mark.parametrize(
    ("workload", "op"),
    (("rotary[in place] 32768×(16 + 2)×256", "rotary[in place]"), ("decode 1 × 32 heads", "decode"), ("silu", "silu")),
)
def test_a_mode_with_blanks_is_part_of_an_op(workload: str, op: str) -> None:
    assert pictures.op_of(workload) == op
