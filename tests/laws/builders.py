"""The cell and the environment that tests start from: what a test is about is what it changes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness.plan.request import make_requests
from harness.plan.study_file import StudyFile
from results.cell import Cell
from results.environment import CodeVersion, Environment
from results.plan import Request

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


def a_request(options: StudyFile, *, machine_has_cuda: bool = False, source_folder: Path = Path()) -> Request:
    """The request of options that name one setting, on a machine without GPUs."""
    [request] = make_requests(options, machine_has_cuda=machine_has_cuda, source_folder=source_folder)
    return request
