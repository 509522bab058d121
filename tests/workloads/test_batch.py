"""Batches of any form: moved, counted and named."""

from __future__ import annotations

from collections import UserDict

import torch
from torch import Tensor

from harness.worker.cell.sampler import batch_print
from workloads.batch import named_tensors, placed, samples_of

X, IMAGES = torch.arange(6.0).view(3, 2), torch.arange(3 * 2 * 4 * 4.0).view(3, 2, 4, 4)


def test_every_tensor_of_a_batch_is_moved_and_all_else_stays() -> None:
    batch = {"x": X, "inner": [(IMAGES, 7), None], "word": "a"}
    moved = placed(batch, torch.device("cpu"), torch.channels_last)
    assert moved["inner"][0][0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved["inner"][0][0], IMAGES)
    assert (moved["inner"][0][1], moved["inner"][1], moved["word"]) == (7, None, "a")
    assert torch.equal(moved["x"], X)
    assert placed(batch, torch.device("meta"))["x"].is_meta


def test_what_goes_to_a_gpu_is_pinned_first_wherever_it_comes_from(monkeypatch) -> None:
    pinned: list[Tensor] = []
    sent: list[tuple[Tensor, str, bool]] = []

    def pin(values: Tensor) -> Tensor:
        pinned.append(values.clone())
        return pinned[-1]

    def send(values: Tensor, device: torch.device, *, non_blocking: bool, **_: object) -> Tensor:
        sent.append((values, device.type, non_blocking))
        return values

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", send)
    placed({"x": X, "images": IMAGES}, torch.device("cuda", 0))
    assert [(device, ahead) for _, device, ahead in sent] == [("cuda", True), ("cuda", True)]
    assert all(values is own for (values, *_), own in zip(sent, pinned, strict=True))
    placed({"x": X}, torch.device("cpu"))
    assert len(pinned) == 2


def test_a_mapping_that_torch_does_not_know_becomes_a_dictionary() -> None:
    moved = placed(UserDict(ids=X), torch.device("cpu"))
    assert type(moved) is dict
    assert torch.equal(moved["ids"], X)


def test_samples_are_those_of_the_first_tensor_that_has_a_dimension() -> None:
    assert samples_of({"weight": torch.tensor(1.0), "x": X}) == 3
    assert samples_of((torch.tensor(1.0), "text")) == 0
    assert samples_of([7, UserDict(ids=UserDict(of=X))]) == 3


def test_a_fingerprint_is_of_form_names_tensors_and_values() -> None:
    batch = {"x": X, "n": 1}
    assert [name for name, _ in named_tensors(batch)] == ["['x']", "['n']=1"]
    same = batch_print({"x": X.clone(), "n": 1})
    assert batch_print(batch) == same
    for other in ({"x": X, "n": 2}, {"y": X, "n": 1}, {"x": X + 1, "n": 1}, {"n": 1, "x": [X]}):
        assert batch_print(other) != same
