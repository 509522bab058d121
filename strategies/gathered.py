"""What lies on one rank of a group each, handed to all of them by name."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.collectives.link import Link

Values = Mapping[str, object]
"""Of one name: tensors, and whatever can be pickled, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What must be known of a tensor before it comes."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


@torch.no_grad()
def gathered(
    own: Mapping[str, Values], names: Sequence[str], link: Link, device: torch.device
) -> Iterator[tuple[str, dict[str, object]]]:
    """The values of all ranks of `link`, in the order of `names`, which are the same on all; collective.

    Of a name that several ranks have, those of the first; what no rank has is left out. Tensors travel on
    `device`, one at a time, and come to lie on it, or on the host if they do where they are from.
    """
    outlines = _outlines(own, link, device)
    for name in names:
        owner = next((rank for rank, known in enumerate(outlines) if name in known), None)
        if owner is not None:
            mine = own[name] if owner == link.rank else {}
            yield (
                name,
                {
                    key: _tensor(mine.get(key), value, owner, link, device)
                    if isinstance(value, _Outline)
                    else value
                    for key, value in outlines[owner][name].items()
                },
            )


def _outlines(own: Mapping[str, Values], link: Link, device: torch.device) -> list[dict[str, Values]]:
    """Of each rank: its values, with outlines in the place of its tensors."""
    text = pickle.dumps({name: {key: _outline(value) for key, value in own[name].items()} for name in own})
    sizes = link.all_gather(torch.tensor([len(text)], device=device)).flatten().tolist()
    # Messages of one size: filled up to the longest.
    message = torch.frombuffer(bytearray(text.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
    rows = link.all_gather(message).cpu()
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _outline(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return _Outline(shape=value.shape, dtype=value.dtype, on_host=value.device.type == "cpu")


def _tensor(own: object, outline: _Outline, owner: int, link: Link, device: torch.device) -> Tensor:
    """On its owner the tensor itself, on the others a copy."""
    if isinstance(own, Tensor):
        message = own.detach().to(device).contiguous()
    else:
        message = torch.empty(outline.shape, dtype=outline.dtype, device=device)
    link.broadcast(message, owner)
    if isinstance(own, Tensor):
        return own.detach()
    return message.cpu() if outline.on_host else message
