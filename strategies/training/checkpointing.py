"""Activation checkpointing of a model's blocks: their forward runs again in backward, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.training.layouts import layout_module

_aten = torch.ops.aten
_PRODUCTS = {
    operation.default
    for operation in (
        _aten.mm,
        _aten.bmm,
        _aten.addmm,
        _aten._scaled_mm,
        _aten.convolution,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    )
}
"""The operations that take most of a block's time."""


def checkpoint_blocks(module: nn.Module, layout: ModelLayout, *, selective: bool = False) -> None:
    """Make every block of `layout` recompute its activations in backward, in place; if `selective`, only
    those that are not results of matrix products, convolutions or attention.

    The random state is restored for the recomputation, so that dropout is the same both times. The running
    statistics of BatchNorm are updated once, as without checkpointing. The `forward` of a block is replaced,
    and the block is not wrapped, so that parameters keep their names.
    """
    if not layout.blocks:
        raise UsageError("activation checkpointing needs a model whose layout names its blocks")
    for name in layout.blocks:
        block = layout_module(module, name)
        norms = [part for part in block.modules() if isinstance(part, _BatchNorm)]
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, norms, selective)
        )


def wrap_forward(block: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a block computes, and computes again in backward if it is checkpointed."""
    forward = block.forward
    if isinstance(forward, partial) and forward.func is checkpoint:
        block.forward = partial(checkpoint, wrap(forward.args[0]), **forward.keywords)
    else:
        block.forward = wrap(forward)


Context = AbstractContextManager[Any]


def _contexts(norms: list[_BatchNorm], selective: bool) -> tuple[Context, Context]:
    """Return the contexts of the forward pass, and of its repetition in backward."""
    if not selective:
        return nullcontext(), _without_updating(norms, nullcontext())
    first, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return first, _without_updating(norms, again)


def _policy(context: object, operation: object, *arguments: object, **named: object) -> CheckpointPolicy:
    # "Prefer": a compiler may know better.
    return CheckpointPolicy.PREFER_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _without_updating(norms: list[_BatchNorm], inside: Context) -> Iterator[None]:
    """Keep running statistics as they are: the new batch has a weight of 0, and the count of batches is
    restored.

    They are not switched off, as the repetition must save as many tensors for backward as the forward pass.
    """
    before = [
        (norm, norm.momentum, None if (count := norm.num_batches_tracked) is None else count.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        # Saving and restoring the statistics must not be recorded as operations of the block.
        with inside:
            yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and batches is not None:
                norm.num_batches_tracked.copy_(batches)
