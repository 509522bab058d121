"""The repeated blocks of a model whose layout nobody gave, found by the containers that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from results.layout import ModelLayout
from strategies.training.homes import homes_of

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They are not called, but what they hold is."""


def found_layout(module: nn.Module) -> ModelLayout:
    """The layout of a model with no other parts named than its blocks; none where it has no like ones.

    Blocks are children of one class, with parts and parameters of their own, in an `nn.ModuleList` or an
    `nn.Sequential`, at least two of them, in the order in which they are registered. A block within a block
    is none. Where a parameter occurs in several blocks, or in one and around them, no block is taken.
    """
    layout = ModelLayout(blocks=tuple(_blocks(module, "")))
    shared = any(len(homes) > 1 for homes in homes_of(module, layout).values())
    return ModelLayout() if shared else layout


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    """`path` is the module's own name, with a dot after it."""
    like: set[nn.Module] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        parts = [part for part in module.children() if _is_whole(part)]
        classes = Counter(type(part) for part in parts)
        like = {part for part in parts if classes[type(part)] > 1}
    for name, part in module.named_children():
        if part in like:
            yield f"{path}{name}"
        else:
            yield from _blocks(part, f"{path}{name}.")


def _is_whole(part: nn.Module) -> bool:
    """Whether a module is called, and made of others."""
    trained = any(True for _ in part.parameters())
    return trained and not isinstance(part, _HOLDERS) and any(True for _ in part.children())
