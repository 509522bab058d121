"""Parts of a model that move by a count over all replicas: see `strategies.training.tallies`.

The tally of each replica is a buffer, and so is compared with the simulation's. What an update makes of the
tallies is compared with what the part itself makes of their sum over the replicas, over a group that
exchanges no gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from harness.worker.cell.setup import CellSetup
from harness.worker.proof.comparison import ProofFinding
from harness.worker.rank.control import Control
from strategies.training.parallel import ParallelModel


@torch.no_grad()
def settled(setup: CellSetup, model: ParallelModel, control: Control) -> dict[str, Any]:
    """Return copies of this rank's parts, as the update of a step has to leave them; collective."""
    named = ((name, value.cpu()) for name, value in model.named_buffers())
    tallies = {name: value for name, value in named if name.rpartition(".")[2] == "tally"}
    if not tallies:
        return {}
    groups, rank = setup.groups, setup.rank.rank
    first = next(each for each in range(groups.ranks) if groups.replica(each) == setup.replica)
    own = torch.cat(list(tallies.values()))
    total = control.sum_of_all(own if rank == first else torch.zeros_like(own))
    each = torch.split(total, [len(value) for value in tallies.values()])
    sums = dict(zip(tallies, each, strict=True))
    counting = ((name, part) for name, part in model.bare.named_modules() if f"{name}.tally" in sums)
    parts: dict[str, Any] = {name: copy.deepcopy(part) for name, part in counting}
    for name, part in parts.items():
        part.settle(sums[f"{name}.tally"].to(setup.device))
    return parts


def compare_settled(module: nn.Module, parts: dict[str, Any]) -> list[ProofFinding]:
    """Compare buffers after an update with the copies that `settled` returned."""
    findings = []
    for name, part in parts.items():
        for buffer, value in part.named_buffers():
            now = module.get_submodule(name).get_buffer(buffer)
            what = f"{name}.{buffer} after the update is not what the counts of all replicas make of it"
            difference = float((now.double() - value.double()).abs().max())
            findings.append(ProofFinding.within("buffers", what, difference, 0.0))
    return findings
