"""Runs a module as several ranks: forks of this process, which has imported everything, as each rank of torchrun would.

python -m tests.train.forked RANKS MODULE ARGUMENT...
"""

import os
import runpy
import socket
import sys
from importlib import import_module

for _name in ("torch._inductor.config", "torch.distributed.tensor", "adjoint.cli", "adjoint.train.run"):
    import_module(_name)  # the first, which takes longest, is imported where algorithms are to be deterministic


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def become(rank: int, ranks: int, port: int, module: str, arguments: list[str]) -> None:
    """Runs the module as one of the ranks; does not return."""
    end = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        end = 0
    except SystemExit as ended:
        end = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end)


def main(ranks: int, module: str, *arguments: str) -> int:
    port, processes = free_port(), []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            become(rank, ranks, port, module, list(arguments))
        processes.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
