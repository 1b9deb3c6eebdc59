"""kill -9 at random moments, the writing of a checkpoint included: every resume is bit-exact, nothing is half there."""

from pathlib import Path

from tests import forks
from tests.train.small import ENVIRONMENT


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, everything: bool) -> None:
    kills = 20 if everything else 3
    arguments = ("-m", "tests.train.crash", str(tmp_path), str(kills))
    done = forks.python(*arguments, environment=ENVIRONMENT, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"{kills} kills" in done.stdout
