"""A launch from inside: the workers start once, join one process group, and run cell after cell."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from harness.machine.code import checkout, code_hash, require_planned_packages
from harness.machine.device import ONLY_NVIDIA, gpu_faults, gpu_warnings, visible_gpus
from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.rank.context import RankContext, Run, device_uuid, nccl_version
from harness.worker.rank.control import Control
from harness.worker.rank.log import RankLog, Watchdog, bound_output, mark_run, output_files
from harness.worker.rank.network import log_network, name_interface, write_recording
from harness.worker.rank.process import (
    STOPPED,
    fork_obstacle,
    fragmented,
    import_for,
    keep_imports,
    run_of_this_process,
    tear_down,
)
from harness.worker.rank.rank import Rank
from harness.worker.run import measure_cell
from results.errors import MachineError
from results.features import kind_named
from results.launch import Launch, Slot, flight_path, nccl_log_path, rank_log_path
from results.outcome import Evidence, Outcome
from results.registry import load
from results.schemas import LAUNCH
from results.store import Study
from strategies.devices import StreamedDevice, device_of

LEEWAY_S = 60.0
"""A collective times out this much later than the supervisor, so that the supervisor is the one that ends a
hang: it can name the rank that lags."""
STARTS_AFRESH = {
    Outcome.OUT_OF_MEMORY,
    Outcome.CRASHED,
    Outcome.PROOF_FAILED,
    Outcome.SKIPPED,
    Outcome.HUNG,
    Outcome.CANCELLED,
}
"""Outcomes after which the process is not trusted with another cell."""


def work(launch_path: Path, rank: Rank, *, pinned: tuple[int, ...], cores: tuple[int, ...]) -> int:
    """Run the cells of a launch on this rank. Returns the process's exit code: 0 if all were ok."""
    launch = LAUNCH.read(launch_path)
    if code_hash(checkout()) != launch.code.code_hash:
        raise MachineError(
            f"the code of bench on {platform.node()} is not what this launch was planned with: run the same "
            f"command again"
        )
    study = Study(launch_path.parents[2])
    require_planned_packages(launch.code, [study.cell(slot.cell_id) for slot in launch.slots], launch.order)
    torch.set_num_threads(launch.threads)
    slots, kept_whole = launch.slots, None
    if launch.forks:
        import_for([study.cell(slot.cell_id) for slot in slots], launch.source_folder)
        kept_whole = fork_obstacle()
        mine = slots[0] if kept_whole else run_of_this_process(slots)
        if isinstance(mine, int):
            return mine
        slots = (mine,)
    # The first thread: a rank that forks has none.
    bound_output()
    # Measured before this process itself uses the machine.
    busy = _warnings(launch, rank)
    device = _device(launch, rank)
    folder = launch_path.parent
    record = partial(write_recording, flight_path(folder, rank.rank), launch.backend)
    log = RankLog(rank_log_path(folder, rank.rank), rank.rank, Watchdog(launch.silence_s, record))
    # From here on ranks wait for each other.
    log.event("joining", **output_files(folder))
    timeout = timedelta(seconds=launch.silence_s + LEEWAY_S)
    network_log = None
    if launch.backend == "nccl":
        network_log = log_network(os.environ, nccl_log_path(folder, rank.rank))
    exchange = _join(launch, device, slots[0].run_id if slots else launch.launch_id, timeout)
    with ExitStack() as stack:
        stack.callback(log.close)
        around = RankContext(
            study=study,
            launch=launch,
            evidence=_evidence(launch, rank, device, cores),
            rank=rank,
            device=device,
            cores=cores,
            pinned=pinned,
            exchange=exchange,
            control=Control(device, exchange.backend),
            log=log,
            warnings=busy,
            network_log=network_log,
            forked=launch.forks and kept_whole is None,
            faults=stack.enter_context(gpu_faults(device_uuid(device))) if device.type == "cuda" else None,
        )
        if kept_whole is not None:
            log.event("not forked", reason=kept_whole)
        log.event("ready", gpus=rank.gpus)
        return _run_slots(study, around, slots)


def _warnings(launch: Launch, rank: Rank) -> tuple[str, ...]:
    """Warnings of what would distort this rank's figures; the launch itself warns of the first node."""
    if launch.device == "cpu" or rank.node_rank == 0:
        return ()
    own = visible_gpus()[rank.local_rank : rank.local_rank + 1]
    return tuple(f"on {platform.node()}: {warning}" for warning in gpu_warnings(own))


def _join(launch: Launch, device: torch.device, meeting: str, timeout: timedelta) -> ExchangeGroup:
    """The exchange over the launch's backend, and the default group, over which the ranks agree; collective.

    `meeting` is a name that earlier processes of this launch have not used: all share torchrun's store.

    The default group is Gloo's on every device, so that an agreement takes no memory and no stream of the
    device, and still works when the device has failed. NCCL moves only the exchange.

    No group is bound to a device (`device_id`). A bound NCCL group is eager: it has one communicator, in
    which a send or a receive waits for all operations that were issued before it, so that two stages of a
    pipeline that send to each other wait forever; and a new group splits that communicator, in a call that
    its members and all other ranks must make equally often. An unbound ProcessGroupNCCL connects at the first
    collective, on the current device, and has a communicator and a stream for every pair of ranks that send
    to each other.
    """
    name_interface(os.environ, launch.placement.nodes)
    store, number, ranks = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(meeting, store)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=timeout)
    if launch.backend == "nccl":
        versions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(versions, (platform.node(), nccl_version()))
        require_one_nccl(versions)
    kind = device_of(device)
    staged_for = kind if launch.backend == "gloo" and isinstance(kind, StreamedDevice) else None
    name = nccl_name() if launch.backend == "nccl" else launch.backend
    return open_exchange(timeout, backend=name, staged_for=staged_for)


def nccl_name() -> str:
    """The name by which this torch builds ProcessGroupNCCL.

    torch 2.14 added ProcessGroupNCCL2, which `nccl` builds from 2.15 on. It is bound to a device, and has one
    communicator and one stream for collectives, sends and receives. From 2.14 on `nccl-legacy` builds the
    class that `nccl` built before.
    """
    return "nccl-legacy" if hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL2") else "nccl"


def require_one_nccl(versions: Sequence[tuple[str, str]]) -> None:
    """Raise MachineError if the ranks have several versions: such ranks do not connect, and only their logs
    say so. `versions` has the host and the version of every rank."""
    hosts: dict[str, set[str]] = {}
    for host, version in versions:
        hosts.setdefault(version, set()).add(host)
    if len(hosts) > 1:
        found = ", ".join(f"{version} ({', '.join(sorted(where))})" for version, where in hosts.items())
        raise MachineError(
            f"the nodes have different versions of NCCL: {found}; install the same torch on all of them"
        )


def _run_slots(study: Study, around: RankContext, slots: Sequence[Slot]) -> int:
    keep_imports()
    stopped = False
    for slot in slots:
        outcome, stopped = _run_slot(study, around, slot)
        if outcome in STARTS_AFRESH:
            # Other ranks may wait in a collective that this one will never join: do not destroy the group.
            return 1
        if stopped:
            break
    around.log.event("finished")
    dist.destroy_process_group()
    return STOPPED if stopped and around.forked else 0


def _run_slot(study: Study, around: RankContext, slot: Slot) -> tuple[Outcome, bool]:
    """Run one slot and write its record. Returns the outcome and whether the launch is to end after it."""
    if study.rank_path(slot.cell_id, slot.run_id, around.rank.rank).exists():
        around.log.event("done before", run=slot.run_id)
        return Outcome.OK, False
    mark_run(slot.run_id)
    around.log.event("run", run=slot.run_id, cell=slot.cell_id, repeat=slot.repeat)
    study.start_run(slot.cell_id, slot.run_id)
    run, launch = Run(around, slot, study.cell(slot.cell_id)), around.launch
    work: Callable[[Run], None] = measure_cell
    if launch.order is not None:
        work = partial(load(kind_named(launch.order.kind).work), values=launch.order.values)
    record = run.execute(work)
    study.add_rank_record(record)
    around.log.event("recorded", run=slot.run_id, outcome=record.outcome, reason=record.reason)
    if record.outcome in STARTS_AFRESH:
        return record.outcome, True
    if around.forked:
        # A forked process ends after this run. Later repeats rely on the proof of the first one.
        reason = None if record.outcome is Outcome.OK else "the run failed"
    else:
        tear_down(around.device)
        reason = _unfit(run, around)
    stops = bool(around.control.largest([float(reason is not None)])[0])
    if stops:
        around.log.event("stopped", reason=f"{reason or 'another rank says so'}; the rest starts afresh")
    return record.outcome, stops


def _unfit(run: Run, around: RankContext) -> str | None:
    """Return why this process, which was not forked, runs no other slot after `run`; None if it may."""
    if around.launch.forks:
        return "this process was not forked"
    if (run.model is not None and run.model() is not None) or fragmented(around.device):
        return "the last run left memory behind"
    return None


def _evidence(launch: Launch, rank: Rank, device: torch.device, cores: tuple[int, ...]) -> Evidence:
    """The launch's evidence, or `emulated` where its ranks turn out to share cores or a GPU, or its nodes a
    host.

    Raises MachineError where ranks share a GPU and NCCL, which cannot do that, exchanges.
    """
    own = device_uuid(device) if device.type == "cuda" else str(rank.rank)
    places: list[tuple[str, str] | None] = [None] * rank.gpus
    dist.all_gather_object(places, (platform.node(), own))
    virtual_nodes = len({place[0] for place in places if place}) < launch.placement.nodes
    shared = len(set(places)) < rank.gpus
    if shared and launch.backend == "nccl":
        raise MachineError(shared_gpu(os.environ.get("CUDA_VISIBLE_DEVICES", ""), rank.local_gpus))
    crowded = launch.device == "cpu" and rank.local_gpus * launch.threads > len(cores)
    return Evidence.EMULATED if crowded or shared or virtual_nodes else launch.evidence


def shared_gpu(visible: str, ranks: int) -> str:
    """Say that the `ranks` ranks of a node share a GPU, and what to do. `visible` is what CUDA may use."""
    parts = visible.count("MIG-")
    if parts > 1:
        return (
            f"CUDA_VISIBLE_DEVICES has {parts} parts of a GPU (MIG), and a process uses only the first, so "
            f"that {ranks} ranks share it: give --gpus-per-node 1, whole GPUs, or --backend gloo"
        )
    return (
        f"several of the {ranks} ranks of a node have the same GPU, and NCCL takes one rank a GPU: ask for "
        f"as many GPUs as ranks, or give --backend gloo, whose figures are emulated"
    )


def _device(launch: Launch, rank: Rank) -> torch.device:
    if launch.device == "cpu":
        return torch.device("cpu")
    if torch.version.hip is not None:
        raise MachineError(
            f"torch {torch.__version__} is built for AMD GPUs; {ONLY_NVIDIA}: use --device cpu"
        )
    # Several ranks of a GPU, where that was asked for (`--oversubscribe`).
    device = torch.device("cuda", rank.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
