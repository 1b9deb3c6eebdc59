"""kill -9 at random moments, the writing of a checkpoint included: every resume is bit-exact, nothing is half there."""

import subprocess
import sys
from pathlib import Path

from tests.train.small import ENVIRONMENT


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, everything: bool) -> None:
    kills = 20 if everything else 3
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.crash", str(tmp_path), str(kills)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"{kills} kills" in done.stdout
