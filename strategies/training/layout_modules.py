"""The modules of a model that its layout names, and those that some strategies do not take."""

from __future__ import annotations

from torch import nn

from results.errors import UsageError, nearest


def layout_module(module: nn.Module, name: str) -> nn.Module:
    """What a layout calls `name`. Raises UsageError, with the way out, if it is no module of the model."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        if any(name == known for known, _ in module.named_parameters()):
            found = "a parameter: put it into a module of its own, and name that"
        else:
            found = f"no module of the model{nearest(name, (known for known, _ in module.named_modules()))}"
        raise UsageError(f"the layout names {name!r}, which is {found}") from None


def sparse_parts(module: nn.Module) -> list[str]:
    """The embeddings of a model that ask for sparse gradients."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse]


def require_dense(module: nn.Module, what: str, instead: str) -> None:
    """Raise UsageError, with `instead` as the way out, for a model with sparse gradients, which `what` does
    not take."""
    for name in sparse_parts(module):
        raise UsageError(f"{what} has no sparse gradients, as {name} asks for: {instead}")
