"""The data of a training run: every sample once an epoch, from any position, on any number of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from data_requests import CountedRow, Row, a_request_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from results.errors import UsageError
from workloads import DataShare, Workload
from workloads.data import DataRequest, open_batches
from workloads.training_data import TrainingData, held_out, open_training, require_epochs

Part = tuple[int, int, int]
"""Replicas, micro-batch and batches of one start of a run."""


def request(data: Any, part: Part, replica: int = 0, kept: Any = None) -> DataRequest:
    replicas, micro_batch, _ = part
    return a_request_of(data, kept=kept, micro_batch=micro_batch, replica=replica, replicas=replicas, seed=3)


def taken(data: Any, parts: list[Part]) -> tuple[list[int], TrainingData]:
    """The row of samples of a run that is interrupted after each part: what every replica took, put together
    again; and replica 0's data at its end. As after a checkpoint, all replicas go on from replica 0's."""
    row: list[int] = []
    state = None
    for part in parts:
        replicas, micro_batch, batches = part
        opened = [open_training(request(data, part, replica)) for replica in range(replicas)]
        for each in opened:
            if state is not None:
                each.load_state_dict(state)
        for _ in range(batches):
            step = [0] * (replicas * micro_batch)
            for replica, each in enumerate(opened):
                step[replica::replicas] = next(each).tolist()
            row += step
        states = [each.state_dict() for each in opened]
        assert all(each == states[0] for each in states)
        state = states[0]
    return row, opened[0]


@pytest.mark.parametrize("kind", [list, CountedRow, Row])
@settings(max_examples=40)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4
    ),
    length=st.integers(12, 30),
)
def test_every_sample_is_taken_once_an_epoch_whatever_interrupts_the_run(kind, parts, length) -> None:
    data = list(range(length)) if kind is list else kind(length)
    row, end = taken(data, parts)
    for start in range(0, len(row) - length + 1, length):
        assert sorted(row[start : start + length]) == list(range(length))
    # One replica that nothing interrupts, a sample a batch, takes the same row.
    assert row == taken(data, [(1, 1, len(row))])[0]
    assert end.samples == len(row)
    # An end that nobody announced is seen when more is asked for.
    assert end.epoch in ({(len(row) - 1) // length} if kind is Row else {len(row) // length})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_given_what_an_uninterrupted_one_is(ask, workers) -> None:
    # 1437 digits to train on, 360 a batch: the fourth begins the second epoch.
    asked = ask("mlp", f"digits:workers={workers}", micro_batch=180, replicas=2, replica=1)
    whole = open_training(asked)
    first = list(islice(whole, 2))
    state = whole.state_dict()
    later = list(islice(whole, 4))
    resumed = open_training(asked)
    resumed.load_state_dict(state)
    for (x, y), (again_x, again_y) in zip(later, islice(resumed, 4), strict=True):
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)
    assert not torch.equal(first[0][0], later[2][0])
    assert (resumed.epoch, resumed.samples) == (1, 6 * 360)
    assert resumed.epochs == pytest.approx(2160 / 1437)
    assert state == {"epoch": 0, "within": 720, "samples": 720, "of": 1437}


def test_the_order_leaves_torchs_random_state_alone_and_follows_from_the_seed(ask) -> None:
    asked = ask("gpt-nano", "text")
    before = torch.get_rng_state()
    x, _ = next(open_training(asked))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, next(open_training(asked))[0])
    assert not torch.equal(x, next(open_training(replace(asked, seed=1)))[0])


def test_own_samples_come_as_in_a_measured_run() -> None:
    asked = request(list(range(40)), (2, 4, 0), replica=1)
    # 5 batches of 2 x 4 are an epoch.
    measured = [batch.tolist() for batch in islice(open_batches(asked), 10)]
    assert measured == [batch.tolist() for batch in islice(open_training(asked), 10)]


def test_synthetic_batches_are_those_of_a_measured_run_and_have_no_epochs(ask) -> None:
    asked = ask("mlp", "synthetic")
    data = open_training(asked)
    first = [x for x, _ in islice(data, 6)]
    assert all(torch.equal(x, y) for x, (y, _) in zip(first, open_batches(asked), strict=False))
    resumed = open_training(asked)
    resumed.load_state_dict(data.state_dict())
    assert torch.equal(next(resumed)[0], first[2])
    assert (data.epochs, held_out(asked)) == (0.0, None)
    with pytest.raises(UsageError, match=r"synthetic data have no epochs: ask for a number of steps"):
        require_epochs(asked)


class Loader:
    """Six batches, shuffled by the epoch, that can be gone on with."""

    def __init__(self, share: DataShare) -> None:
        self._place = 0
        self._share = share

    def __iter__(self) -> Iterator[Tensor]:
        while self._place < 6:
            self._place += 1
            yield torch.full((2,), 100 * self._share.epoch + self._place)
        self._place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


def plain(share: DataShare) -> Iterable[Tensor]:
    return list(Loader(share))


@pytest.mark.parametrize(
    ("opens", "replicas"),
    [(Loader, 2), (plain, 2), (Loader, 1), (plain, 4)],
)
def test_a_function_is_told_the_epoch_and_goes_on_by_state_or_by_reading_again(opens, replicas) -> None:
    before = open_training(request(opens, (2, 2, 0)))
    assert [int(batch[0]) for batch in islice(before, 10)] == [1, 2, 3, 4, 5, 6, 101, 102, 103, 104]
    after = open_training(request(opens, (replicas, 2, 0)))
    after.load_state_dict(before.state_dict())
    # 4 batches of 2 replicas are 8 of one, which are more than an epoch has, and 2 of four.
    follows = {1: [201, 202], 2: [105, 106], 4: [103, 104]}[replicas]
    assert [int(batch[0]) for batch in islice(after, 2)] == follows


def shares(asked: DataRequest) -> list[list[Any]]:
    """The held-out batches of every replica."""
    return [list(held_out(replace(asked, replica=r)) or ()) for r in range(asked.replicas)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [7, 8, 12, 13, 25])
@pytest.mark.parametrize("kind", [list, Row])
def test_held_out_samples_are_seen_once_in_equally_many_batches(replicas, length, kind) -> None:
    kept = list(range(length)) if kind is list else Row(length)
    dealt = shares(request([0], (replicas, 2, 0), kept=kept))
    assert len({len(batches) for batches in dealt}) == 1
    seen = [int(sample) for batches in dealt for batch in batches for sample in batch]
    assert sorted(seen) == list(range(length))
    assert {len(batch) for batches in dealt for batch in batches} <= {1, 2, 3}


def test_a_replica_reads_its_own_held_out_samples_when_they_are_asked_for() -> None:
    read: list[int] = []

    class Read(Dataset[int]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    found = held_out(request([0], (2, 2, 0), replica=1, kept=Read()))
    assert found is not None
    assert read == []
    # 4 of 2 replicas together; the ninth goes with the last ones of the other.
    assert [batch.tolist() for batch in found] == [[1, 3], [5, 7]]
    assert read == [1, 3, 5, 7]
    # A second pass.
    assert sum(len(batch) for batch in found) == 4


@pytest.mark.parametrize(("text", "dataset"), [("mlp", "digits"), ("gpt-nano:seq=16", "text")])
def test_nothing_that_is_trained_on_is_held_out(ask, text, dataset) -> None:
    asked = ask(text, dataset, micro_batch=500)
    samples = open_training(asked).samples_per_epoch
    kept = sum(len(y) for _, y in held_out(asked) or ())
    # Of 1797 digits a fifth; of 262143 windows of 16 bytes 512.
    assert (samples, kept) == {"digits": (1437, 360), "text": (261631, 512)}[dataset]
    if dataset == "digits":
        rows = {row.numpy().tobytes() for x, _ in islice(open_training(asked), 3) for row in x}
        tested = [row.numpy().tobytes() for x, _ in held_out(asked) or () for row in x]
        assert not rows.intersection(tested)
        # Held out alike whatever the seed.
        assert torch.equal(*(next(iter(held_out(replace(asked, seed=seed)) or ()))[0] for seed in (0, 1)))


def empty_again(share: DataShare) -> Iterable[Tensor]:
    return [] if share.epoch else [torch.zeros(2)]


class Short(CountedRow):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (empty_again, "gave nothing to replica 0 of 2 in epoch 1 (batches of 2)"),
        (Row(0), "gave nothing to replica 0 of 2 in epoch 0"),
        (Short(9), "has a length of 9 samples, and epoch 0 ended after 8"),
        (list(range(3)), "has 3 samples to train on, fewer than one batch of 2 for each of 2 replicas"),
        (DataLoader(CountedRow(4)), "give its Dataset, or a function that takes a workloads.DataShare"),
        (iter([0]), "data= is an iterator, which can be read once"),
        (lambda share: [torch.zeros(3)], "a batch of 3 samples, and 2 were asked for"),
        (lambda share: [torch.zeros(1)], "drop_last=True"),
        (None, "no data="),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_in_a_sentence(data, words) -> None:
    asked = request([0], (2, 2, 0))
    asked = replace(asked, workload=Workload(module=nn.Identity(), data=data, synthetic=lambda g, n: g))
    with pytest.raises(UsageError) as raised:
        list(islice(open_training(asked), 6))
    assert words in str(raised.value)


def test_a_position_of_other_data_is_refused() -> None:
    data = open_training(request(list(range(9)), (2, 2, 0)))
    with pytest.raises(UsageError, match=r"in data of 10 samples, and these have 9 samples: resume with"):
        data.load_state_dict({"epoch": 0, "within": 0, "samples": 0, "of": 10})


def test_fewer_held_out_samples_than_replicas_are_refused() -> None:
    with pytest.raises(UsageError, match="2 samples are held out, and each of 3 replicas needs one"):
        shares(request([0], (3, 2, 0), kept=[1, 2]))
