"""The trained model: complete tensors under the names of the bare module, and a file of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from results.errors import StoreError, UsageError
from results.files import replacing
from strategies.catalog import STRATEGIES
from strategies.collectives.link import Link
from strategies.saving.agreement import Ranks
from strategies.saving.state import Resumable
from strategies.training.replicas import take_from_first

SUFFIXES = (".pt", ".safetensors")


def replicas_differ(strategy: str) -> bool:
    """Return whether the replicas of a strategy may have different parameters between two steps."""
    promise = STRATEGIES.facts(strategy).promise
    return promise.of == "parameters" and (promise.every > 1 or not promise.all_equal)


@torch.no_grad()
def whole_state(trainer: Resumable, rank: int | None) -> dict[str, Tensor]:
    """Return the result of `Trainer.full_state_dict`; collective."""
    model, link = trainer.model, trainer.link
    kept = rank is None or link is None or link.rank == rank
    averaged = link if replicas_differ(trainer.settings.strategy) else None

    def common() -> Iterator[tuple[str, Tensor]]:
        for name, value in model.named_parameters():
            yield name, value if averaged is None else mean_of(value, averaged)
        for name, value in model.named_buffers():
            if averaged is not None:
                yield name, mean_of(value, averaged)
                continue
            own = value.clone()
            if link is not None:
                # Between steps each replica has its own buffers; a step begins with the buffers of rank 0.
                take_from_first(link, [own])
            yield name, own

    shown = set(model.state_keys.values()) if kept else set()
    found = {name: value.to("cpu", copy=True) for name, value in common() if name in shown}
    return {key: found[name] for key, name in model.state_keys.items()} if kept else {}


@contextmanager
def as_exported(trainer: Resumable) -> Iterator[None]:
    """Give the model on this rank the values of `whole_state` within the context; afterwards it has its own
    values again. Entering is collective."""
    model, link = trainer.model, trainer.link
    averages = replicas_differ(trainer.settings.strategy)
    values = [*model.bare.buffers(), *(model.bare.parameters() if averages else ())]
    kept = [value.detach().clone() for value in values]
    with torch.no_grad():
        if averages and link is not None:
            for value in values:
                value.copy_(mean_of(value, link))
        elif link is not None:
            take_from_first(link, values)
    try:
        yield
    finally:
        with torch.no_grad():
            for value, own in zip(values, kept, strict=True):
                value.copy_(own)


def mean_of(value: Tensor, link: Link) -> Tensor:
    """Return the mean over the ranks, which is the value itself, bit for bit, if all ranks have the same
    value; other types than floating point are taken from rank 0. Collective."""
    first = value.detach().clone()
    take_from_first(link, [first])
    if not first.is_floating_point():
        return first
    # Equal infinities, as in a mask, have a difference of 0, not NaN.
    differences = torch.where(value == first, torch.zeros_like(first), value - first).div_(link.size)
    differences = differences.contiguous()
    link.all_reduce(differences)
    return first.add_(differences)


def write_whole(trainer: Resumable, path: Path) -> None:
    """Write the file of `Trainer.export`; collective."""
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"export writes {' or '.join(SUFFIXES)}, not {path.name!r}: name the file by one of them"
        )
    ranks = Ranks(trainer.link, trainer.device)
    if path.suffix == ".safetensors":
        ranks.from_first(_require_safetensors)
    values = whole_state(trainer, rank=0)
    ranks.from_first(lambda: _write(values, path))


def _require_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a .safetensors file needs the package safetensors: pip install safetensors, or name the file .pt"
        ) from error


def _write(values: Mapping[str, Tensor], path: Path) -> None:
    """Write a complete file or none, and replace an older one. Raises StoreError."""
    try:
        with replacing(path) as temporary:
            if path.suffix == ".safetensors":
                _save_safetensors(values, temporary)
            else:
                torch.save(dict(values), temporary)
    except Exception as error:  # torch and safetensors have their own errors for a full disk
        reason = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
        raise StoreError(f"cannot write {path}: {reason}: choose another path or free space") from error


def _save_safetensors(values: Mapping[str, Tensor], path: Path) -> None:
    """Write a tensor with several names once; the metadata have its other names, as `load_model` expects."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    tensors: dict[str, Tensor] = {}
    for name, value in sorted(values.items()):
        kept = first.setdefault(id(value), name)
        if kept == name:
            tensors[name] = value.contiguous()
        else:
            metadata[name] = kept
    save_file(tensors, path, metadata=metadata)
