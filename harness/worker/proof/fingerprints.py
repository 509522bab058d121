"""Check that every rank starts a step with the samples and the random state of its replica.

Fingerprints of all ranks are compared with fingerprints that independent code makes: of the samples
`sampler`, of the random state this module. Neither asks the worker which replica it takes this rank for.
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
from harness.worker.proof.comparison import ProofFinding
from harness.worker.rank.control import Control, hash_number
from results.groups import GroupLayout
from strategies.devices import device_of


def random_print(device: torch.device) -> float:
    """Return a fingerprint of the generators that a model may draw from: torch's (also `device`'s), numpy's
    and Python's, as they are now."""
    states = [torch.get_rng_state(), device_of(device).random_state()]
    return _states_print(states, random.getstate(), np.random.get_state(legacy=False))


def expected_random_print(seed: int, step: int, replica: int, device: torch.device) -> float:
    """Return the fingerprint of the random state that a replica begins a step with, from new generators."""
    digest = hashlib.sha256(f"{seed}/{step}/{replica}".encode()).digest()
    torch_seed = int(digest.hex()[:14], 16)
    host = torch.Generator().manual_seed(torch_seed).get_state()
    numbers = np.random.RandomState(int(digest.hex()[:8], 16)).get_state(legacy=False)
    states = [host, device_of(device).seeded_state(torch_seed)]
    return _states_print(states, random.Random(digest).getstate(), numbers)


def _states_print(states: list[torch.Tensor | None], python: object, numbers: dict[str, Any]) -> float:
    # The words of numpy's generator as they are: as text they take 1.5 ms.
    words = torch.from_numpy(numbers["state"]["key"].view(np.uint8))
    rest = {**numbers, "state": numbers["state"]["pos"]}
    others = torch.frombuffer(bytearray(f"{python}{rest}".encode()), dtype=torch.uint8)
    known = [state for state in (*states, words, others) if state is not None]
    return hash_number((str(index), state) for index, state in enumerate(known))


def compare_random_state(setup: CellSetup, step: int, control: Control) -> ProofFinding:
    """Compare the random state of every rank, as it is now, with the one that its replica begins a step with.

    Collective, with the same answer on all ranks.
    """
    own, replica = random_print(setup.device), setup.groups.replica(dist.get_rank())
    expected = expected_random_print(setup.cell.seed, step, replica, setup.device)
    return compare_prints("random state", [own], [expected], control, setup.groups)


def compare_prints(
    what: str, own: Sequence[float], expected: Sequence[float], control: Control, groups: GroupLayout
) -> ProofFinding:
    """Compare the fingerprints of all ranks with the expected ones.

    Collective, with the same answer on all ranks.
    """
    found = control.of_all([*own, float(list(own) != list(expected))])
    prints, wrong = [row[:-1] for row in found], [rank for rank, row in enumerate(found) if row[-1]]
    difference = _difference(what, prints, wrong, groups)
    return ProofFinding.within("fingerprints", difference, float(len(wrong)), 0.0)


def shared_batches(prints: Sequence[Sequence[float]], groups: GroupLayout) -> str | None:
    """Return a warning if two replicas, by the fingerprints of all ranks, read the same micro-batches."""
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
    return f"{what} of {len(wrong)} of {len(prints)} ranks (rank {ranks}) differ from their replica's"
