"""Where a model's parameters belong that is sharded block by block."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from results.layout import ModelLayout


def homes_of(module: nn.Module, layout: ModelLayout) -> dict[nn.Parameter, set[str]]:
    """The names of the blocks that have each parameter, and `""` for what is around the blocks."""
    homes: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        homes[parameter].add(next((block for block in layout.blocks if name.startswith(f"{block}.")), ""))
    return homes
