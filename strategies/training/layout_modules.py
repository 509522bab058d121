"""The modules of a model that its layout names."""

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
