"""The cell and the environment that tests start from: what a test is about is what it changes of them."""

from __future__ import annotations

from typing import Any

import msgspec

from results.cell import Cell
from results.environment import CodeVersion, Environment

_CELL = {
    **{"workload": "mlp", "dataset": "synthetic", "strategy": "ddp", "gpus": 2, "micro_batch": 8},
    **{"device": "cpu", "backend": "gloo", "optimizer": "sgd"},
}
_ENVIRONMENT = Environment(
    host="node-a",
    os="Linux 6.1",
    python="3.11.7",
    torch="2.13.0",
    device_name="Example CPU",
    device_memory_bytes=8 * 2**30,
    cpu_model="Example CPU",
    cores=8,
    threads=1,
    code=CodeVersion(code_hash="c0de", commit="abc1234", dirty=False),
)


def a_cell(**fields: Any) -> Cell:
    """The MLP on two CPU ranks with DDP, or what `fields` make of it."""
    return Cell(**_CELL | fields)


def an_environment(**facts: Any) -> Environment:
    """One rank of a CPU host, or what `facts` make of it."""
    return msgspec.structs.replace(_ENVIRONMENT, **facts)
