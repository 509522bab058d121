"""Describe the model that a workload's code built, so that runs of unlike programs are not pooled."""

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
    """Describe `module`, which this rank built from the workload's text and no strategy has changed yet."""
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
    """Type and shape in a form such as `float32 64x16`."""
    shape = "unknown" if is_lazy(tensor) else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
