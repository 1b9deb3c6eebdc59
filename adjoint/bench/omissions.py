"""What a run will leave out, and why. It is printed before the run, which can take an hour."""

from collections.abc import Iterator, Sequence

import torch

from adjoint.bench.peers import PEERS, version
from adjoint.contract.cases import Workload


def omissions(
    selected: Sequence[tuple[str, Workload]], device: torch.device, *, compile: bool, peers: Sequence[str] | None
) -> Iterator[str]:
    """A sentence for each thing that a run of these workloads would not time on a device."""
    if device.type == "cpu":
        why = "" if torch.cuda.is_available() else ", because torch sees no GPU"
        yield f"Times are the CPU's{why}: workloads are cut to small sizes."
    yield from other_devices(selected, device)
    timed = [workload for _, workload in selected if device.type in workload.devices]
    if not compile and any(workload.baseline is not None and workload.compile for workload in timed):
        yield "Left out: torch.compile, as --no-compile asks."
    entries = {PEERS[name].label: PEERS[name] for workload in timed for name in workload.peers}
    if others := sorted(label for label in entries if peers is not None and label not in peers):
        yield f"Left out: {', '.join(others)}, which --peer does not name."
    participants = {label: peer for label, peer in sorted(entries.items()) if label not in others}
    if need_gpu := [label for label, peer in participants.items() if not peer.runs_on(device)]:
        yield f"Left out: {', '.join(need_gpu)}, whose kernels need a GPU."
    for label, peer in participants.items():
        if label not in need_gpu and version(peer.distribution) is None:
            yield f"Left out: {label}, which is not installed (pip install {peer.package})."


def other_devices(selected: Sequence[tuple[str, Workload]], device: torch.device) -> Iterator[str]:
    """A sentence about the workloads that are meant for other devices, if there are any."""
    if elsewhere := [workload for _, workload in selected if device.type not in workload.devices]:
        meant = " and ".join(sorted({kind for workload in elsewhere for kind in workload.devices}))
        yield f"Left out: {len(elsewhere)} of {len(selected)} workloads, meant for {meant}."
