"""Values that single ranks of a group have, gathered on all of its ranks by name."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from strategies.collectives.link import Link

T = TypeVar("T")
Values = Mapping[str, object]
"""The values of one name by key: tensors, and objects that can be pickled."""


class CopiesDifferError(RuntimeError):
    """Ranks that keep copies of one value hold different ones: a defect of this program, not of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """The facts of a tensor that its receivers need before it is sent."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool
    digest: bytes
    """A hash of its bits, if other ranks have a copy; else empty."""


@torch.no_grad()
def gathered(
    own: Mapping[str, Values],
    names: Sequence[str],
    link: Link,
    device: torch.device,
    *,
    copied: Collection[str] = (),
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the values of all ranks of `link`, in the order of `names`, which are the same on all;
    collective.

    If several ranks have a name, the values of the first count; names that no rank has are left out. Tensors
    are sent on `device`, one at a time, and stay there, or on the host if their owner has them on the host.

    Raises CopiesDifferError, on all ranks, if ranks have different bits for one of the names `copied`.
    """
    # The values of each rank, with outlines instead of its tensors.
    outlined: dict[str, Values] = {
        name: {key: _outline(value, digested=name in copied) for key, value in values.items()}
        for name, values in own.items()
    }
    outlines = gathered_objects(outlined, link, device)
    for name in names:
        if name in copied:
            _require_equal(name, [known[name] for known in outlines if name in known])
        owner = next((rank for rank, known in enumerate(outlines) if name in known), None)
        if owner is not None:
            mine = own[name] if owner == link.rank else {}
            sent = outlines[owner][name]
            yield name, {key: _sent(mine.get(key), value, owner, link, device) for key, value in sent.items()}


def _require_equal(name: str, copies: Sequence[Values]) -> None:
    if any(copy != copies[0] for copy in copies[1:]):
        raise CopiesDifferError(f"{name} is not the same on the ranks that have a copy of it")


def gathered_objects(value: T, link: Link, device: torch.device) -> list[T]:
    """Gather a pickled value of each rank, in the order of ranks; collective."""
    text = pickle.dumps(value)
    sizes = link.all_gather(torch.tensor([len(text)], device=device)).flatten().tolist()
    # All messages need one size: they are padded to the longest.
    message = torch.frombuffer(bytearray(text.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
    rows = link.all_gather(message).cpu()
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _outline(value: object, *, digested: bool) -> object:
    if not isinstance(value, Tensor):
        return value
    digest = b""
    if digested:
        bits = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = hashlib.blake2b(bits.numpy().data, digest_size=16).digest()
    on_host = value.device.type == "cpu"
    return _Outline(shape=value.shape, dtype=value.dtype, on_host=on_host, digest=digest)


def _sent(own: object, outline: object, owner: int, link: Link, device: torch.device) -> object:
    """Return a tensor itself on its owner, and a copy on the others; another value as it is. Collective."""
    if not isinstance(outline, _Outline):
        return outline
    if isinstance(own, Tensor):
        message = own.detach().to(device).contiguous()
    else:
        message = torch.empty(outline.shape, dtype=outline.dtype, device=device)
    link.broadcast(message, owner)
    if isinstance(own, Tensor):
        return own.detach()
    return message.cpu() if outline.on_host else message
