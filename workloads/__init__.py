"""What is trained: the model families, the data they see and the FLOPs they cost.

`workloads.catalog`, each family's `shape` and `workloads.source` say what there is without importing torch.
What a user's own model file needs is here by name, and imports torch only when it is asked for::

    from workloads import ImageInput, TokenInput, Workload
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.batch import Batch
    from workloads.own_data import DataShare
    from workloads.workload import ImageInput, TokenInput, Workload

__all__ = ["Batch", "DataShare", "ImageInput", "TokenInput", "Workload"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"Batch": "workloads.batch", "DataShare": "workloads.own_data"}
    return getattr(import_module(homes.get(name, "workloads.workload")), name)
