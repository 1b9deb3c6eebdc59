"""The comparison of two certificates: their machines, errors and bits, and what only one of them has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

NOTICEABLE = 1.01
"""Two errors are shown if their ratio is at least this."""

SHOWN = 12
"""The number of lines of each kind that are shown unless all are asked for."""


@dataclass
class Comparison:
    """The differences, in sentences. Differences that a promise forbids are in `broken` and in no other list."""

    broken: list[str] = field(default_factory=list)
    machine: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    same_bits: int = 0


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Comparison:
    """The differences between two certificates."""
    comparison = Comparison(machine=list(_machine(one, other)))
    _compare_verdicts(comparison, one, other)
    _compare_presence(comparison, one, other)
    _compare_errors(comparison, one, other)
    _compare_bits(comparison, one, other)
    return comparison


def _machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in ("date", "device", "depth", "verdict"):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name)} | {other.get(name)}"
    for name, ours, theirs in _pairs(one["versions"], other["versions"]):
        if ours != theirs:
            yield f"{name}: {ours or 'none'} | {theirs or 'none'}"
    for family, ours, theirs in _pairs(one["kernel_code"], other["kernel_code"]):
        if ours != theirs:
            yield f"code of the kernels in {family}: {_short(ours)} | {_short(theirs)}"


def _pairs(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for key in dict.fromkeys((*one, *other)):
        yield key, one.get(key), other.get(key)


def _short(digest: str | None) -> str:
    return digest[:8] if digest else "none"


def _compare_verdicts(comparison: Comparison, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for label, certificate in (("first", one), ("second", other)):
        for row in certificate["failures"]:
            where = " ".join(filter(None, (row["op"], row["dtype"], row["plan"])))
            comparison.broken.append(f"the {label} failed: {where}: {row['check']}: {row['measured']}: {row['detail']}")
    for sku, ours, theirs in _pairs(dict.fromkeys(one["skus"], True), dict.fromkeys(other["skus"], True)):
        if ours is not theirs:
            comparison.missing.append(f"{sku} ran on the {'first' if ours else 'second'} only")


def _compare_presence(comparison: Comparison, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Finds checks, errors and digests that only one of the certificates has, although both ran the plan."""

    def groups(certificate: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
        checks = {
            tuple(c[name] for name in ("op", "dtype", "plan", "check")): "was checked" for c in certificate["checks"]
        }
        errors = {(*_error_key(e)[:3], f"the error of {e['output']}"): "was measured" for e in certificate["errors"]}
        return checks | errors | {_key(d): "has a digest" for d in certificate["digests"]}

    ours, theirs = groups(one), groups(other)
    common = {key[:3] for key in ours} & {key[:3] for key in theirs}
    for key, mine, yours in _pairs(ours, theirs):
        if key[:3] in common and (mine is None or yours is None):
            where = f"{' '.join(filter(None, key[:3]))}: {' of '.join(reversed(key[3:]))}"
            comparison.missing.append(f"{where} {mine or yours} on the {'second' if mine is None else 'first'} only")


def _compare_errors(comparison: Comparison, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    def shares(certificate: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
        return {_error_key(e): float(e["share"]) for e in certificate["errors"]}

    changed = []
    for key, ours, theirs in _pairs(shares(one), shares(other)):
        if ours is None or theirs is None or ours == theirs:
            continue
        ratio = max(ours, theirs) / min(ours, theirs) if min(ours, theirs) > 0 else float("inf")
        if ratio >= NOTICEABLE:
            changed.append((ratio, f"{' '.join(key)}: {ours:.3g} | {theirs:.3g} of the bound"))
    comparison.errors = [words for _, words in sorted(changed, reverse=True)]


def _compare_bits(comparison: Comparison, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compares the bits of equal plans, and of PyTorch and kernel plans that promise the same bits on every device."""
    ours, theirs = ({_key(d): d for d in certificate["digests"]} for certificate in (one, other))
    is_same_machine = all(one.get(name) == other.get(name) for name in ("device", "versions", "kernel_code"))
    twins = {_stem(key): d for key, d in theirs.items() if "device_invariant" in d["bits"]}
    for key, mine in ours.items():
        yours = theirs.get(key)
        if yours is None and "device_invariant" in mine["bits"]:
            yours = twins.get(_stem(key))
        if yours is None or mine["output"] == "inputs":
            continue
        where = f"{mine['op']} {mine['dtype']} {mine['plan']}: {mine['output']} of {mine['case']!r}"
        inputs_key = (*key[:4], "inputs")
        if inputs_key in ours and inputs_key in theirs and ours[inputs_key]["digest"] != theirs[inputs_key]["digest"]:
            comparison.bits.append(f"{where}: computed from other inputs, and not comparable")
        elif mine["digest"] == yours["digest"]:
            comparison.same_bits += 1
        elif "device_invariant" in mine["bits"] and "device_invariant" in yours["bits"]:
            comparison.broken.append(f"{where}: other bits, where every device is promised the same")
        elif is_same_machine and "repeatable" in mine["bits"]:
            comparison.broken.append(f"{where}: other bits on the same machine, where repetition is promised")
        else:
            comparison.bits.append(f"{where}: {_short(mine['digest'])} | {_short(yours['digest'])}")


def _error_key(error: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(error[name] for name in ("op", "dtype", "plan", "output"))


def _key(digest: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(digest[name] for name in ("op", "dtype", "plan", "case", "output"))


def _stem(key: tuple[str, ...]) -> tuple[str, ...]:
    """A key without the backends of its plans."""
    op, dtype, plan, case, output = key
    return op, dtype, " + ".join(name.partition(".")[2] for name in plan.split(" + ")), case, output


def show(console: Console, comparison: Comparison, *, verbose: bool) -> None:
    """Prints the differences, with the first certificate to the left of each bar and the second to the right."""
    titles = {
        "machine": "The machines",
        "errors": "Errors",
        "bits": "Bits that differ, as they may",
        "missing": "On one of them only",
        "broken": "PROMISES BROKEN",
    }
    for name, title in titles.items():
        lines: list[str] = getattr(comparison, name)
        if not lines:
            continue
        console.print(Text(f"{title}: {len(lines)}", "bold red" if name == "broken" else "bold"))
        shown = lines if verbose or name in ("broken", "machine") else lines[:SHOWN]
        for line in shown:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        if len(shown) < len(lines):
            console.print(Padding(Text(f"and {len(lines) - len(shown)} more: -v shows them", "dim"), (0, 0, 0, 2)))
    console.print(f"{comparison.same_bits} results have the same bits on both", highlight=False)
