"""What every rank starts a step with, its samples and its random state, against what its replica must have.

Fingerprints of all ranks are compared with those that independent code makes: of the samples `sampler`, of
the random state this module. Neither asks the worker which replica it takes this rank for.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.worker.cell.setup import CellSetup
from harness.worker.proof.findings import ProofFinding
from harness.worker.rank.control import Control, hash_number
from harness.worker.proof.comparison import ProofFinding
from harness.worker.rank.control import Control
from results.groups import GroupLayout
from strategies.devices import device_of


def random_print(device: torch.device) -> float:
    """Of the generators that a model may draw from as they are now: torch's (`device`'s as well), numpy's and
    Python's."""
    states = _known(torch.get_rng_state(), device_of(device).random_state())
    return _states_print(states, random.getstate(), np.random.get_state(legacy=False))


def expected_random_print(seed: int, step: int, replica: int, device: torch.device) -> float:
    """Of the state that a replica begins a step with, from new generators."""
    digest = hashlib.sha256(f"{seed}/{step}/{replica}".encode()).digest()
    torch_seed = int(digest.hex()[:14], 16)
    host = torch.Generator().manual_seed(torch_seed).get_state()
    states = _known(host, device_of(device).seeded_state(torch_seed))
    numbers = np.random.RandomState(int(digest.hex()[:8], 16)).get_state(legacy=False)
    return _states_print(states, random.Random(digest).getstate(), numbers)


def _known(*states: torch.Tensor | None) -> list[torch.Tensor]:
    return [state for state in states if state is not None]


def _states_print(states: Sequence[torch.Tensor], python: object, numbers: dict[str, Any]) -> float:
    # The words of numpy's generator as they are: as text they take 1.5 ms.
    words = torch.from_numpy(numbers["state"]["key"].view(np.uint8))
    rest = {**numbers, "state": numbers["state"]["pos"]}
    others = torch.frombuffer(bytearray(f"{python}{rest}".encode()), dtype=torch.uint8)
    return hash_number((str(index), state) for index, state in enumerate([*states, words, others]))


def compare_random_state(setup: CellSetup, step: int, control: Control) -> ProofFinding:
    """The random state of every rank, as it is now, against that which its replica begins a step with;
    collective, the same answer on all ranks."""
    own, replica = random_print(setup.device), setup.groups.replica(dist.get_rank())
    expected = expected_random_print(setup.cell.seed, step, replica, setup.device)
    return compare_prints("random state", [own], [expected], control, setup.groups)


def compare_prints(
    what: str, own: Sequence[float], expected: Sequence[float], control: Control, groups: GroupLayout
) -> ProofFinding:
    """The fingerprints of all ranks against what they must be; collective, the same answer on all ranks."""
    found = control.of_all([*own, float(list(own) != list(expected))])
    prints, wrong = [row[:-1] for row in found], [rank for rank, row in enumerate(found) if row[-1]]
    return ProofFinding(
        passed=not wrong,
        of="fingerprints",
        what=_difference(what, prints, wrong, groups),
        difference=float(len(wrong)),
        bound=0.0,
    )


def shared_batches(prints: Sequence[Sequence[float]], groups: GroupLayout) -> str | None:
    """A warning where two replicas, by the fingerprints of all ranks, read the same micro-batches."""
    readers: dict[tuple[float, ...], int] = {}
    for rank, row in enumerate(prints):
        replica = groups.replica(rank)
        first = readers.setdefault(tuple(row), replica)
        if first != replica:
            return (
                f"replicas {first} and {replica} read the same batches, and their samples are counted twice: "
                f"data= must give each replica its own part, by share.replica of share.replicas"
            )
    return None


def _difference(
    what: str, prints: Sequence[Sequence[float]], wrong: Sequence[int], groups: GroupLayout
) -> str:
    for rank in wrong:
        for other, fingerprint in enumerate(prints):
            if fingerprint == prints[rank] and groups.replica(other) != groups.replica(rank):
                first, second = sorted((groups.replica(other), groups.replica(rank)))
                return f"replicas {first} and {second} have the same {what}, and each must have its own"
    ranks = ", ".join(str(rank) for rank in wrong[:3])
    return f"{what} of {len(wrong)} of {len(prints)} ranks (rank {ranks}) are not those of their replica"
