"""Hashes of parameters, on the host and on a device."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from rank_builders import Queues
from torch import Tensor

from harness.worker.rank import control
from harness.worker.rank.control import hash_number
from harness.worker.rank.process import keep_imports, tear_down, tune_kernels
from strategies.devices import KINDS, Host


def hashed(*values: Tensor) -> float:
    return hash_number((str(place), value) for place, value in enumerate(values))


@pytest.fixture(params=[Host, Queues])
def kind(request, monkeypatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", request.param)
    monkeypatch.setattr(control, "PIECE", 8)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_and_its_place_is_in_the_hash(dtype) -> None:
    values = torch.arange(37).remainder(2 if dtype == torch.bool else 37).to(dtype)
    whole = hashed(values)
    assert hashed(values.clone()) == whole
    # Not where it lies: at an address that is no multiple of 4 for the smaller types.
    assert hashed(torch.cat([values[:1], values])[1:]) == whole
    assert hashed(values.roll(1)) != whole
    for place in (0, 7, 8, 36):
        other = values.clone()
        other.view(torch.uint8)[place * values.itemsize] ^= 1
        assert hashed(other) != whole
    assert hashed(values[:20], values[20:]) != whole


@pytest.mark.usefixtures("kind")
def test_what_is_empty_or_a_single_number_has_a_hash() -> None:
    assert len({hashed(torch.zeros(0)), hashed(torch.zeros(())), hashed(torch.ones(()))}) == 3


def test_words_are_multiplied_by_odd_numbers_and_added_up_modulo_2_to_the_64(monkeypatch) -> None:
    monkeypatch.setattr(control, "PIECE", 4)
    words = [1, -2, 2**31 - 1, -(2**31), 5, 6]
    octets = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    factors = control._odd_numbers(4, torch.device("cpu")).tolist()
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == 4
    pieces = [words[:4], words[4:]]
    expected = [sum(a * b for a, b in zip(piece, factors, strict=False)) % 2**64 for piece in pieces]
    assert [value % 2**64 for value in control._device_sums(octets).tolist()] == expected


def test_what_the_process_has_imported_is_in_no_later_collection() -> None:
    # As a worker has it while it imports.
    gc.disable()
    keep_imports()
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 100_000 > len(gc.get_objects())
        assert "torch._dynamo" in sys.modules
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize(("taken_for", "tuned"), [(Host, False), (Queues, True)])
def test_cudnn_tunes_convolutions_on_a_gpu_until_the_run_ends(monkeypatch, taken_for, tuned) -> None:
    monkeypatch.setitem(KINDS, "cpu", taken_for)
    cudnn, device = torch.backends.cudnn, torch.device("cpu")
    for on in (False, True):
        tune_kernels(device, deterministic=True, on=on)
        assert cudnn.deterministic
    assert not tune_kernels(device, deterministic=False, on=False)
    # torch keeps what it chose in the proof by a key with this, and looks it up before it times anything.
    in_proof = cudnn.deterministic
    assert tune_kernels(device, deterministic=False) is tuned
    assert (cudnn.benchmark, cudnn.deterministic, in_proof) == (tuned, False, tuned)
    tear_down(device)
    assert not cudnn.benchmark
