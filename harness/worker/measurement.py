"""Measure a run: warm-up, timed blocks, on-off quads, recorded operations, kernels, and the network."""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import product

import msgspec
import numpy as np

from harness.worker.cell.memory import reset_peaks
from harness.worker.cell.model_parts import count_flops
from harness.worker.cell.setup import Built
from harness.worker.exchange.recorder import TooManyOperationsError
from harness.worker.measure.blocks import Measured, NotTrainedError, Stopwatch
from harness.worker.measure.clock import StepClock
from harness.worker.measure.link_peak import measure_link_peak
from harness.worker.measure.profiler import LONGEST_PERIOD
from harness.worker.measure.scalars import Scalars
from harness.worker.measure.telemetry import sampler
from harness.worker.measure.uncounted import UncountedTraffic
from harness.worker.proof.compilation import require_compiled
from harness.worker.proof.conformance import (
    Uses,
    missed_uses,
    other_collective,
    other_traffic,
    sent_nothing,
    unknown_traffic,
    whole_state,
)
from harness.worker.rank.context import Run
from harness.worker.rank.failure import classify
from harness.worker.rank.network import read_transports
from harness.worker.rank.process import tune_kernels
from harness.worker.rank.usage import ForeignCpu
from harness.worker.turns import Turns
from results.record import STAGE_PARTS, StageTimes, StepColumns, Work
from strategies.catalog import STRATEGIES
from workloads.catalog import WORKLOADS, facts
from workloads.datasets.facts import DATASETS, Own

FEWER_WARM_UP_STEPS = 10
"""Most steps of the warm-up on CPU in a run that a driver wants for its blocks. On a busy machine no two
blocks are alike, so that each run would take all of the policy's steps."""
ONLY_TIMED = "a later pair of a paired comparison: only its blocks are timed"


class Measurement:
    """Measures the steps of a model that a run has built, and adds all results to the run's record."""

    def __init__(self, run: Run, built: Built, uses: Uses, turns: Turns | None) -> None:
        """`uses` counts what the trainer uses, and `turns` is the driver of a paired comparison, if any."""
        self._run, self._around, self._cell = run, run.around, run.cell
        self._built, self._uses, self._turns = built, uses, turns
        clock = StepClock(self._around.device)
        run.found["clock"] = clock.name
        self._watch = Stopwatch(
            built.trainer, built.batches, clock=clock, control=self._around.control, log=self._around.log
        )
        self._warmup = StepColumns()
        self._foreign: ForeignCpu | None = None
        """CPU that other processes use, from the first timed block to the last recorded one."""

    def time_steps(self) -> None:
        """Warm up, time blocks of steps, and require that they did what the cell asks for; collective."""
        with closing(Scalars(self._run.scalars_folder)) as scalars:
            self._watch.after_block = scalars.write
            self._warm_up()
            self._time_blocks()
        self._run.absent |= scalars.absent

    def _warm_up(self) -> None:
        run, around, policy = self._run, self._around, self._cell.steps
        if self._turns is not None and self._turns.only_timed:
            fewer = min(policy.warmup_max_steps, FEWER_WARM_UP_STEPS)
            policy = msgspec.structs.replace(policy, warmup_max_steps=fewer)
        run.begin("warm-up")
        if tune_kernels(around.device, deterministic=self._built.deterministic):
            # In steps of their own: no time and no peak of memory is to contain the algorithms that lose.
            run.found["first_steps"] += self._watch.take_period()
        run.absent |= reset_peaks(around.device)
        if around.device.type == "cuda":
            with sampler(around.device, around.rank) as sampling:
                idle_s = around.last_timed.seconds_ago
                self._warmup, steady = self._watch.warm_up(policy, sampling.clock_mhz, idle_s=idle_s)
        else:
            self._warmup, steady = self._watch.warm_up(policy)
        run.found |= {"warmup_loss": self._warmup.loss, "warmup_steady": steady}

    def _time_blocks(self) -> None:
        run, around, cell = self._run, self._around, self._cell
        run.begin("measure")
        self._foreign = ForeignCpu(around.cores) if around.rank.local_rank == 0 else None
        traffic, used = around.exchange.traffic, replace(self._uses)
        before, rows = (traffic.payload_bytes, traffic.operations), self._built.rows.read()
        uncounted = UncountedTraffic(around.exchange, self._built.trainer.model.period)
        if self._is_counted:
            self._watch.around_steps = uncounted.counting
        measured = self._blocks()
        self._watch.around_steps = lambda steps: nullcontext()
        # Checked here and not after the warm-up, which may take no step.
        if cell.compile:
            require_compiled()
        steps, uses = len(measured.columns.step_ns), self._uses.since(used)
        run.found["experts"] = self._built.rows.since(rows)
        payload_bytes = (traffic.payload_bytes - before[0]) // steps
        operations = (traffic.operations - before[1]) / steps
        workload, trainer = self._built.workload, self._built.trainer
        if (own := trainer.model.own_transport) is not None:
            payload_bytes, operations = own.payload_bytes, own.operations
        run.found |= {
            "steps": measured.columns,
            "blocks_ns": measured.blocks_ns,
            "block_steps": measured.block_steps,
            "stop": measured.stop,
            "work": Work(
                samples=cell.batch_per_replica,
                units=cell.batch_per_replica * workload.units_per_sample,
                unit=workload.unit,
                parameters=self._built.parameters,
                flops=self._count_flops(),
                exchange_payload_bytes=payload_bytes,
                exchange_operations=operations,
                updates=uses.updates,
                bubble_ideal=trainer.model.bubble_ideal,
            ),
        }
        self._require_traffic(uncounted, payload_bytes, operations)
        missed = missed_uses(cell, workload, steps, uses, around.control, self._built.setup.groups)
        if missed is not None:
            run.fail(missed)

    @property
    def _is_counted(self) -> bool:
        """Whether the steps exchange anything, over the group that counts it."""
        return self._around.rank.gpus > 1 and self._built.trainer.model.own_transport is None

    def _require_traffic(self, uncounted: UncountedTraffic, payload_bytes: int, operations: float) -> None:
        """End the run if its timed steps sent what nobody counts, nothing, or other messages than the
        strategy states; collective."""
        run, cell, around, trainer = self._run, self._cell, self._around, self._built.trainer
        sent = around.control.largest([payload_bytes, operations])
        least = sent[0]
        if self._is_counted:
            found = uncounted.found(cell.strategy)
            if facts(WORKLOADS.parse(cell.workload)).builder.startswith("workloads."):
                run.require(found)
            elif found is not None:
                # A model from elsewhere may have collectives in its layers, its loss or its data.
                run.warnings.append(found)
            least = min(around.control.largest(uncounted.block_bytes))
            run.require(sent_nothing(cell, self._built.setup.groups.replicas, least))
        several_nodes = around.rank.local_gpus < cell.gpus
        unknown = unknown_traffic(cell, several_nodes=several_nodes)
        if unknown is None:
            run.require(other_traffic(cell, least, *sent))
        elif "proof" in run.found:
            detail = f"{run.found['proof'].detail}; bytes were not compared with a closed form: {unknown}"
            run.found["proof"] = msgspec.structs.replace(run.found["proof"], detail=detail)
        if not several_nodes:
            run.require(whole_state(cell, trainer))

    def _blocks(self) -> Measured:
        run, turns, foreign = self._run, self._turns, self._foreign
        if turns is None:
            with sampler(self._around.device, self._around.rank) as sampling:
                quads = self._cell.steps.quads if self._is_counted else 0
                measured = self._watch.measure(self._cell.steps, quads=quads)
            run.found["telemetry"] = sampling.telemetry()
            run.absent |= sampling.absent
            return measured
        run.absent["telemetry"] = "between the blocks of a paired comparison the other side works"

        def wait(at: str, **told: object) -> int:
            with nullcontext() if foreign is None else foreign.paused():
                return turns.wait(at, **told)

        return self._watch.measure_in_turns(wait, self._warmup)

    def _count_flops(self) -> int | None:
        cell = self._cell
        try:
            flops = count_flops(
                cell.workload,
                micro_batch=cell.micro_batch,
                source_folder=self._around.source_folder,
                own=DATASETS.facts(cell.dataset).takes == Own.takes,
            )
        except Exception as error:
            # A user's model may do what the meta device can't; the run is good without the count.
            self._run.absent["flops"] = f"they could not be counted on the meta device: {classify(error)[1]}"
            return None
        if self._around.rank.rank == 0:
            known = facts(WORKLOADS.parse(cell.workload))
            self._run.warnings += known.contradicted(forward_flops=flops.forward / cell.micro_batch)
        return cell.accumulation * flops.total

    def measure_rest(self, *, only_timed: bool) -> None:
        """Measure the exchange unless only timed blocks are wanted, and other processes' CPU; collective."""
        if only_timed:
            self._run.absent |= dict.fromkeys(("quads", "recorded", "buckets", "link_peak"), ONLY_TIMED)
        else:
            self._measure_exchange()
        if self._foreign is not None:
            self._run.found["foreign_cpu_cores"] = self._foreign.cores_used()
        self._around.last_timed.at_s = time.monotonic()

    def _measure_exchange(self) -> None:
        run, around = self._run, self._around
        if around.rank.gpus == 1:
            nothing = ("quads", "recorded", "buckets", "link_peak")
            run.absent |= dict.fromkeys(nothing, "one rank exchanges nothing")
            return
        own = self._built.trainer.model.own_transport
        if own is not None:
            run.absent |= dict.fromkeys(("quads", "recorded", "buckets"), own.what)
        else:
            self._measure_counted_exchange()
        run.found["link_peak"] = measure_link_peak(
            around.control,
            around.device,
            ranks=around.rank.gpus,
            link_mbit_per_s=self._cell.link_mbit_per_s,
        )
        if around.launch.backend == "nccl":
            seen = [] if around.network_log is None else read_transports(around.network_log)
            run.transports = around.control.union(seen)

    def _measure_counted_exchange(self) -> None:
        run, around, policy = self._run, self._around, self._cell.steps
        if policy.quads:
            run.begin("exposed")
            try:
                run.found["quads"] = self._watch.measure_exposed(around.exchange, policy)
            except NotTrainedError as error:
                run.absent["quads"] = str(error)
        else:
            run.absent["quads"] = "not asked for (quads: 0)"
        run.begin("recording")
        self._record_operations()
        assert self._watch.buckets is not None
        run.found["buckets"], unknown = self._watch.buckets.counted(self._built.setup.groups)
        run.absent |= unknown

    def _record_operations(self) -> None:
        run, around = self._run, self._around
        try:
            recorded = self._watch.record(around.exchange, around.device)
        except TooManyOperationsError as error:
            run.absent["recorded"] = str(error)
            return
        recorded = msgspec.structs.replace(recorded, bubble_replayed=self._replayed_bubble(recorded.stages))
        node_size = self._built.setup.node_size
        run.require(other_collective(self._cell, node_size, recorded.operations))
        kernels, period = None, self._built.trainer.model.period
        if around.device.type == "cuda" and period > LONGEST_PERIOD:
            run.absent["kernels"] = f"a period of {period} steps is too long to profile"
        elif around.device.type == "cuda":
            kernels = self._watch.profile(around.device)
            if kernels is None:
                run.absent["kernels"] = "the profiler saw no kernel"
        run.found["recorded"] = msgspec.structs.replace(recorded, kernels=kernels)

    def _replayed_bubble(self, own: list[StageTimes]) -> float | None:
        """Return the bubble of the cell's schedule with the times of all stages; collective."""
        control, cell = self._around.control, self._cell
        [last] = control.largest([max((times.stage for times in own), default=-1)])
        if last < 0:
            return None
        keys = list(product(range(int(last) + 1), STAGE_PARTS))
        mine = {(times.stage, part): ns for times in own for part, ns in times.part_ns.items()}
        every = control.of_all([mine.get(key, math.nan) for key in keys])
        # The mean over the ranks that have the stage: NaN, which nothing asks for, where none has the part.
        means = np.ma.masked_invalid(every).mean(axis=0).filled(math.nan) / 1e9
        seconds = dict(zip(keys, means.tolist(), strict=True))
        return STRATEGIES.facts(cell.strategy).replayed_bubble(cell.gpus, seconds)
