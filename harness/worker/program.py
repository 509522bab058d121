"""What a workload's code built: the part of a run's record that tells unlike programs apart."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import chain
from pathlib import Path

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from results.environment import Program
from workloads.catalog import WORKLOADS, facts
from workloads.source import imported_distributions, opened_files


def program_of(module: nn.Module, workload: str, source_folder: Path | None) -> Program:
    """Of a module that no strategy has changed yet, built on this rank from the workload's text."""
    tensors = {name: _shape(each) for name, each in chain(module.named_parameters(), module.named_buffers())}
    spec = WORKLOADS.parse(workload)
    known, folder = facts(spec), (source_folder or Path.cwd()).resolve()
    return Program(
        names_hash=hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()[:16],
        tensors=dict(Counter(tensors.values())),
        modules=dict(Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in module.modules())),
        distributions=imported_distributions(known.builder, folder) if known.own_code else {},
        files=opened_files(known.builder, folder) if known.own_code else {},
    )


def _shape(tensor: Tensor) -> str:
    """Such as `float32 64x16`."""
    shape = "unknown" if is_lazy(tensor) else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
