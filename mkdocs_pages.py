"""The pages of the site that are made when it is built: the start from the README, the op matrix and the reference."""

import re
from functools import reduce
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.structure.files import File, Files

import adjoint
import adjoint.models
from adjoint.matrix import as_markdown, entries

ROOT = Path(__file__).parent

MODULES = {
    "adjoint": "Plans, preferences, guarantees, errors and the operations of most families.",
    "adjoint.moe": "Mixture of experts.",
    "adjoint.gated_delta": "The gated delta rule by stage.",
    "adjoint.nn": "Modules.",
    "adjoint.models": "Hybrid language models.",
    "adjoint.integrations.fla": "The signatures of flash-linear-attention.",
    "adjoint.integrations.transformers": "Inside models of transformers.",
}
"""What the reference lists: every name that a module says is public."""


def on_config(config: Any) -> Any:
    """Adds the pages of docs/ that the menu does not name to one of its sections, under their headings."""
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    named = {page for pages in sections.values() for page in _pages(pages)}
    for path in sorted(ROOT.joinpath("docs").glob("*.md")):
        if path.name not in named:
            sections["Error analysis" if path.stem.endswith("-error") else "Operations"].append(path.name)
    return config


def _pages(entry: Any) -> list[str]:
    """The files below an entry of the menu."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in _pages(part)]


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages to those in docs/."""
    pages = {
        "index.md": start_page(ROOT.joinpath("README.md").read_text(encoding="utf-8")),
        "changelog.md": start_page(ROOT.joinpath("CHANGELOG.md").read_text(encoding="utf-8")),
        "ops.md": matrix_page(),
        "api.md": reference_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The README, to which pages in docs/ lead as a file, is the start."""
    return markdown.replace("](../README.md", "](index.md").replace("](../CHANGELOG.md", "](changelog.md")


class Examples(Extension):
    """Doctests, which stand bare at the end of a docstring, as a section of it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            before, prompt, after = obj.docstring.value.partition("\n>>> ")
            if prompt:
                examples = f">>> {after}".replace("\n", "\n    ")
                obj.docstring.value = f"{before}\nExamples:\n    {examples}"


def start_page(text: str) -> str:
    """A document of the repository's root: links into docs/ become the site's, and those to other files plain text."""
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", text)
    text = text.replace("](CHANGELOG.md)", "](changelog.md)").replace("](README.md", "](index.md")

    def unlink(match: re.Match[str]) -> str:
        label, target = match.groups()
        outside = "://" not in target and not target.startswith("#") and (ROOT / target.partition("#")[0]).exists()
        return label if outside else match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", unlink, text)


def matrix_page() -> str:
    """Every op, plan, dtype, place and promise."""
    introduction = """
# Op matrix

Every plan of every op, best first, with the dtypes that the op's cases try, the places it runs on, and what its outputs
promise about bits and error. It is made from the plans themselves when this site is built. `adjoint ops` prints it, and
`adjoint plan OP ...` says everything about one call. [Concepts](concepts.md#the-guarantee) explains the words.

Targets are those that kernels are built for. Results were checked on an H200, which is sm_90, and on CPUs.
"""
    return f"{introduction}\n{as_markdown(entries())}"


def reference_page() -> str:
    """The public names with their docstrings, each under the name that a user writes."""
    lines = ["# API reference", ""]
    for module, words in MODULES.items():
        lines += [f"## `{module}`", "", words, ""]
        for name, value in public(module).items():
            lines += [f"::: {value.__module__}.{value.__qualname__}", "    options:"]
            lines += [f'      heading: "{module}.{name}"', f'      toc_label: "{name}"', ""]
    return "\n".join(lines)


def public(module: str) -> dict[str, Any]:
    """The functions and classes that a module says are public, or defines, and that `adjoint` itself has not shown."""
    shown = reduce(getattr, module.split(".")[1:], adjoint)
    named = getattr(shown, "__all__", None)
    if named is None:
        named = [name for name, value in vars(shown).items() if getattr(value, "__module__", "") == module]
    values = {name: getattr(shown, name) for name in named if not name.startswith("_")}
    if shown is not adjoint:
        values = {name: value for name, value in values.items() if not hasattr(adjoint, name)}
    return {name: value for name, value in values.items() if callable(value)}
