"""Runs Python programs in forks of a process that has imported torch and adjoint: a new process takes seconds for that.

The process starts when the first program comes, and ends with the one that asks. It computes nothing itself, so that a
program finds what a new process would find.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = ("torch._inductor.config", "torch.distributed.tensor", "adjoint.cli", "adjoint.train.run")
"""What takes long; the first is imported where algorithms are to be deterministic."""


def python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    ranks: int = 0,
    imports: Iterable[str] = (),
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """What `python ARGUMENT...` does in the root of this checkout; the arguments are `-m MODULE ...`, `-c CODE ...` or
    `FILE ...`.

    Arguments:
        environment: the variables of the program; by default those of this process.
        stdin: the text that it reads.
        ranks: as how many ranks of one job it runs, as torchrun would start them; 0: without any.
        imports: further modules that are worth importing once.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").write_text(stdin, encoding="utf-8")
        request = {"arguments": arguments, "environment": dict(os.environ if environment is None else environment)}
        server.stdin.write(json.dumps(request | {"folder": folder, "ranks": ranks, "imports": list(imports)}) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            _end(server)
            raise subprocess.TimeoutExpired(arguments, timeout)
        answer = server.stdout.readline()
        if not answer:
            _end(server)
            raise RuntimeError("the process that forks has ended; what it wrote to stderr says why")
        status = int(answer)
        out, errors = ((Path(folder) / name).read_text(encoding="utf-8") for name in ("out", "errors"))
    return subprocess.CompletedProcess([sys.executable, *arguments], status, out, errors)


@cache
def _server() -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forks"], env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(_end, process)
    return process


def _end(server: "subprocess.Popen[str]") -> None:
    """Ends the process and every program that it has started."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# ----------------------------------------------------------------------------------- in the process that forks


def _serve() -> None:
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            import_module(name)
        ranks = _variables_of_ranks(request["ranks"])
        children = [_start(request, variables) for variables in ranks]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next((status for status in statuses if status), 0), flush=True)


def _variables_of_ranks(ranks: int) -> list[dict[str, str]]:
    if not ranks:
        return [{}]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(bound.getsockname()[1])}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _start(request: dict[str, Any], variables: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number, (name, flags) in enumerate(FILES.items()):
                os.dup2(os.open(Path(request["folder"]) / name, flags), number)
            sys.stdin, sys.stdout, sys.stderr = (
                os.fdopen(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww")
            )
            os.environ.clear()
            os.environ.update(request["environment"] | variables)
            status = _run(request["arguments"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


FILES = {
    "in": os.O_RDONLY,
    "out": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "errors": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


def _run(arguments: list[str]) -> int:
    """Runs a program, and gives the status with which Python would end."""
    kind, *rest = arguments
    try:
        if kind == "-c":
            code, *rest = rest
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
