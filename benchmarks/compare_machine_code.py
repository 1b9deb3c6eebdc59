"""Proves that a refactoring left the machine code of every kernel as it was.

    python benchmarks/compare_machine_code.py record OUT.json [--target sm_90] [--jobs N] [--family F] [--code FOLDER]
    python benchmarks/compare_machine_code.py compare BEFORE.json AFTER.json [--renames FILE] [--kernels PATTERN]

`record` compiles every variant of every kernel for a target, takes its machine code apart and writes what it
consists of. PYTHONPATH decides whose kernels these are (PYTHONPATH=/path/to/a/checkout); no GPU is needed. Results
are kept in OUT.json.partial as they come, so that the same command goes on where an interrupted one stopped; what
another tree, compiler or way of normalising left there is not used.

`compare` says whether the code of every variant of BEFORE is in AFTER, whatever the kernels and variants are called
and wherever their parameters lie. It fails when a variant's instructions are in none of AFTER, and when they are but
their scheduling, registers, spills, shared memory or warps are not the same.
"""

import argparse
import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESOURCES = ("scheduling", "num_warps", "registers", "spilled_bytes", "shared_bytes")
"""What must be the same beside the instructions."""


def variants_of(target: str, family: str | None) -> Iterator[tuple[str, Any]]:
    """Every variant that the tree lists for a target, with its name; another enumeration is another branch here.

    A variant needs `kernel`, `types`, `constants`, `num_warps`, `num_stages` and `compile(GPUTarget)`.
    """
    for place in ("adjoint.contract", "adjoint.ops"):
        module = importlib.import_module(place) if importlib.util.find_spec(place) else None
        if module is not None and hasattr(module, "builds"):
            # A tree with one function for all families, which are folders of the kernels' modules.
            from adjoint.core.kernels import registered

            for name, variant in module.builds(target):
                if family is None or family in registered()[variant.kernel].function.__module__.split("."):
                    yield name, variant
            return
    # An older one, with a function in each family's cases.
    from adjoint.ops import FAMILIES

    for each in FAMILIES if family is None else (family,):
        yield from importlib.import_module(f"adjoint.ops.{each}.cases").builds(target)


def by_name(variants: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Variants by name; where several have one name, the later ones are numbered."""
    times: Counter[str] = Counter()
    unique = {}
    for name, variant in variants:
        times[name] += 1
        unique[name if times[name] == 1 else f"{name} ({times[name]})"] = variant
    return unique


# ------------------------------------------------------------------------------------- machine code

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/$")
SECOND_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")
SECTION = re.compile(r"^ *[0-9a-f]+ +([0-9a-f]+) +([0-9a-f]+) .* \.(text|nv\.constant[1-9]|nv\.global\.init)\S*$", re.M)
PARAMETER = re.compile(r"Ordinal : 0x[0-9a-f]+\s+Offset  : 0x([0-9a-f]+)\s+Size    : 0x([0-9a-f]+)")
FIRST_PARAMETER = re.compile(r"EIATTR_PARAM_CBANK\s+Format:.*\s+Value:\s+0x[0-9a-f]+ 0x[0-9a-f]*([0-9a-f]{4})\b")
CONSTANT = re.compile(r"\bc\[0x0\]\[((?:U?R\d+\+)?)0x([0-9a-f]+)\]")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)")

JUMPS = {"BRA", "BSSY", "CALL", "JMP", "WARPSYNC"}
"""Instructions whose last operand is the address of another one."""

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes that a load from a constant bank reads, by its suffix; 4 without one."""


def tool_report(*arguments: str) -> str:
    """What `cuobjdump`, as Triton ships it, says about a file."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}  # it calls nvdisasm
    command = [str(folder / "cuobjdump"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def parameter_places(layout: str) -> list[tuple[int, int]]:
    """Where each parameter begins and ends in constant bank 0, by what the binary itself says.

    On sm_90 they begin at 0x210, in the order of the signature, with Triton's two pointers to scratch memory after
    them. What lies below is the launch's own (0x28: the stack, 0x208: the descriptor of global memory).
    """
    begin = FIRST_PARAMETER.search(layout)
    if begin is None:
        raise RuntimeError("the binary does not say where its parameters begin")
    base = int(begin[1], 16)
    places = [(int(offset, 16), int(size, 16)) for offset, size in PARAMETER.findall(layout)]
    return sorted((base + offset, base + offset + size) for offset, size in places)


class Parameters:
    """Numbers a kernel's parameters in the order in which its instructions first read them."""

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.places = places
        self.numbers: dict[tuple[int, int], int] = {}

    def renumber(self, text: str) -> str:
        """An instruction with its parameters by number; a wide load may read two or more that are neighbours."""
        width = next((WIDTHS[suffix] for suffix in text.split(" ")[0].split(".") if suffix in WIDTHS), 4)
        return CONSTANT.sub(lambda operand: self._operand(operand, width), text)

    def _operand(self, operand: re.Match[str], width: int) -> str:
        address = int(operand[2], 16)
        neighbours = [place for place in self.places if place[0] < address + width and address < place[1]]
        if not neighbours:
            return operand[0]  # not a parameter
        numbers = [self.numbers.setdefault(place, len(self.numbers)) for place in neighbours]
        return f"parameter[{operand[1]}{'|'.join(map(str, numbers))}]{address - neighbours[0][0]:+#x}"


def normalise(listing: str, layout: str) -> tuple[list[str], list[int]]:
    """A kernel's instructions without what a name or the order of parameters decides, and each one's scheduling bits.

    Addresses become labels where something jumps to them and vanish elsewhere; parameters are numbered. Registers,
    immediates, other constants and the order of instructions stay.
    """
    if listing.count("Function :") != 1:
        raise RuntimeError("the binary has more than one function: this script does not know how to put them in order")
    instructions: list[tuple[int, str]] = []
    scheduling: list[int] = []
    for line in listing.splitlines():
        if match := INSTRUCTION.match(line):
            instructions.append((int(match[1], 16), re.sub(r"\s+", " ", match[2])))
        elif match := SECOND_WORD.match(line):
            scheduling.append(int(match[1], 16) >> 41 & 0x1FFFFF)  # stalls, barriers, yields and operand reuse
    (size,) = (int(size, 16) for _, size, name in SECTION.findall(layout) if name == "text")
    if [address for address, _ in instructions] != list(range(0, size, 16)) or len(scheduling) != len(instructions):
        raise RuntimeError(f"{size} bytes of code were disassembled to {len(instructions)} instructions of 16 bytes")

    jumps = {}
    for address, text in instructions:
        operation = re.sub(r"^@\S+ ", "", text).split(" ")[0].split(".")[0]
        if operation in JUMPS and (destination := re.search(r"\b0x([0-9a-f]+)$", text)):
            jumps[address] = int(destination[1], 16)
    labels = {destination: number for number, destination in enumerate(sorted(set(jumps.values())))}
    parameters = Parameters(parameter_places(layout))
    lines = []
    for address, text in instructions:
        if address in labels:
            lines.append(f"label {labels[address]}:")
        if address in jumps:
            text = re.sub(r"\b0x[0-9a-f]+$", f"label {labels[jumps[address]]}", text)
        guard, instruction = re.fullmatch(r"(@\S+ )?(.*)", text).groups(default="")  # type: ignore[union-attr]
        lines.append(guard + parameters.renumber(instruction))
    return lines, scheduling


def digest(*parts: str | bytes) -> str:
    """A hash of texts or bytes in order, short enough to read."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:32]


def describe(cubin: bytes, folder: Path) -> tuple[dict[str, Any], str]:
    """What a binary's code consists of, and the text of its normalised instructions."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    layout = tool_report("-elf", str(file))
    listing = tool_report("-sass", "-res-usage", str(file))
    usage = USAGE.search(listing)
    if usage is None:
        raise RuntimeError(f"cuobjdump reported no resource usage:\n{listing[:500]}")
    lines, scheduling = normalise(listing, layout)
    code = b""
    for offset, size, name in SECTION.findall(layout):
        content = cubin[int(offset, 16) : int(offset, 16) + int(size, 16)]
        if name == "text":
            code = content
        else:  # tables in other constant banks and in global memory belong to the code that reads them
            lines.append(f"{name}: {digest(content)}")
    text = "\n".join(lines) + "\n"
    description = {
        "instructions": digest(text),
        "instruction_count": len(scheduling),
        "scheduling": digest(json.dumps(scheduling)),
        "bytes": digest(code),
        "registers": int(usage[1]),
        "spilled_bytes": int(usage[2]) + int(usage[3]),
    }
    return description, text


# ------------------------------------------------------------------------------------------- record


def work(target: str, family: str | None, code: Path | None) -> None:
    """A worker: compiles the variants whose names come as JSON on stdin, and prints one JSON object a line for each."""
    from triton.backends.compiler import GPUTarget

    names = json.load(sys.stdin)
    variants = by_name(variants_of(target, family))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            variant = variants[name]
            begin = time.perf_counter()
            entry: dict[str, Any] = {
                "name": name,
                "kernel": variant.kernel,
                "constants": dict(sorted(variant.constants)),
                "types": sorted(kind for _, kind in variant.types),
                "num_warps": variant.num_warps,
                "num_stages": variant.num_stages,
            }
            try:
                compiled = variant.compile(GPUTarget("cuda", int(target.removeprefix("sm_")), 32))
                description, text = describe(compiled.asm["cubin"], Path(folder))
                entry |= description | {"shared_bytes": compiled.metadata.shared}
                if code is not None:
                    (code / f"{description['instructions']}.txt").write_text(text)
            except Exception as error:  # one variant that does not compile must not hide the others
                entry["error"] = f"{type(error).__name__}: {error}"
            entry["seconds"] = round(time.perf_counter() - begin, 3)
            print(json.dumps(entry, default=str), flush=True)


def identity(target: str, code: Path | None) -> dict[str, Any]:
    """What results depend on: where any of this differs, they are not to be mixed."""
    import triton

    import adjoint

    tree = Path(adjoint.__file__).resolve().parent
    files = sorted(path for path in tree.rglob("*") if path.suffix in (".py", ".json"))
    sources = digest(*(part for path in files for part in (str(path.relative_to(tree)), path.read_bytes())))
    return {
        "target": target,
        "tree": str(tree.parent),
        "sources": sources,
        "normalisation": digest(Path(__file__).read_text().partition("- machine code\n")[2].partition("- record\n")[0]),
        "triton": triton.__version__,
        "code": None if code is None else str(code),
    }


def resume(partial: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished variants that an interrupted run left, by name; starts the file anew where they do not fit."""
    if partial.exists():
        first, *rest = partial.read_text().splitlines(keepends=True) or ["null\n"]
        if json.loads(first) == header:
            entries = [json.loads(line) for line in rest if line.endswith("\n")]  # the last line may be cut off
            partial.write_text(first + "".join(json.dumps(entry) + "\n" for entry in entries))
            return {entry["name"]: entry for entry in entries if "error" not in entry}
        print(f"{partial} is of another tree, compiler or way of normalising: it is not used")
    partial.write_text(json.dumps(header) + "\n")
    return {}


def record(out: Path, target: str, family: str | None, jobs: int, code: Path | None) -> int:
    """Compiles in `jobs` processes of their own, and writes OUT.json when every variant is there."""
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("TRITON_INTERPRET is set: nothing would be compiled")
    begin = time.perf_counter()
    if code is not None:
        code = code.resolve()
        code.mkdir(parents=True, exist_ok=True)
    header = identity(target, code)
    kernels = {name: variant.kernel for name, variant in by_name(variants_of(target, family)).items()}
    partial = out.with_name(out.name + ".partial")
    entries = resume(partial, header)
    left = [name for name in kernels if name not in entries]
    todo = f"{len(left)} to compile in {jobs} processes"
    print(f"{header['tree']}: {len(kernels)} variants for {target}, {todo}", flush=True)

    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as cache, partial.open("a") as file:
        environment = {"TRITON_CACHE_DIR": cache} | os.environ  # private, unless one was chosen
        command = [sys.executable, __file__, "work", target, *(["--family", family] if family else [])]
        command += ["--code", str(code)] if code else []

        def run(names: list[str]) -> None:
            """Hands names to one worker and keeps each result as it comes."""
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as worker:
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(json.dumps(names))
                worker.stdin.close()
                for line in worker.stdout:
                    if not line.startswith('{"name"'):
                        continue  # something that a compiler says
                    entry = json.loads(line)
                    with lock:
                        entries[entry["name"]] = entry
                        file.write(line)
                        file.flush()
                        if len(entries) % 25 == 0:
                            print(f"{len(entries)} of {len(kernels)}, {time.perf_counter() - begin:.0f} s", flush=True)
            if worker.returncode:
                reached = next((name for name in names if name not in entries), None)
                print(f"a worker ended with {worker.returncode} at {reached!r}; what it had left is not recorded")

        shares = [left[first::jobs] for first in range(jobs)]
        threads = [threading.Thread(target=run, args=(share,)) for share in shares if share]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    errors = [entries[name] for name in kernels if "error" in entries.get(name, {})]
    absent = [name for name in kernels if name not in entries]
    for entry in errors:
        print(f"does not compile: {entry['name']} ({entry['kernel']}): {entry['error']}")
    for name in absent:
        print(f"not recorded: {name} ({kernels[name]})")
    if identity(target, code) != header:
        print("The tree changed while it was recorded: the result would be of neither. Run again.")
        return 1
    if absent:
        print(f"What was recorded is in {partial}; the same command goes on from there.")
        return 1
    variants = [entries[name] for name in kernels]
    out.write_text(json.dumps(header | {"family": family, "variants": variants}, indent=1) + "\n")
    partial.unlink()
    distinct = len({entry["instructions"] for entry in variants if "error" not in entry})
    print(f"{out}: {len(variants)} variants, {distinct} distinct codes, {time.perf_counter() - begin:.0f} s")
    return 1 if errors else 0


# ------------------------------------------------------------------------------------------ compare

Entry = dict[str, Any]
"""One variant as `record` wrote it."""


def line_of(entry: Entry) -> str:
    """A variant in one line."""
    if "error" in entry:
        return f"{entry['name']}  [{entry['kernel']}: {entry['error'].splitlines()[0]}]"
    use = f"{entry['registers']} registers, {entry['spilled_bytes']} B spilled, {entry['shared_bytes']} B shared"
    return f"{entry['name']}  [{entry['kernel']}: {entry['instruction_count']} instructions, {use}]"


def differences(before: Entry, after: Entry, keys: Iterable[str]) -> str:
    """The values that are not the same, in words."""
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    return ", ".join(f"{key} {old} → {new}" for key, old, new in pairs if old != new)


def closest(entry: Entry, after: list[Entry], kernels: set[str], fresh: set[str]) -> Entry | None:
    """The variant of AFTER that is most likely what one of BEFORE has become.

    It is of one of these kernels, else of the one with the most similar name. Code that BEFORE does not have comes
    first, then the nearest number of instructions, then the most types, constants and letters in common.
    """
    candidates = [one for one in after if one["kernel"] in kernels]
    if not candidates:
        names = sorted({one["kernel"] for one in after})
        similar = difflib.get_close_matches(entry["kernel"], names, n=1, cutoff=0.0)
        candidates = [one for one in after if one["kernel"] in similar]

    def distance(one: Entry) -> tuple[bool, int, int, int, float]:
        count = abs(entry["instruction_count"] - one["instruction_count"])
        types = (Counter(entry["types"]) - Counter(one["types"])).total()
        constants = len(set(entry["constants"].items()) ^ set(one["constants"].items()))
        letters = difflib.SequenceMatcher(None, entry["name"], one["name"]).ratio()
        return one["instructions"] not in fresh, count, types, constants, -letters

    return min(candidates, key=distance, default=None)


def code_of(side: dict[str, Any], entry: Entry) -> list[str]:
    """A variant's normalised instructions, where `record` kept them."""
    file = Path(side["code"] or "") / f"{entry['instructions']}.txt"
    return file.read_text().splitlines() if file.is_file() else []


def changes(before: dict[str, Any], after: dict[str, Any], entry: Entry, one: Entry, limit: int = 16) -> list[str]:
    """How a variant of BEFORE differs from one of AFTER: constants, types, launch shape, the first instructions."""
    constants = sorted({*entry["constants"], *one["constants"]})
    lines = [
        differences(entry["constants"], one["constants"], constants),
        differences(entry, one, ("types", "num_warps", "num_stages")),
    ]
    old, new = code_of(before, entry), code_of(after, one)
    if old and new:
        lines += list(difflib.unified_diff(old, new, n=1, lineterm=""))[2 : 2 + limit]
    return [line for line in lines if line]


def show(title: str, lines: list[str]) -> None:
    """Prints a list under its title and number, unless it is empty."""
    if lines:
        print(f"\n{len(lines)} {title}")
        for line in lines:
            print(line)


def compare(before_file: Path, after_file: Path, renames_file: Path | None, kernels: str) -> int:
    """Prints what became of every variant of BEFORE; 1 when the code of any is not in AFTER as it was."""
    before, after = json.loads(before_file.read_text()), json.loads(after_file.read_text())
    every_code = {entry.get("instructions") for entry in before["variants"]}
    before["variants"] = [entry for entry in before["variants"] if re.search(kernels, entry["kernel"])]
    renames: dict[str, str] = json.loads(renames_file.read_text()) if renames_file else {}
    for key in ("target", "triton", "normalisation"):
        if before[key] != after[key]:
            print(f"CAUTION: {key} is {before[key]} before and {after[key]} after: codes need not be comparable")
    old, new = ([entry for entry in side["variants"] if "error" not in entry] for side in (before, after))
    twins: dict[str, list[Entry]] = defaultdict(list)
    for entry in new:
        twins[entry["instructions"]].append(entry)
    old_codes = {entry["instructions"] for entry in old}
    fresh = set(twins) - every_code
    heirs: dict[str, Counter[str]] = {entry["kernel"]: Counter() for entry in old}
    for entry in old:
        heirs[entry["kernel"]].update({twin["kernel"] for twin in twins.get(entry["instructions"], ())})

    missing, unlike, elsewhere = [], [], []
    identical = 0
    for entry in old:
        same = twins.get(entry["instructions"], [])
        kernel = entry["kernel"]
        identical += any(entry["bytes"] == twin["bytes"] for twin in same)
        if not same:
            line = f"  {line_of(entry)}"
            one = closest(entry, new, {renames[kernel]} if kernel in renames else {kernel, *heirs[kernel]}, fresh)
            if one is not None:
                line += f"\n    closest: {line_of(one)}"
                line += "".join(f"\n      {change}" for change in changes(before, after, entry, one))
            missing.append(line)
        elif not any(all(entry[key] == twin[key] for key in RESOURCES) for twin in same):
            one = min(same, key=lambda twin: sum(entry[key] != twin[key] for key in RESOURCES))
            unlike.append(f"  {line_of(entry)}\n    in {line_of(one)}: {differences(entry, one, RESOURCES)}")
        elif renames and renames.get(kernel, kernel) not in {twin["kernel"] for twin in same}:
            elsewhere.append(f"  {line_of(entry)}\n    in {', '.join(sorted({twin['kernel'] for twin in same}))}")

    print(f"before {before_file}: {len(old)} variants, {len(old_codes)} distinct codes")
    print(f"after  {after_file}: {len(new)} variants, {len(twins)} distinct codes")
    count = len(old) - len(missing) - len(unlike)
    print(f"{count} of {len(old)} variants have the same code after; {identical} have it byte for byte")
    for kernel, names in heirs.items():
        if names and kernel not in names:
            print(f"  {kernel} is now {', '.join(f'{name} ({number})' for name, number in names.most_common())}")
    show("variants of BEFORE whose instructions are in none of AFTER:", missing)
    show("variants of BEFORE whose instructions are in AFTER, but not with the same use of the GPU:", unlike)
    show("variants of BEFORE whose code is in AFTER, but in another kernel than the renames say:", elsewhere)
    show(
        "variants whose instructions are only in AFTER:", [f"  {line_of(e)}" for e in new if e["instructions"] in fresh]
    )
    failures = [[f"  {line_of(entry)}" for entry in side["variants"] if "error" in entry] for side in (before, after)]
    show("variants of BEFORE that did not compile:", failures[0])
    show("variants of AFTER that did not compile:", failures[1])
    return 1 if missing or unlike or failures[0] else 0


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="compile every variant and write what its code consists of")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--target", default="sm_90", help="an NVIDIA architecture")
    recorder.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes: one for each core")
    worker = commands.add_parser("work", help="what `record` starts")
    worker.add_argument("target")
    for each in (recorder, worker):
        each.add_argument("--family", help="one family alone")
        each.add_argument("--code", type=Path, help="a folder for the normalised instructions, which `compare` shows")
    comparer = commands.add_parser("compare", help="say whether the code of every variant is still there")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--renames", type=Path, help="a JSON object: the new name of each kernel by its old one")
    comparer.add_argument("--kernels", default="", help="only the kernels of BEFORE in whose name this pattern occurs")
    options = parser.parse_args()
    if options.command == "record":
        return record(options.out, options.target, options.family, options.jobs, options.code)
    if options.command == "compare":
        return compare(options.before, options.after, options.renames, options.kernels)
    work(options.target, options.family, options.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
