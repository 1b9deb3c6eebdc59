"""Saves what the model gives for an example: `TRITON_INTERPRET=1 python -m tests.gluon.rule.save_results NAME FILE`.

A process has the interpreter, which the model needs, or the GPU: a test on a GPU starts this as another one.
"""

import sys

import torch

from adjoint.verify import interpreter
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES
from tests.gluon.rule.examples import EXAMPLES


def main(name: str, file: str) -> None:
    interpreter.correct()
    torch.save(hopper.results(EXAMPLES[name](), SCHEDULES[0]), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
