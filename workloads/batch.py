"""Batches of any form: single tensors, or tensors in nested dictionaries, tuples and lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Batch = Any
"""A pytree of tensors whose first dimension is the sample; leaves of other types stay as they are."""


def named_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its place in the batch; other leaves as empty tensors, their value in the
    name."""
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        place = pytree.keystr(path)
        yield (place, leaf) if isinstance(leaf, Tensor) else (f"{place}={leaf!r}", torch.empty(0))


def tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in the order of its form."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Mapping):
            # torch treats some mappings as leaves, such as a tokenizer's `BatchEncoding`.
            found += tensors(dict(leaf))
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def samples_of(batch: Batch) -> int:
    """Return the samples of a batch: the first dimension of its first tensor that has one; 0 if none has."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def placed(batch: Batch, device: torch.device, form: torch.memory_format = torch.contiguous_format) -> Batch:
    """Move a batch's tensors to `device`, with four dimensions into the memory format `form`.

    Tensors for a GPU are copied to pinned memory first, unless a loader has done so. A mapping that torch
    treats as a leaf (a tokenizer's `BatchEncoding`) becomes a dictionary.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return placed(dict(leaf), device, form)
        if not isinstance(leaf, Tensor):
            return leaf
        own = form if leaf.dim() == 4 else torch.contiguous_format
        if device.type == "cuda" and leaf.device.type == "cpu":
            # Only from pinned memory does a non_blocking copy overlap with the step.
            leaf = leaf.pin_memory()
        return leaf.to(device, non_blocking=True, memory_format=own)

    return pytree.tree_map(moved, batch)
