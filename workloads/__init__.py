"""The models that are trained: their families, their data and their FLOPs.

`workloads.catalog`, each family's package and `workloads.source` describe them without importing torch. The
names that a user's own model file needs are here, and import torch only when they are asked for::

    from workloads import Choice, ImageInput, TokenInput, Workload
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.batch import Batch
    from workloads.choices import Choice
    from workloads.workload import DataShare, ImageInput, TokenInput, Workload

__all__ = ["Batch", "Choice", "DataShare", "ImageInput", "TokenInput", "Workload"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"Batch": "batch", "Choice": "choices"}.get(name, "workload")
    return getattr(import_module(f"workloads.{home}"), name)
