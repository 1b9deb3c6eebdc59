"""The certificate as one page of HTML that needs no other file."""

from collections.abc import Mapping
from typing import Any

from adjoint.verify.report.html import details, page, table

_WORDS = {"passed": "Every check passed", "failed": "Some checks FAILED", "unfinished": "The run was interrupted"}


def certificate_page(certificate: Mapping[str, Any]) -> str:
    """A certificate as a page of HTML, for a person to read."""
    verdict, failed = certificate["verdict"], certificate["failed"]
    facts = {
        "device": certificate["device"],
        "date": certificate["date"],
        "checks": f"{certificate['passed']} passed, {failed} failed, {certificate.get('depth', '')}",
        **{name: version or "none" for name, version in certificate["versions"].items()},
        "source": certificate["source"][:16],
    }
    ops = [
        (
            entry["op"],
            ", ".join(entry["plans"]),
            entry["checks"],
            "" if entry["share"] is None else f"{100 * float(entry['share']):.0f}%",
            f"{entry['failures']} FAILED" if entry["failures"] else "passed",
        )
        for entry in certificate["ops"]
    ]
    checks = [
        (c["op"], c["dtype"], c["plan"], c["check"], c["promise"], c["measured"], _verdict(c))
        for c in certificate["checks"]
    ]
    digests = [
        (d["op"], d["dtype"], d["plan"], d["case"], d["output"], d["bits"], d["digest"][:16])
        for d in certificate["digests"]
    ]
    code = list(certificate["kernel_code"].items())
    failures = [
        (row["op"], row["dtype"], row["plan"], row["check"], row["measured"], row["detail"])
        for row in certificate["failures"]
    ]
    parts = [
        f'<p class="verdict {verdict}">{_WORDS[verdict]}</p>',
        table(("", ""), list(facts.items()), head=False),
    ]
    if failures:
        parts += ["<h2>Failures</h2>", table(("op", "dtype", "plan", "check", "measured", "what"), failures)]
    parts += [
        "<h2>Ops</h2>",
        "<p>The error is the largest that was measured on any case and output, as a share of the bound that its plan "
        "states for these very inputs.</p>",
        table(("op", "plans", "checks", "error", "verdict"), ops),
        details(
            f"What was promised and measured: {len(checks)} lines",
            table(("op", "dtype", "plan", "check", "promise", "measured", "verdict"), checks),
        ),
        details(f"Plans that ran: {len(certificate['skus'])} SKUs, with their revisions", _list(certificate["skus"])),
        details(
            f"Bits of fixed inputs: {len(digests)} digests",
            table(("op", "dtype", "plan", "case", "output", "promise", "digest"), digests),
        ),
        details("Code of the kernels, by family", table(("family", "digest of the source"), code)),
    ]
    return page(f"adjoint on {certificate['device']}", "".join(parts))


def _verdict(check: Mapping[str, Any]) -> str:
    return f"{check['failed']} of {check['checks']} FAILED" if check["failed"] else f"{check['checks']} passed"


def _list(values: list[str]) -> str:
    return table(("SKU",), [(value,) for value in values])
