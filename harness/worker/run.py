"""One run of one cell on this rank, from a fresh model to a rank record."""

from __future__ import annotations

import platform
import time
import traceback
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import torch

from harness.worker.cell.memory import MemoryLimit, MemoryUse
from harness.worker.cell.sampler import Draws
from harness.worker.cell.setup import CellSetup, program_of, seed_step
from harness.worker.exchange.recorder import TooManyOperationsError
from harness.worker.measure.blocks import Measured, Stopwatch
from harness.worker.measure.clock import FirstStep, step_clock
from harness.worker.measure.link_peak import measure_link_peak
from harness.worker.measure.profiler import LONGEST_PERIOD, attach_profiler, traced_steps, write_trace
from harness.worker.measure.scalars import live_scalars
from harness.worker.measure.telemetry import sampler
from harness.worker.proof.compilation import Compilation, require_compiled
from harness.worker.proof.fingerprints import compare_random_state
from harness.worker.proof.proof import (
    LateProof,
    first_steps,
    prove,
    prove_late,
    take_first_steps,
)
from harness.worker.proof.uses import (
    Demand,
    UseCounter,
    Watched,
    other_collective,
    other_traffic,
    whole_state,
)
from harness.worker.rank.context import Ending, PartialRecord, RankContext
from harness.worker.rank.control import parameters_hash
from harness.worker.rank.failure import ProofFailedError, classify
from harness.worker.rank.network import read_transports, unused_fabric
from harness.worker.rank.process import free_memory, tune_kernels
from harness.worker.rank.usage import ForeignCpu, reset_rss_peak
from harness.worker.turns import PROTOCOL, Turns
from results.cell import Cell
from results.environment import Program, unlike_facts
from results.errors import BenchError
from results.groups import GroupLayout
from results.launch import Slot
from results.outcome import Outcome
from results.proof_limits import LATE_SHARE, LONGEST_S
from results.record import Proof, ProofMethod, RankRecord, Work
from results.recorded import KernelTimes
from results.store import utc_now
from results.training import Training
from strategies.catalog import COLLECTIVES, STRATEGIES
from strategies.devices import device_of
from strategies.training.found_layout import found_layout
from strategies.training.trainer import Trainer
from workloads.catalog import WORKLOADS, facts
from workloads.datasets.facts import DATASETS, Own
from workloads.flops import count_parts
from workloads.workload import Workload

FEWER_WARM_UP_STEPS = 10
"""Most steps of the warm-up on CPU in a run that a driver wants for its blocks. On a busy machine no two
blocks are alike, so that each run would take all of the policy's steps."""
ONLY_TIMED = "a later pair of a paired comparison: only its blocks are timed"


class RunInProgress:
    """A run in progress; its record has all that was found before it failed."""

    def __init__(self, around: RankContext, slot: Slot, cell: Cell) -> None:
        self._around = around
        self._slot = slot
        self._cell = cell
        self._found = PartialRecord(clock="monotonic", spent_ns={})
        self._absent: dict[str, str] = {}
        self._started_at = utc_now()
        self._parameters = 0
        self._forward_flops: float | None = None
        """FLOPs of the forward pass of one sample, counted; None: not counted."""
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._foreign: ForeignCpu | None = None
        """CPU that other processes use, from the first timed block to the last recorded one."""
        self._uses = UseCounter()
        self._watched = Watched()
        self._compilation = Compilation(cell, around.device)
        self._part: tuple[str, int] | None = None
        """The part of the run that goes on, and the clock when it began."""
        self._turns: Turns | None = None
        self._shared: str | None = None
        """A warning where replicas read the same batches."""
        self._program: Program | None = None
        self._transports: list[str] = []
        """What NCCL moves data by, on any rank."""

    def execute(self) -> RankRecord:
        """Run the cell. An exception becomes an outcome in the record, never more."""
        try:
            self._turns = Turns.of_driver(self._around.log.heartbeat)
            self._execute()
        except (Exception, SystemExit) as error:
            # The border of a run: whatever a workload or a strategy raises is this cell's outcome.
            traceback.print_exc()
            outcome, reason = classify(error)
            self._around.log.event("failed", outcome=outcome, reason=reason)
            return self._record(outcome, reason)
        finally:
            if self._turns is not None:
                self._turns.close()
        return self._record(Outcome.OK, None)

    @property
    def model_is_gone(self) -> bool:
        """Whether the model of this run has been freed."""
        return self._model is None or self._model() is None

    @property
    def _only_timed(self) -> bool:
        """Whether a driver wants this run for its blocks alone."""
        return self._turns is not None and self._turns.only_timed

    def _begin(self, part: str) -> None:
        """Say in the log that a part of the run begins, and end the part before it."""
        self._end_part()
        self._part = part, time.perf_counter_ns()
        self._around.log.event(part)

    def _end_part(self) -> None:
        if self._part is not None:
            part, began = self._part
            self._found["spent_ns"][part] = time.perf_counter_ns() - began

    def _execute(self) -> None:
        around, cell = self._around, self._cell
        if self._turns is not None:
            self._await_turn(self._turns)
        self._begin("build")
        # First, so that the groups of the cell before are not taken for idle memory.
        around.exchange.reset()
        # Likewise: what the profiler takes is the idle worker's, in the first cell as in later ones.
        attach_profiler(around.device)
        memory = MemoryUse(around.device)
        setup = CellSetup(
            cell=cell,
            rank=around.rank,
            device=around.device,
            source_folder=around.source_folder,
            memory=MemoryLimit(cell.memory_limit_mb, around.device),
        )
        # What comes after the measured steps keeps copies of its own, and none of it is the strategy's.
        with setup.memory.kept():
            trainer, batches, watch = self._train(setup)
        self._found["memory"] = memory.record()
        if self._only_timed:
            self._absent |= dict.fromkeys(("quads", "recorded", "buckets", "link_peak"), ONLY_TIMED)
        else:
            self._measure_exposed(watch)
            self._record_exchange(watch, trainer.model.period, setup.groups)
        if self._foreign is not None:
            self._found["foreign_cpu_cores"] = self._foreign.cores_used()
        self._begin("hash")
        trainer.model.settle()
        if STRATEGIES.facts(cell.strategy).promise.all_equal:
            self._found["parameters_hash"] = parameters_hash(trainer)
        else:
            self._absent["parameters_hash"] = f"{cell.strategy} does not keep all replicas equal"
        self._add_losses_to_a_weaker_proof()
        if not self._only_timed:
            self._trace(trainer, batches)
        self._prove_late(setup, trainer, batches)

    def _await_turn(self, turns: Turns) -> None:
        """Wait until the run of the other side of a paired comparison is quiet."""
        around = self._around
        around.log.event("waiting")
        turns.wait(
            "begin",
            protocol=PROTOCOL,
            cell=self._cell.id,
            run=self._slot.run_id,
            rank=around.rank.rank,
            gpus=around.rank.gpus,
            cores=around.cores,
            repeat=self._slot.repeat,
            forked=around.forked,
            only_timed=True,
        )

    def _train(self, setup: CellSetup) -> tuple[Trainer, Draws, Stopwatch]:
        """Build the cell, prove it, and measure its steps."""
        around = self._around
        began = time.perf_counter_ns()
        tune_kernels(around.device)
        workload = setup.workload()
        self._program = program_of(workload.module, self._cell.workload, around.source_folder)
        self._model = weakref.ref(workload.module)
        # Counted while it is whole: a strategy may leave this rank a part of it.
        self._parameters = sum(parameter.numel() for parameter in workload.module.parameters())
        batches = setup.batches(workload, setup.replica)
        # A strategy may leave a part of the model.
        layout = found_layout(workload.module) if workload.layout is None else workload.layout
        trainer = setup.trainer(workload, around.exchange)
        trainer.loss = self._uses.counted(trainer.loss, workload.count)
        self._uses.watch(trainer.optimizer)
        strategy = STRATEGIES.facts(self._cell.strategy)
        self._found |= {
            "setup_ns": time.perf_counter_ns() - began,
            "period": trainer.model.period,
            "training": Training(
                differences=strategy.differences,
                averages_all_gradients=strategy.promise.averages_all_gradients(strategy.promise.after),
                exchanges_by_nodes=COLLECTIVES.facts(self._cell.collective).by_nodes,
            ),
        }
        with nullcontext() if self._cell.compile else self._watched.watching(trainer, layout.blocks):
            self._prove(setup, trainer, batches)
        if not self._cell.compile:
            self._require(self._watched.missed(self._cell, around.rank.rank, setup.groups))
        clock = step_clock(around.device)
        watch = Stopwatch(trainer, batches, clock=clock, control=around.control, log=around.log)
        self._found["clock"] = clock.name
        with live_scalars(self._scalars_folder()) as scalars:
            watch.after_block = scalars.write
            self._measure(watch, setup, trainer, workload)
        self._absent |= scalars.absent
        return trainer, batches, watch

    def _scalars_folder(self) -> Path | None:
        around = self._around
        if not around.launch.tensorboard:
            return None
        return around.study.scalars_folder(around.launch.launch_id, around.rank.rank, self._cell.id)

    def _trace(self, trainer: Trainer, batches: Draws) -> None:
        """Further steps under the profiler; last of all, so that nothing measured comes after them."""
        around = self._around
        if not any(rank < around.rank.gpus for rank in around.launch.trace):
            return
        self._begin("trace")
        rank = around.rank.rank
        profiler = traced_steps(trainer, batches, around.control, keep=rank in around.launch.trace)
        if profiler is not None:
            path = around.study.trace_path(self._cell.id, self._slot.run_id, rank)
            self._absent |= write_trace(profiler, path)

    def _measure_exposed(self, watch: Stopwatch) -> None:
        around, policy = self._around, self._cell.steps
        if around.rank.gpus > 1 and policy.quads:
            self._begin("exposed")
            self._found["quads"] = watch.measure_exposed(around.exchange, policy)
        else:
            self._absent["quads"] = (
                "one rank exchanges nothing" if around.rank.gpus == 1 else "not asked for (quads: 0)"
            )

    def _record_exchange(self, watch: Stopwatch, period: int, groups: GroupLayout) -> None:
        """Record the operations of the exchange and measure the network's peak, after the timed blocks."""
        around = self._around
        if around.rank.gpus == 1:
            self._absent |= dict.fromkeys(("recorded", "buckets", "link_peak"), "one rank exchanges nothing")
            return
        self._begin("recording")
        try:
            recorded = watch.record(around.exchange, around.device)
        except TooManyOperationsError as error:
            self._absent["recorded"] = str(error)
        else:
            node_size = self._cell.node_size or around.rank.local_gpus
            self._require(other_collective(self._cell, node_size, recorded.operations))
            kernels = self._kernels(watch, period) if around.device.type == "cuda" else None
            self._found["recorded"] = msgspec.structs.replace(recorded, kernels=kernels)
        assert watch.buckets is not None
        self._found["buckets"], unknown = watch.buckets.counted(groups)
        if unknown is not None:
            self._absent["buckets"] = unknown
        self._found["link_peak"] = measure_link_peak(
            around.control,
            around.device,
            ranks=around.rank.gpus,
            link_mbit_per_s=self._cell.link_mbit_per_s,
        )
        if around.launch.backend == "nccl":
            own = [] if around.network_log is None else read_transports(around.network_log)
            self._transports = around.control.union(own)

    def _kernels(self, watch: Stopwatch, period: int) -> KernelTimes | None:
        if period > LONGEST_PERIOD:
            self._absent["kernels"] = f"a period of {period} steps is too long to profile"
            return None
        kernels = watch.profile(self._around.device)
        if kernels is None:
            self._absent["kernels"] = "the profiler saw no kernel"
        return kernels

    def _prove(self, setup: CellSetup, trainer: Trainer, batches: Draws) -> None:
        around, unproven = self._around, STRATEGIES.facts(self._cell.strategy).promise.unproven
        first = FirstStep(around.control.synchronize)
        if unproven is not None:
            self._absent["proof"] = f"{self._cell.strategy} is declared to be without a proof: {unproven}"
        elif self._proven_before():
            detail = f"run {self._slot.proved_by} of this cell was proven"
            self._found["proof"] = Proof(method="earlier-run", passed=True, detail=detail)
        if unproven is not None or "proof" in self._found:
            self._begin("first steps")
            with self._compilation.watched(trainer.model.bare):
                take_first_steps(setup, trainer, batches, around.log.heartbeat, first)
        else:
            self._begin("proof")
            with self._compilation.reproducible(trainer.model.bare):
                proof = prove(setup, trainer, batches, around.control, around.log.heartbeat, first)
            self._shared = batches.shared
            if around.rank.rank == 0:
                self._found["proof"] = proof
            if not proof.passed:
                raise ProofFailedError(proof.detail)
        self._found |= {"first_step_ns": first.ns, "first_steps": len(first_steps(trainer.model))}
        # Proven or not, a cell's runs go on from the same parameters, data and random state.
        begins = len(first_steps(trainer.model))
        seed_step(self._cell.seed, begins, setup.replica)
        state = compare_random_state(setup, begins, around.control)
        if not state.passed:
            self._fail(state.what)
        # The reference's memory is not the cell's, nor is what is gathered for the hash.
        with setup.memory.lifted():
            if not device_of(around.device).asynchronous:
                self._found["first_hash"] = parameters_hash(trainer)
            else:
                self._absent["first_hash"] = "on a GPU equal steps need not give equal bits"
            free_memory(around.device)

    def _proven_before(self) -> bool:
        """Whether an earlier run proved the program that this run has built; collective."""
        before, rank = self._slot.proved_by, self._around.rank.rank
        if before is None:
            return False
        unlike: list[str] = []
        if rank == 0 and self._program is not None:
            # A record that cannot be read, or has no program, leaves the proof to the driver's judgement.
            with suppress(BenchError):
                for record in self._around.study.rank_records(self._cell.id, before)[:1]:
                    if record.environment.program is not None:
                        unlike = unlike_facts(record.environment.program.facts(), self._program.facts())
        return not self._around.control.from_first(float(len(unlike)))

    def _prove_late(self, setup: CellSetup, trainer: Trainer, batches: Draws) -> None:
        """Steps after all that was measured, as the timed ones went; also in a run that leans on a proof."""
        around = self._around
        self._begin("late proof")
        timed_s = (sum(self._found["blocks_ns"]) + sum(self._found["warmup"].step_ns)) / 1e9
        obstacle = ONLY_TIMED if self._only_timed else batches.sampler.obstacle
        obstacle = self._absent.get("proof", obstacle)
        if obstacle is None:
            with self._compilation.reproducible(trainer.model.bare):
                late = prove_late(
                    setup,
                    trainer,
                    batches,
                    around.control,
                    longest_s=min(LONGEST_S, LATE_SHARE * timed_s),
                    beat=around.log.heartbeat,
                )
        else:
            late = LateProof(first=0, steps=0, failure=None, obstacle=obstacle)
        if late.failure is not None:
            self._fail(
                f"{late.failure}; in a step after the timed blocks, from step {late.first} on",
                "sampled-gradients" if late.sampled else "serial-simulation",
            )
        found = self._found.get("proof")
        if found is None:
            return
        if late.steps:
            last = late.first + late.steps - 1
            words = f"step {last}" if late.steps == 1 else f"steps {late.first} to {last}"
            how = f", sampled: {late.obstacle}" if late.sampled else " as well"
            if late.obstacle is not None and not late.sampled:
                how += f", and no further one: {late.obstacle}"
            detail = f"{found.detail}; after the timed blocks {words}{how}"
            self._found["proof"] = msgspec.structs.replace(
                found, detail=detail, late_first=late.first, late_steps=late.steps
            )
        else:
            detail = f"{found.detail}; no step after the timed blocks: {late.obstacle}"
            self._found["proof"] = msgspec.structs.replace(found, detail=detail)

    def _require(self, missed: str | None) -> None:
        """End the run on all ranks if on one of them a step did not do what the cell asks for; collective."""
        every = self._around.control.union([] if missed is None else [missed])
        if every:
            self._fail(missed or every[0])

    def _fail(self, detail: str, method: ProofMethod = "serial-simulation") -> None:
        """End the run, on all ranks, as one that did not train."""
        self._found["proof"] = Proof(method=method, passed=False, detail=detail)
        raise ProofFailedError(detail)

    def _add_losses_to_a_weaker_proof(self) -> None:
        """Where no simulation was made, whether the loss fell is the other thing that can be said."""
        proof = self._found.get("proof")
        if proof is None or proof.method not in ("replica-agreement", "sampled-gradients"):
            return
        warmup, steps = self._found["warmup"].loss, self._found["steps"].loss
        detail = f"{proof.detail}; loss {(warmup + steps)[0]:.4g} to {steps[-1]:.4g}"
        self._found["proof"] = msgspec.structs.replace(proof, detail=detail)

    def _measure(self, watch: Stopwatch, setup: CellSetup, trainer: Trainer, workload: Workload) -> None:
        around, policy = self._around, self._cell.steps
        if self._only_timed:
            fewer = min(policy.warmup_max_steps, FEWER_WARM_UP_STEPS)
            policy = msgspec.structs.replace(policy, warmup_max_steps=fewer)
        device_of(around.device).reset_memory_peaks()
        if not reset_rss_peak():
            self._absent["memory"] = (
                "the kernel does not reset peaks: the peak is the process's, not the run's"
            )
        self._begin("warm-up")
        if around.device.type == "cuda":
            with sampler(around.device, around.rank) as sampling:
                warmup, steady = watch.warm_up(policy, sampling.clock_mhz)
        else:
            warmup, steady = watch.warm_up(policy)
        self._found |= {"warmup": warmup, "warmup_steady": steady}
        self._begin("measure")
        self._foreign = ForeignCpu(around.cores) if around.rank.local_rank == 0 else None
        before = around.exchange.traffic.payload_bytes, around.exchange.traffic.operations
        used = self._uses.so_far
        measured = self._timed_blocks(watch)
        # Not after the warm-up, which may have no step.
        if self._cell.compile:
            require_compiled()
        steps = len(measured.columns.step_ns)
        uses = self._uses.so_far.since(used)
        self._found |= {
            "steps": measured.columns,
            "blocks_ns": measured.blocks_ns,
            "block_steps": measured.block_steps,
            "stop": measured.stop,
            "work": self._work(
                workload,
                trainer,
                updates=uses.updates,
                payload_bytes=(around.exchange.traffic.payload_bytes - before[0]) // steps,
                operations=(around.exchange.traffic.operations - before[1]) / steps,
            ),
        }
        demand = Demand(cell=self._cell, workload=workload, steps=steps)
        sent = around.control.largest(
            [self._found["work"].exchange_payload_bytes, self._found["work"].exchange_operations]
        )
        if setup.rank.local_gpus == self._cell.gpus:
            self._require(other_traffic(self._cell, *sent) or whole_state(self._cell, trainer))
        missed = demand.missed(uses, around.control, setup.groups)
        if missed is not None:
            self._fail(missed)

    def _timed_blocks(self, watch: Stopwatch) -> Measured:
        around, turns, foreign = self._around, self._turns, self._foreign
        if turns is None:
            with sampler(around.device, around.rank) as sampling:
                measured = watch.measure(self._cell.steps)
            self._found["telemetry"] = sampling.telemetry()
            self._absent |= sampling.absent
            return measured
        self._absent["telemetry"] = "between the blocks of a paired comparison the other side works"

        def wait(at: str, **told: object) -> int:
            with nullcontext() if foreign is None else foreign.paused():
                return turns.wait(at, **told)

        return watch.measure_in_turns(wait, self._found["warmup"])

    def _work(
        self, workload: Workload, trainer: Trainer, *, updates: int, payload_bytes: int, operations: float
    ) -> Work:
        cell = self._cell
        samples = cell.batch_per_replica
        return Work(
            samples=samples,
            units=samples * workload.units_per_sample,
            unit=workload.unit,
            parameters=self._parameters,
            flops=self._flops(),
            exchange_payload_bytes=payload_bytes,
            exchange_operations=operations,
            updates=updates,
            bubble_ideal=trainer.model.bubble_ideal,
        )

    def _flops(self) -> int | None:
        try:
            flops = count_parts(
                self._cell.workload,
                micro_batch=self._cell.micro_batch,
                source_folder=self._around.source_folder,
                own=DATASETS.facts(self._cell.dataset).takes == Own.takes,
            )
            self._forward_flops = flops.forward / self._cell.micro_batch
            return self._cell.accumulation * flops.total
        except Exception as error:
            # A user's model may do what the meta device can't; the run is good without the count.
            self._absent["flops"] = f"they could not be counted on the meta device: {classify(error)[1]}"
            return None

    def _contradicted(self) -> list[str]:
        """Return, on rank 0, where the built model contradicts what its workload states."""
        if self._around.rank.rank or not self._parameters:
            return []
        known = facts(WORKLOADS.parse(self._cell.workload))
        return known.contradicted(parameters=self._parameters, forward_flops=self._forward_flops)

    def _unused_fabric(self) -> list[str]:
        around = self._around
        warning = None
        if around.launch.placement.nodes > 1 and around.rank.local_rank == 0:
            warning = unused_fabric(self._transports)
        return [] if warning is None else [f"on {platform.node()}: {warning}"]

    def _record(self, outcome: Outcome, reason: str | None) -> RankRecord:
        self._end_part()
        ending = Ending(
            outcome=outcome,
            reason=reason,
            started_at=self._started_at,
            transports=self._transports,
            warnings=[
                *self._contradicted(),
                *self._unused_fabric(),
                *([] if self._shared is None else [self._shared]),
            ],
            program=self._program,
        )
        return self._around.record(self._slot, self._cell, ending, self._found, self._absent)
