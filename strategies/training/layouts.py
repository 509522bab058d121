"""The parts of a model that its layout names: their modules and parameters, and parts that some strategies do
not take. The repeated blocks of a model without a layout are found by their containers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from results.errors import UsageError, nearest
from results.layout import ModelLayout
from strategies.advice import ANY_PARAMETER

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that are not called, while their members are."""


def layout_module(module: nn.Module, name: str) -> nn.Module:
    """Return the module that a layout calls `name`. Raises UsageError, with advice, if the model lacks it."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        if any(name == known for known, _ in module.named_parameters()):
            found = "a parameter: put it into its own module, and name that"
        else:
            found = f"no module of the model{nearest(name, (known for known, _ in module.named_modules()))}"
        raise UsageError(f"the layout names {name!r}, which is {found}") from None


def sparse_parts(module: nn.Module) -> list[str]:
    """Return the names of a model's embeddings with sparse gradients."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse]


def require_dense(module: nn.Module, what: str, instead: str) -> None:
    """Raise UsageError, with the advice `instead`, for a model with sparse gradients, which `what` does not
    take."""
    for name in sparse_parts(module):
        raise UsageError(f"{what} does not support sparse gradients, which {name} has: {instead}")


def require_unhooked(named: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise UsageError for a parameter with hooks, which a strategy loses that makes new parameters."""
    for name, parameter in named:
        later = getattr(parameter, "_post_accumulate_grad_hooks", None)
        for hook in (*(parameter._backward_hooks or {}).values(), *(later or {}).values()):
            code = getattr(hook, "__code__", None)
            line = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""
            raise UsageError(f"{what} replaces parameters, and {name} has a hook{line}: {ANY_PARAMETER}")


def homes_of(module: nn.Module, layout: ModelLayout) -> dict[nn.Parameter, set[str]]:
    """Return the names of the blocks that have each parameter; `""` is the unit around the blocks.

    A model that is sharded block by block has its parameters in these units.
    """
    homes: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        homes[parameter].add(next((block for block in layout.blocks if name.startswith(f"{block}.")), ""))
    return homes


def found_layout(module: nn.Module) -> ModelLayout:
    """Return a layout of a model with only its blocks; without blocks if the model repeats no module.

    Blocks are at least two children of one class that contain modules and parameters, in an `nn.ModuleList`
    or an `nn.Sequential`, in the order in which they are registered. A block within a block does not count.
    If a parameter occurs in several blocks, or in one and around them, the layout has no blocks.
    """
    layout = ModelLayout(blocks=tuple(_blocks(module, "")))
    shared = any(len(homes) > 1 for homes in homes_of(module, layout).values())
    return ModelLayout() if shared else layout


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of the blocks in `module`; `path` is its own name, with a dot after it."""
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
    """Return whether a module is called, has parameters, and contains other modules."""
    trained = any(True for _ in part.parameters())
    return trained and not isinstance(part, _HOLDERS) and any(True for _ in part.children())
