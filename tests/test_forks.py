"""Programs in forks end, read and print as in processes of their own."""

import subprocess
import sys

import pytest

from adjoint.core.kernels import interpreting
from tests import forks

pytestmark = pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, sys.stdin.read())",
        "import sys; print('half', file=sys.stderr); sys.exit(3)",
        "raise SystemExit('in words')",
        "raise SystemExit",
        "print(1 // 0)",
        "import os; os._exit(5)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_program_ends_as_in_a_process_of_its_own(code: str) -> None:
    expected = subprocess.run([sys.executable, "-c", code, "one"], input="text", capture_output=True, text=True)
    done = forks.python("-c", code, "one", stdin="text")
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_ranks_are_those_of_one_job() -> None:
    code = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(os.environ['RANK'] == '1')"
    done = forks.python("-c", code, ranks=2)
    assert done.returncode == 1 and sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert not forks.python("-c", "import os; assert 'RANK' not in os.environ").returncode


def test_a_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.python("-c", "import time; time.sleep(100)", timeout=0.5)
    assert forks.python("-c", "print('a new process forks')").stdout == "a new process forks\n"
