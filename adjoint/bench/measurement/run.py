"""Runs workloads: builds the contenders, checks each, times them in turns, and checks each again."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adjoint.bench.contenders import (
    BACKWARD,
    FORWARD,
    STEP,
    Builder,
    Contender,
    NeedsGpu,
    NotInstalled,
    Task,
    compiled,
    deterministic,
    eager,
    gradients_by,
    ours,
)
from adjoint.bench.measurement.check import Verdict, check, poison
from adjoint.bench.measurement.timing import (
    Action,
    copy_ceiling,
    matrix_ceiling,
    own_stream,
    recorded,
    synchronize,
    times_on,
)
from adjoint.bench.peers import PEERS
from adjoint.contract.cases import Workload
from adjoint.contract.inputs import Inputs
from adjoint.core.errors import ArgumentError
from adjoint.ops import FAMILIES, cases
from adjoint.ops.names import path_of, unknown_op

OURS, EAGER, COMPILED, DETERMINISTIC = "adjoint", "torch eager", "torch.compile", "torch deterministic"

ROUNDS = 3
"""How often contenders are timed, in turns, so that a drifting clock affects all of them. The median counts."""

CPU_ELEMENTS = 2**20
"""The number of elements of the largest input on a CPU. Workloads are cut along their batch axis to fit."""

OK, INACCURATE, FAILED, ERROR = "ok", "inaccurate", "failed", "error"
ABSENT, LEFT_OUT = "not installed", "left out"
TIMED = (OK, INACCURATE)
"""The statuses that come with a time."""


@dataclass(frozen=True)
class Row:
    """One contender in one direction of one workload.

    Attributes:
        status: `OK` has a time. `INACCURATE` has a time too, but promises nothing, and its error is past the limit for
            contenders without a promise. `FAILED` gave a wrong result, `ERROR` raised, and `ABSENT` is not installed.
            `LEFT_OUT` stands for a workload or a peer that is meant for another device.
        bytes: the fewest bytes that the direction must move.
        microseconds: the median of the rounds' medians.
        ratio: its time over ours in the same run. If it is above 1, ours is faster.
        error: the norm-relative error against float64.
        guarantee: for ours, the error in the terms of the guarantee.
        note: what went wrong, how large the error of an inaccurate result is, or why a call could not be recorded.
        operations: the floating-point operations of its matrix products; 0 if they are not counted.
        peak_bytes: the most memory that a step took in addition to the memory before it. It does not include the
            gradients of inputs that all items share, which every contender must have.
        kept_bytes: the bytes that its forward keeps for its backward beside the inputs, if the workload asks for them.
        recorded: whether the time is that of a CUDA graph's replays, which is so if the workload asks for it and the
            call can be recorded.
        quartiles: the first and third quartiles of all timed calls, in microseconds.
        sku: the SKUs of our plans.
        ties: the number of items in which it chose equal values in another order than the reference. It is compared
            with the reference for its own choices. None if there is no choice.
        written_bytes: the size of its results.
    """

    family: str
    workload: str
    direction: str
    contender: str
    status: str
    bytes: int
    microseconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    guarantee: str = ""
    note: str = ""
    operations: int = 0
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    recorded: bool = False
    quartiles: tuple[float, float] | None = None
    sku: str = ""
    ties: int | None = None
    written_bytes: int | None = None

    @property
    def gigabytes_per_second(self) -> float | None:
        return None if self.microseconds is None else self.bytes / self.microseconds / 1e3

    @property
    def teraflops(self) -> float | None:
        return self.operations / self.microseconds / 1e6 if self.microseconds and self.operations else None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A peer may be absent or raise, but no result may be wrong."""
        return self.status != FAILED and not (self.contender == OURS and self.status == ERROR)


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        ceiling: GB/s of a copy: the larger of two measurements, before and after the workloads.
        matrix_ceiling: TF/s of a matrix product; None if no workload counts operations.
    """

    device: torch.device
    ceiling: float
    rows: tuple[Row, ...]
    matrix_ceiling: float | None = None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def select(ops: Sequence[str], rows: Sequence[str] = ()) -> list[tuple[str, Workload]]:
    """The workloads of the named ops, or of all ops, with their families; with `rows`, those whose name contains one of
    these texts."""
    every = [(family, workload) for family in FAMILIES for module in cases(family) for workload in module.WORKLOADS]
    unknown = sorted(set(ops).difference(*(names_of(workload) for _, workload in every)))
    if unknown:
        known = dict.fromkeys(path_of(workload.subject) for _, workload in every)
        raise ArgumentError(unknown_op("bench", unknown, list(known), "ops with workloads"))
    chosen = [(family, workload) for family, workload in every if not ops or set(ops) & names_of(workload)]
    names = [workload.name for _, workload in chosen]
    for text in rows:
        if not any(text in name for name in names):
            raise ArgumentError(f"bench: no workload has {text!r} in its name; there are {'; '.join(names)}")
    return [row for row, name in zip(chosen, names, strict=True) if not rows or any(text in name for text in rows)]


def names_of(workload: Workload) -> set[str]:
    """The names by which users may call its op."""
    subject = workload.subject
    path = path_of(subject)
    return {path, path.partition("[")[0], subject.name, subject.function.__name__}


def check_peers(labels: Sequence[str] | None) -> None:
    """Raises if no peer has one of these labels."""
    known = sorted({peer.label for peer in PEERS.values()})
    if unknown := sorted(set(labels or ()) - set(known)):
        raise ArgumentError(f"bench: unknown peer {', '.join(unknown)}; peers are {', '.join(known)}")


def run(
    selected: Sequence[tuple[str, Workload]],
    device: torch.device,
    *,
    compile: bool = True,
    peers: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    report: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Times workloads on a device.

    Args:
        selected: families and workloads, from `select`.
        compile: whether `torch.compile` takes part.
        peers: the labels of the peers that take part; None for all.
        rounds: how often each contender is timed.
        report: a function that is called after each workload with the result so far.
    """
    rows: tuple[Row, ...] = ()
    check_peers(peers)
    ceiling = copy_ceiling(device)
    product = matrix_ceiling(device) if any(workload.operations for _, workload in selected) else None
    for family, workload in selected:
        rows += tuple(measure(family, workload, device, compile=compile, peers=peers, rounds=rounds))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report(Result(device, ceiling, rows, product))
    if product is not None:
        product = max(product, matrix_ceiling(device))
    return Result(device, max(ceiling, copy_ceiling(device)), rows, product)


def measure(
    family: str,
    workload: Workload,
    device: torch.device,
    *,
    compile: bool = True,
    peers: Sequence[str] | None = None,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """The rows of one workload, by direction."""
    if device.type not in workload.devices:
        note = f"meant for {' and '.join(workload.devices)}"
        for direction in workload.directions:
            yield Row(family, workload.name, direction, OURS, LEFT_OUT, 0, note=note)
        return
    try:
        name, share, tasks = tasks_of(workload, device)
    except Exception as error:  # for example too little memory for its inputs; other workloads go on
        for direction in workload.directions:
            yield Row(family, workload.name, direction, OURS, ERROR, 0, note=first_line(error))
        return
    for task in tasks:
        direction = task.direction
        blank = Row(family, name, direction, "", OK, _bytes(workload, direction, task.inputs, share))
        blank = replace(blank, operations=round(workload.operations * share) * _TIMES[direction])
        builders = builders_of(workload, direction, compile=compile, peers=peers)
        with own_stream(device):
            entries = [_Entry(replace(blank, contender=label), task, build) for label, build in builders.items()]
            rows = _with_ratios(entries, rounds)
        yield from rows


def tasks_of(workload: Workload, device: torch.device) -> tuple[str, float, list[Task]]:
    """The name of a workload on a device, the share of it that is timed, and a task for each direction.

    All tasks have the same inputs.
    """
    source = torch.Generator().manual_seed(0)
    inputs, share, name = _cut(workload, workload.make(workload.dtype, device, source), device)
    call = workload.subject.bind(inputs)
    with torch.no_grad():
        outputs = call.operator.allocate(*call.arguments)[: call.public_outputs]
    upstream = tuple(_normal_like(output, source) for output in outputs)
    return name, share, [Task(workload, direction, inputs, upstream) for direction in workload.directions]


def _bytes(workload: Workload, direction: str, inputs: Inputs, share: float) -> int:
    """The fewest bytes that a direction must move for inputs that are a share of the workload's inputs."""
    stated = {FORWARD: workload.forward_bytes, BACKWARD: workload.backward_bytes}
    both = {way: x(*inputs) if callable(x) else round(x * share) for way, x in stated.items()}
    return sum(both.values()) if direction == STEP else both[direction]


_TIMES = {FORWARD: 1, BACKWARD: 2, STEP: 3}
"""The operations of a direction as a multiple of those of the forward."""


def builders_of(
    workload: Workload, direction: str, *, compile: bool, peers: Sequence[str] | None
) -> dict[str, Builder]:
    """The builders of all contenders that take part, by label, ours first."""
    builders: dict[str, Builder] = {OURS: ours}
    if workload.baseline is not None:
        builders[EAGER] = eager
        if compile and workload.compile:
            builders[COMPILED] = compiled
    if direction == BACKWARD:
        if workload.deterministic:
            builders[DETERMINISTIC] = deterministic
        builders |= {label: gradients_by(function) for label, function in workload.others.items()}
    able = [PEERS[peer] for peer in workload.peers if direction in PEERS[peer].directions]
    return builders | {peer.label: peer.build_on_device for peer in able if peers is None or peer.label in peers}


def _cut(workload: Workload, inputs: Inputs, device: torch.device) -> tuple[Inputs, float, str]:
    """On a CPU, cuts inputs to their first items. Returns them, their share of the whole, and a name that says so."""
    subject = workload.subject
    axis, items = subject.batch_axis, subject.items(inputs)
    named = list(zip(subject.inputs, inputs, strict=True))
    largest = max(t.numel() for name, t in named if t is not None and subject.has_items(name))
    count = max(1, CPU_ELEMENTS * items // max(1, largest))
    if device.type == "cuda" or count >= items:
        return inputs, 1.0, workload.name
    first_items = tuple(
        t.narrow(axis, 0, count).clone() if t is not None and subject.has_items(name) else t for name, t in named
    )
    return first_items, count / items, f"{workload.name}, first {count}"


def _normal_like(output: Tensor, source: torch.Generator) -> Tensor:
    own = torch.Generator(output.device).manual_seed(int(torch.randint(2**31, (), generator=source)))
    return torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=own)


class _Entry:
    """A contender whose row is being measured."""

    def __init__(self, row: Row, task: Task, build: Builder) -> None:
        self.row, self.task = row, task
        self.rounds: list[list[float]] = []
        self.contender: Contender | None = None
        self._first: tuple[Tensor, ...] = ()
        self._last: tuple[Tensor, ...] = ()
        self._timed: Action | None = None
        try:
            contender = build(task)
            poison(contender)
            if contender.restore is not None:
                contender.restore()
            outputs = contender.run()
            synchronize(task.device)
            self.judge(check(task, outputs, contender.guarantee, contender.choices))
            self._first = tuple(x.clone() for x in outputs)
            written = sum(x.numel() * x.element_size() for x in outputs)
            self.row = replace(self.row, written_bytes=written, sku=contender.sku)
            del outputs
            if task.direction == STEP and task.device.type == "cuda":
                self.row = replace(self.row, peak_bytes=_peak(task, contender))
            if task.direction == BACKWARD and task.workload.kept and contender.kept is not None:
                self.row = replace(self.row, kept_bytes=contender.kept())
        except NotInstalled as absent:
            self.row = replace(row, status=ABSENT, note=str(absent))
        except NeedsGpu as reason:
            self.row = replace(row, status=LEFT_OUT, note=str(reason))
        except Exception as error:
            self.row = replace(row, status=ERROR, note=first_line(error))
        else:
            self.contender = contender

    @property
    def running(self) -> bool:
        return self.row.status in TIMED

    def judge(self, verdict: Verdict) -> None:
        """Adds a verdict to the row. A contender that was inaccurate once stays so."""
        status, note = self.row.status, verdict.failure or verdict.inaccuracy or self.row.note
        if verdict.failure or verdict.inaccuracy:
            status = FAILED if verdict.failure else INACCURATE
        self.row = replace(self.row, status=status, note=note, error=verdict.error, guarantee=verdict.guarantee)
        self.row = replace(self.row, ties=verdict.ties)

    def time(self) -> None:
        assert self.contender is not None
        if self._timed is None:
            self._timed = self._prepare()
        try:
            times = times_on(self.task.device, self._timed, self.contender.restore)
            self.rounds.append([time * 1e3 for time in times])
        except Exception as error:
            self.row = replace(self.row, status=ERROR, note=first_line(error))

    def _prepare(self) -> Action:
        """The function to time: the call, or the replay of a CUDA graph of it."""
        contender = self.contender
        assert contender is not None

        def run() -> None:
            self._last = contender.run()

        if self.task.workload.recorded and self.task.device.type == "cuda":
            try:
                replay = recorded(run)
            except Exception as error:
                self.row = replace(self.row, note=f"no graph: {first_line(error)}")
            else:
                self.row = replace(self.row, recorded=True)
                poison(contender)  # so that the check after the timing sees only results of replays
                return replay
        return run

    def finish(self) -> None:
        """Checks the results of the last timed run, and only then states a time."""
        assert self.contender is not None
        if not _same_bits(self._first, self._last):  # equal bits keep their verdict
            self.judge(check(self.task, self._last, self.contender.guarantee, self.contender.choices))
        if self.running:
            low, high = _quartiles([time for times in self.rounds for time in times])
            median = statistics.median(map(statistics.median, self.rounds))
            self.row = replace(self.row, microseconds=median, quartiles=(low, high))


def _same_bits(first: tuple[Tensor, ...], last: tuple[Tensor, ...]) -> bool:
    return len(first) == len(last) and all(map(torch.equal, first, last))


def _quartiles(times: list[float]) -> tuple[float, float]:
    """The first and third quartiles: a quarter of the times is below the first, and a quarter above the third."""
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _peak(task: Task, contender: Contender) -> int:
    """The memory that one run takes at its peak, without the gradients of inputs that all items share."""
    torch.cuda.synchronize(task.device)
    torch.cuda.reset_peak_memory_stats(task.device)
    before = torch.cuda.memory_allocated(task.device)
    gradients = contender.run()
    torch.cuda.synchronize(task.device)
    peak = torch.cuda.max_memory_allocated(task.device) - before
    subject = task.workload.subject
    shared = [name for name in subject.inputs if not subject.has_items(name)]
    named = zip(subject.gradients(task.inputs), gradients, strict=True)
    return peak - sum(g.numel() * g.element_size() for name, g in named if name.removeprefix("d") in shared)


def _with_ratios(entries: list[_Entry], rounds: int) -> list[Row]:
    for turn in range(rounds):
        for position in range(len(entries)):
            entry = entries[(position + turn) % len(entries)]
            if entry.running:
                entry.time()
    for entry in entries:
        if entry.running:
            entry.finish()
    own = entries[0].row.microseconds
    return [
        replace(entry.row, ratio=entry.row.microseconds / own) if own and entry.row.microseconds else entry.row
        for entry in entries
    ]


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
