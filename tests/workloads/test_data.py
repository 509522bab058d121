"""The batches: deterministic, disjoint between replicas, and shaped to the workload."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from results.errors import UsageError
from workloads.data import POOL, DataRequest, open_batches
from workloads.datasets.facts import DIGITS_CLASSES, Digits
from workloads.datasets.samples import STDLIB_BYTES, Windows, digits, read_digits, stdlib_text
from workloads.workload import Batch, ImageInput


def take(request: DataRequest, batches: int) -> list[Batch]:
    return list(islice(open_batches(request), batches))


def equal(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for first, second in pairs for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("text", "dataset"),
    [("mlp", "synthetic"), ("gpt-nano", "synthetic"), ("mlp", "digits"), ("gpt-nano", "text")],
)
def test_batches_follow_from_seed_and_replica(ask, text, dataset) -> None:
    first = take(ask(text, dataset, replicas=2), 3)
    assert equal(first, take(ask(text, dataset, replicas=2), 3))
    assert not equal(first, take(ask(text, dataset, replicas=2, replica=1), 3))
    assert not equal(first, take(ask(text, dataset, replicas=2, seed=1), 3))


def test_the_next_seed_does_not_give_the_next_replicas_batches(ask) -> None:
    first, second = ask("mlp", "synthetic", seed=1), ask("mlp", "synthetic", replicas=2, replica=1)
    assert not equal(take(first, 3), take(second, 3))


@pytest.mark.parametrize("dataset", ["synthetic", "digits"])
def test_batches_leave_torchs_random_state_alone(ask, dataset) -> None:
    request = ask("mlp", dataset, micro_batch=900)
    before = torch.get_rng_state()
    take(request, 3)  # digits: three epochs of one batch
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "dataset", "inputs", "targets"),
    [
        ("mlp", "synthetic", (4, 784), (4,)),
        ("mlp", "digits", (4, 784), (4,)),
        ("resnet18-32px", "synthetic", (4, 3, 32, 32), (4,)),
        ("resnet18:px=40", "digits", (4, 3, 40, 40), (4,)),
        ("gpt-nano", "synthetic", (4, 64), (4, 64)),
        ("gpt-nano:seq=16", "text", (4, 16), (4, 16)),
    ],
)
def test_batches_have_the_workloads_shape_and_suit_its_loss(ask, text, dataset, inputs, targets) -> None:
    request = ask(text, dataset)
    x, y = next(open_batches(request))
    assert (tuple(x.shape), tuple(y.shape), y.dtype) == (inputs, targets, torch.int64)
    assert x.is_contiguous()
    assert torch.isfinite(request.workload.loss(request.workload.module(x), y))


def test_images_come_in_the_memory_format_asked_for(ask) -> None:
    for dataset in ("synthetic", "digits"):
        x, _ = next(open_batches(ask("resnet18-32px", dataset, memory_format=torch.channels_last)))
        assert x.is_contiguous(memory_format=torch.channels_last)


def test_synthetic_batches_are_a_pool_given_in_turn(ask) -> None:
    batches = take(ask("mlp", "synthetic"), 2 * POOL)
    assert len({x.data_ptr() for x, _ in batches}) == POOL
    assert all(batches[i][0] is batches[i + POOL][0] for i in range(POOL))


def test_synthetic_tokens_are_predicted_from_the_one_before(ask) -> None:
    x, y = next(open_batches(ask("gpt-nano", "synthetic")))
    assert torch.equal(x[:, 1:], y[:, :-1])


@settings(max_examples=30)
@given(content=st.binary(min_size=1, max_size=80), length=st.integers(1, 9))
def test_windows_cut_a_text_without_gap_or_overlap(content, length) -> None:
    windows = Windows(torch.frombuffer(bytearray(content), dtype=torch.uint8), length=length)
    assert len(windows) == (len(content) - 1) // length
    x, y = windows.__getitems__(list(range(len(windows))))
    covered = len(windows) * length
    assert bytes(x.flatten().tolist()) == content[:covered]
    assert bytes(y.flatten().tolist()) == content[1 : covered + 1]


def test_worker_processes_give_the_same_batches(ask) -> None:
    alone = take(ask("gpt-nano", "text"), 3)
    assert equal(alone, take(ask("gpt-nano", "text:workers=1"), 3))


def test_the_digits_are_all_there_and_standardised() -> None:
    images = digits(ImageInput(shape=(3, 8, 8), classes=10))
    assert len(images) == Digits.samples
    assert sorted(set(images.classes.tolist())) == list(range(DIGITS_CLASSES))
    x, _ = images.__getitems__(list(range(Digits.samples)))
    # At 8 x 8 nothing is resized, so mean and deviation are exact, and the channels are alike.
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x[:, 0].std().item() == pytest.approx(1, abs=1e-4)
    assert torch.equal(x[:, 0], x[:, 2])


def test_the_standard_librarys_text_is_python_and_of_the_stated_size() -> None:
    content = stdlib_text()
    assert len(content) == STDLIB_BYTES
    # It begins with the first module by name.
    import __future__

    assert content.startswith(Path(__future__.__file__).read_bytes())


def test_a_users_text_is_found_from_the_study_files_folder(ask, tmp_path) -> None:
    (tmp_path / "book.txt").write_bytes(b"abcdefghi")
    request = ask("gpt-nano:seq=4", "text:book.txt", micro_batch=2, source_folder=tmp_path)
    x, y = next(open_batches(request))
    assert sorted(bytes(row.tolist()) for row in x) == [b"abcd", b"efgh"]
    assert sorted(bytes(row.tolist()) for row in y) == [b"bcde", b"fghi"]


@pytest.mark.parametrize(
    ("text", "dataset", "changes", "says"),
    [
        ("mlp", "text", {}, "dataset text does not fit: the workload takes images"),
        ("gpt-nano", "digits", {}, "dataset digits does not fit: the workload takes tokens"),
        ("resnet18:classes=5", "digits", {}, "digits has 10 classes, the workload 5"),
        ("gpt-nano", "text:missing.txt", {}, "cannot read the text .*missing.txt: No such file"),
        ("gpt-nano", "text:empty.txt", {}, "empty.txt is empty"),
        # 258 bytes are 4 windows of 64, 2 for each of 2 replicas.
        (
            "gpt-nano",
            "text:short.txt",
            {"replicas": 2},
            "has 4 samples: 2 for each of 2 replicas is less than a batch of 4",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_before_the_first_batch(
    ask, tmp_path, text, dataset, changes, says
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(bytes(258))
    with pytest.raises(UsageError, match=says):
        open_batches(ask(text, dataset, source_folder=tmp_path, **changes))


@pytest.mark.parametrize("shape", [(10,), (3, 8, 9)])
def test_digits_need_a_square(shape) -> None:
    with pytest.raises(UsageError, match="digits has square images"):
        digits(ImageInput(shape=shape, classes=10))


def test_the_digits_are_those_of_the_uci_repository() -> None:
    pixels, classes = read_digits()
    assert (pixels.shape, pixels.min(), pixels.max()) == ((1797, 8, 8), 0, 16)
    # Counts of each class as the data set's description has them, for the test set of 1,797.
    assert classes.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
