"""Activation checkpointing of a model's blocks: their forward runs again in backward, to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from results.errors import UsageError
from results.layout import ModelLayout


def checkpoint_blocks(module: nn.Module, layout: ModelLayout) -> None:
    """Make every block of `layout` recompute its activations in backward, in place.

    The random state is kept, so that dropout is the same both times, and running statistics of BatchNorm
    are updated once, as without checkpointing. The blocks' own `forward` is replaced rather than the block
    wrapped, so that parameter names stay.
    """
    if not layout.blocks:
        raise UsageError("activation checkpointing needs a model whose layout names its blocks")
    for name in layout.blocks:
        block = module.get_submodule(name)
        norms = [part for part in block.modules() if isinstance(part, _BatchNorm)]
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, norms)
        )


def _contexts(norms: list[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the forward, and of its repetition in backward."""
    return nullcontext(), _without_updating(norms)


@contextmanager
def _without_updating(norms: list[_BatchNorm]) -> Iterator[None]:
    """Running statistics stay: a weight of 0 for the new batch, and the count of batches put back.

    They are not turned off: the repetition must save as many tensors for backward as the forward did.
    """
    before = [(norm, norm.momentum, _clone(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and batches is not None:
                norm.num_batches_tracked.copy_(batches)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
