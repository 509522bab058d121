"""The cell and the environment that tests start from: what a test is about is what it changes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.launch.campaign import CampaignContext, LaunchMaker
from harness.launch.starter import LocalStarter
from harness.launch.tally import Conditions, Tally
from harness.plan.expand import expand
from harness.plan.request import make_requests
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Limit, Machine
from results.cell import Cell
from results.environment import CodeVersion, Environment
from results.job import RunOptions
from results.launch import Launch
from results.network import Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence
from results.parts import ModelParts
from results.plan import Plan, Request
from results.record import StepColumns, Work
from workloads.catalog import WORKLOADS, facts

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


NETWORK_HERE = NetworkFacts(
    backend="gloo", device_name=_ENVIRONMENT.device_name, library=f"Gloo of torch {_ENVIRONMENT.torch}"
)
"""The network of runs of `a_cell` in `an_environment`."""


def a_network(
    facts: NetworkFacts = NETWORK_HERE, groups: Sequence[tuple[int, int]] = ((2, 1), (4, 2)), **fields: Any
) -> NetworkTable:
    """A table of (ranks, nodes) `groups`, over each of which 1 and 4 MiB take their bytes over 100 MB/s."""
    rows = tuple(
        Measurement.of((collective, size, ranks, nodes), size / 1e8, size / 2e8, size / 0.5e8, 9)
        for collective in ("all-reduce", "reduce-scatter")
        for ranks, nodes in groups
        for size in (2**20, 2**22)
    )
    base = {"source": "bench", "measured_at": "2026-01-02T03:04:05.000Z", "evidence": Evidence.MEASURED}
    return NetworkTable(**base | {"facts": facts, "measurements": rows} | fields)


def cell_of(**fields: Any) -> Cell:
    """The MLP on one CPU rank, which has the shortest arithmetic."""
    base = {"strategy": "single", "gpus": 1, "micro_batch": 256, "optimizer": "sgd:lr=0.05"}
    return a_cell(**base | fields)


def nano_cell(strategy: str, gpus: int, **fields: Any) -> Cell:
    """The smallest GPT with AdamW, 4 samples a replica."""
    base = {"workload": "gpt-nano", "micro_batch": 4, "optimizer": "adamw"}
    return a_cell(strategy=strategy, gpus=gpus, **base | fields)


def parts_of(workload: str) -> ModelParts:
    """The parts of a workload that states them."""
    parts = facts(WORKLOADS.parse(workload)).parts
    assert isinstance(parts, ModelParts)
    return parts


def a_request(options: StudyFile, *, machine_has_cuda: bool = False, source_folder: Path = Path()) -> Request:
    """The request of options that name one setting, on a machine without GPUs."""
    [request] = make_requests(options, machine_has_cuda=machine_has_cuda, source_folder=source_folder)
    return request


def request_of(*, machine_has_cuda: bool = False, **options: Any) -> Request:
    """`a_request` of the options of a study file."""
    return a_request(StudyFile(**options), machine_has_cuda=machine_has_cuda)


def plan_of(*, earlier: tuple[Plan, ...] = (), limit: Limit | None = None, **options: Any) -> Plan:
    """The plan of the options of a study file."""
    request = request_of(**options)
    return expand(request, study="s", created_at="2026-01-01T00:00:00Z", earlier=earlier, limit=limit)


def launch_of(plan: Plan, options: RunOptions | None = None, *, cores: int = 2) -> Launch:
    """The file of the only launch of a plan, on a machine with `cores` cores."""
    (planned,) = schedule(plan.cells, repeats=1, gpus_per_node=plan.request.gpus_per_node)
    code = CodeVersion(code_hash="c0de")
    around = CampaignContext(starter=LocalStarter(), checkout=Path(), code=code)
    maker = LaunchMaker(plan, options or RunOptions(), Machine(cores=cores, gpu_names=()), around)
    return maker.launch(planned, planned.cells, Tally(plan=plan, conditions=Conditions.elsewhere(code)))


def a_work(**fields: Any) -> Work:
    work = Work(
        samples=8,
        units=8,
        unit="images",
        parameters=1000,
        flops=3 * 10**9,
        exchange_payload_bytes=4000,
        exchange_operations=1,
    )
    return msgspec.structs.replace(work, **fields)


def steps_of(*losses: float | None) -> StepColumns:
    phases = ("step", "data", "forward", "backward", "optimizer")
    return StepColumns(loss=list(losses), **{f"{name}_ns": [0] * len(losses) for name in phases})
