"""As one of several ranks: a run of all of them, and then whether everything is sharded.

torchrun --nproc-per-node N -m tests.train.many OPTIONS.json FOLDER
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from torch.distributed.tensor import DTensor

from adjoint.train import machine
from adjoint.train.options import Options
from adjoint.train.run import Run
from adjoint.train.step.ranks import start_ranks


def main(path: Path, folder: Path) -> None:
    options = Options(**json.loads(path.read_text(encoding="utf-8"))).complete()
    with machine.set_up(options.deterministic, options.threads), start_ranks(options.device) as ranks:
        run = Run(options, folder, ranks, Console())
        run.go(False)
        states = {name: state for name, state in run.optimizers.states().items() if state.dim()}
        assert len(states) >= len(run.weights.named), "every weight has a state"
        for name, tensor in {**run.weights.named, **states}.items():
            assert isinstance(tensor, DTensor) and all(place.is_shard() for place in tensor.placements), name
            local = tensor.to_local()
            assert (
                local.untyped_storage().nbytes()
                <= -(-tensor.shape[0] // ranks.size) * max(1, tensor.numel() // tensor.shape[0]) * tensor.element_size()
            ), f"{name} has memory for more than its rows"
        sizes = ranks.gather(sum(tensor.to_local().numel() for tensor in run.weights.named.values()))
        assert sum(sizes) == sum(tensor.numel() for tensor in run.weights.named.values())
        if ranks.is_first:
            print(
                f"{len(run.weights.named)} weights and {len(states)} states are sharded over {ranks.size} ranks: "
                f"{sizes}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
