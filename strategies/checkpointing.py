"""Activation checkpointing of a model's blocks: their forward runs again in backward, to save memory."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from results.errors import UsageError
from results.layout import ModelLayout


def checkpoint_blocks(module: nn.Module, layout: ModelLayout) -> None:
    """Make every block of `layout` recompute its activations in backward, in place.

    The random state is kept, so that dropout is the same both times. The blocks' own `forward` is
    replaced rather than the block wrapped, so that parameter names stay.
    """
    if not layout.blocks:
        raise UsageError("activation checkpointing needs a model whose layout names its blocks")
    for name in layout.blocks:
        block = module.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
