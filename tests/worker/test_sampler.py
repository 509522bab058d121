"""The samples that each replica must be given, and torch's optimizers, stated a second time."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from builders import a_cell
from torch import nn

from harness.worker.cell.sampler import Sampler, _Row, batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.proof.fingerprints import expected_random_print, random_print
from harness.worker.proof.reference import STATED, plain_optimizer
from harness.worker.rank.rank import Rank
from results.errors import UsageError
from strategies.optimizers import OPTIMIZERS, build_optimizer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "batches"),
    [
        ({"workload": "mlp", "dataset": "synthetic"}, 6),
        # 599 samples a replica make 9 batches of 64: the second epoch, and the third.
        ({"workload": "mlp", "dataset": "digits"}, 20),
        ({"workload": "resnet18-32px", "dataset": "digits", "memory_format": "channels_last"}, 2),
        ({"workload": "gpt-nano:seq=4", "dataset": "text"}, 3),
    ],
    ids=str,
)
def test_any_batch_by_its_number_is_the_one_that_is_drawn(fields, batches) -> None:
    cell = a_cell(gpus=3, micro_batch=64, seed=5, **fields)
    rank = Rank(rank=0, local_rank=0, node_rank=0, gpus=3, local_gpus=3)
    setup = CellSetup(cell=cell, rank=rank, device=CPU, source_folder=None)
    workload = setup.workload()
    sampler = Sampler(cell, workload, CPU, None)
    for replica in range(3):
        draws = setup.batches(workload, replica)
        prints = [batch_print(batch) for batch in islice(draws, batches)]
        assert prints == sampler.prints(replica, 0, batches)
        assert prints[1:] == [batch_print(batch) for batch in sampler.batches(replica, 1, batches - 1)]
        assert draws.drawn == batches
    assert not set(sampler.prints(0, 0, batches)) & set(sampler.prints(1, 0, batches))


def test_the_random_state_of_a_step_is_that_of_new_generators() -> None:
    seed_step(3, 7, 1)
    assert random_print(CPU) == expected_random_print(3, 7, 1, CPU)
    torch.rand(1)
    assert random_print(CPU) != expected_random_print(3, 7, 1, CPU)
    assert (
        len({expected_random_print(3, step, replica, CPU) for step in range(3) for replica in range(3)}) == 9
    )


@pytest.mark.parametrize("facts", OPTIMIZERS.all_facts, ids=lambda facts: facts.name)
def test_every_optimizer_is_stated_with_the_defaults_of_its_facts(facts) -> None:
    assert facts.name in STATED
    parameters = [nn.Parameter(torch.zeros(1))]
    for text in (facts.name, f"{facts.name}:lr=0.5:weight_decay=0.25"):
        plain, built = plain_optimizer(text, parameters), build_optimizer(text, parameters)
        assert type(plain) is type(built)
        assert plain.defaults == built.defaults


def test_one_iterator_for_all_epochs_is_refused_where_it_is_read_again() -> None:
    given = iter([torch.zeros(2), torch.ones(2)])
    row = _Row(lambda share: given, a_cell(gpus=2, micro_batch=2), 0)
    assert row.batch(1).tolist() == [1, 1]
    with pytest.raises(UsageError, match="gave replica 0 nothing after 2 batches: open a new epoch"):
        row.batch(2)
