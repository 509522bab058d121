"""One run of one cell on this rank: build a fresh model, prove that it trains, measure it, record it."""

from __future__ import annotations

import platform
import time
import weakref
from contextlib import closing, nullcontext, suppress

import msgspec
import torch

from harness.worker.cell.memory import MemoryUse
from harness.worker.cell.rows import ExpertCounts
from harness.worker.cell.sampler import batch_print
from harness.worker.cell.setup import Built, CellSetup, keep_first, seed_step
from harness.worker.measure.clock import FirstStep
from harness.worker.measure.profiler import attach_profiler, traced_steps, write_trace
from harness.worker.measurement import ONLY_TIMED, Measurement
from harness.worker.proof.causes import named_causes
from harness.worker.proof.compilation import Compilation
from harness.worker.proof.conformance import Uses, Watched
from harness.worker.proof.fingerprints import compare_random_state, shared_batches
from harness.worker.proof.proof import LateProof, first_steps, prove, prove_late
from harness.worker.rank.context import Run
from harness.worker.rank.control import parameters_hash
from harness.worker.rank.network import one_queue, unused_fabric
from harness.worker.rank.process import free_memory, tune_kernels
from harness.worker.turns import PROTOCOL, Turns
from results.environment import unlike_facts
from results.errors import BenchError
from results.record import LATE_SHARE, LONGEST_S, Proof, Training
from strategies.catalog import COLLECTIVES, STRATEGIES
from strategies.devices import device_of
from strategies.training.layouts import found_layout
from workloads.batch import Batch
from workloads.catalog import WORKLOADS, even_workload, facts


def measure_cell(run: Run) -> None:
    """Build, prove and measure the cell of `run`, and add the results to the run's record; collective."""
    around = run.around
    turns = Turns.of_driver(around.log.heartbeat)
    with nullcontext() if turns is None else closing(turns):
        if turns is not None:
            # Wait until the run of the other side of a paired comparison is quiet.
            around.log.event("waiting")
            turns.wait(
                "begin",
                protocol=PROTOCOL,
                cell=run.cell.id,
                run=run.slot.run_id,
                rank=around.rank.rank,
                gpus=around.rank.gpus,
                cores=around.cores,
                repeat=run.slot.repeat,
                forked=around.forked,
                only_timed=True,
            )
        _measure_cell(run, turns)


def _measure_cell(run: Run, turns: Turns | None) -> None:
    around, only_timed = run.around, turns is not None and turns.only_timed
    run.begin("build")
    # Before memory is counted, so that the groups of the previous cell do not count as idle memory.
    around.exchange.reset()
    # Before memory is counted, so that the profiler's own memory counts as idle in every cell.
    attach_profiler(around.device)
    memory = MemoryUse(around.device)
    setup = CellSetup.of(around, run.cell)
    # Steps after the measured ones keep their own copies, which are not memory of the strategy.
    with named_causes(setup, around.log.heartbeat), setup.memory.kept():
        uses = Uses()
        built = _build(run, setup, uses)
        proof = RunProof(run, built)
        proof.take_first_steps()
        measurement = Measurement(run, built, uses, turns)
        measurement.time_steps()
    run.found["memory"] = memory.record()
    measurement.measure_rest(only_timed=only_timed)
    if around.launch.placement.nodes > 1 and around.rank.local_rank == 0:
        # The first rank of a node warns if NCCL leaves a faster network of its host unused.
        warning = unused_fabric(run.transports)
        if warning is not None:
            run.warnings.append(f"on {platform.node()}: {warning}")
    run.warnings += one_queue(around.device.type == "cuda" and around.exchange.joins_a_pair_twice)
    run.begin("hash")
    run.add_parameters_hash(built.trainer)
    proof.add_losses_to_a_weaker_one()
    if not only_timed and any(chosen < around.rank.gpus for chosen in around.launch.trace):
        _trace(run, built)
    proof.take_late_steps(ONLY_TIMED if only_timed else None)
    proof.compare_replicas()


def _trace(run: Run, built: Built) -> None:
    """Take steps of which the chosen ranks keep what the profiler saw; collective."""
    run.begin("trace")
    around = run.around
    keep = around.rank.rank in around.launch.trace
    profiler = traced_steps(built.trainer, built.batches, around.control, keep=keep)
    if profiler is not None:
        path = around.study.trace_path(run.cell.id, run.slot.run_id, around.rank.rank)
        run.absent |= write_trace(profiler, path)


def _build(run: Run, setup: CellSetup, uses: Uses) -> Built:
    """Build model, data and trainer, whose use of samples `uses` counts; collective."""
    around, cell = run.around, run.cell
    began = time.perf_counter_ns()
    workload = setup.workload()
    run.program = setup.program(workload.module)
    run.model = weakref.ref(workload.module)
    # Counted while the model is complete: a strategy may leave only a part of it on this rank.
    parameters = sum(parameter.numel() for parameter in workload.module.parameters())
    if around.rank.rank == 0:
        run.warnings += facts(WORKLOADS.parse(cell.workload)).contradicted(parameters=parameters)
    batches = setup.batches(workload, setup.replica)
    layout = found_layout(workload.module) if workload.layout is None else workload.layout
    trainer = setup.trainer(workload, around.exchange)
    trainer.loss = uses.counted(trainer.loss, workload.count)
    uses.watch(trainer.optimizer)
    strategy = STRATEGIES.facts(cell.strategy)
    run.found |= {
        "setup_ns": time.perf_counter_ns() - began,
        "period": trainer.model.period,
        "layout": setup.groups,
        "even_workload": even_workload(WORKLOADS.parse(cell.workload)),
        "training": Training(
            differences=strategy.differences,
            averages_all_gradients=strategy.promise.averages_all_gradients(strategy.promise.after),
            exchanges_by_nodes=COLLECTIVES.facts(cell.collective).by_nodes,
        ),
    }
    return Built(
        setup=setup,
        workload=workload,
        trainer=trainer,
        batches=batches,
        blocks=layout.blocks,
        parameters=parameters,
        deterministic=torch.backends.cudnn.deterministic,
        rows=ExpertCounts(trainer.model.bare, around.device),
    )


class RunProof:
    """The proof of one run: its first steps, and steps after all that was measured."""

    def __init__(self, run: Run, built: Built) -> None:
        self._run, self._around, self._cell = run, run.around, run.cell
        self._setup, self._trainer, self._batches = built.setup, built.trainer, built.batches
        self._blocks, self._deterministic = built.blocks, built.deterministic
        self._compilation = Compilation(run.cell, run.around.device)

    def take_first_steps(self) -> None:
        """Take the first steps of the cell, and prove them unless a proof is known or impossible; collective.

        If they do not train as the cell asks, `Run.fail` decides whether the run ends.
        """
        run, control = self._run, self._around.control
        watched = Watched()
        tune_kernels(self._around.device, deterministic=self._deterministic, on=False)
        first = FirstStep(control.synchronize)
        with nullcontext() if self._cell.compile else watched.watching(self._trainer, self._blocks):
            if self._leaves_proof_out():
                self._train(first)
            else:
                self._prove(first)
            begins = len(first_steps(self._trainer.model))
            run.found |= {"first_step_ns": first.ns, "first_steps": begins}
            # Proven or not, a cell's runs go on from the same parameters, data and random state.
            seed_step(self._cell.seed, begins, self._setup.replica)
            state = compare_random_state(self._setup, begins, control)
            if not state.passed:
                run.fail(state.what)
            # The reference's memory is not the cell's, nor is what is gathered for the hash.
            with self._setup.memory.lifted():
                if not device_of(self._around.device).asynchronous:
                    run.found["first_hash"] = parameters_hash(self._trainer)
                else:
                    run.absent["first_hash"] = "on a GPU equal steps need not give equal bits"
                free_memory(self._around.device)
        if not self._cell.compile:
            run.require(watched.missed(self._cell, self._around.rank.rank, self._setup.groups))

    def _leaves_proof_out(self) -> bool:
        """Whether there can be no proof, or an earlier run has proven this program; collective."""
        run, before = self._run, self._run.slot.proved_by
        unproven = STRATEGIES.facts(self._cell.strategy).promise.unproven
        if unproven is not None:
            run.absent["proof"] = f"{self._cell.strategy} is declared to be without a proof: {unproven}"
            return True
        if before is None:
            return False
        unlike: list[str] = []
        if self._around.rank.rank == 0 and run.program is not None:
            # A record that cannot be read, or has no program, leaves the proof to the driver's judgement.
            with suppress(BenchError):
                for record in self._around.study.rank_records(self._cell.id, before)[:1]:
                    if record.environment.program is not None:
                        unlike = unlike_facts(record.environment.program.facts(), run.program.facts())
                    if record.proof is not None and not record.proof.passed:
                        unlike.append("its proof failed")
        if self._around.control.from_first(float(len(unlike))):
            return False
        detail = f"run {before} of this cell was proven"
        run.found["proof"] = Proof(method="earlier-run", passed=True, detail=detail)
        return True

    def _train(self, first: FirstStep) -> None:
        """Take the steps of a proof without checks."""
        self._run.begin("first steps")
        kept: list[Batch] = []
        batches = keep_first(self._batches, kept) if self._batches.sampler.reads_own else self._batches
        with self._compilation.watched(self._trainer.model.bare):
            for step in range(len(first_steps(self._trainer.model))):
                seed_step(self._cell.seed, step, self._setup.replica)
                with first.part():
                    self._trainer.step(batches)
                first.is_over()
                self._around.log.heartbeat()
        if self._batches.sampler.reads_own:
            prints = self._around.control.of_all([batch_print(batch) for batch in kept])
            self._warn_of_shared(shared_batches(prints, self._setup.groups))

    def _prove(self, first: FirstStep) -> None:
        run, around = self._run, self._around
        run.begin("proof")
        with self._compilation.reproducible(self._trainer.model.bare):
            proof = prove(
                self._setup, self._trainer, self._batches, around.control, around.log.heartbeat, first
            )
        self._warn_of_shared(self._batches.shared)
        if not proof.passed:
            run.fail(proof.detail, proof.method)
        elif around.rank.rank == 0:
            run.found["proof"] = proof

    def _warn_of_shared(self, warning: str | None) -> None:
        if warning is not None:
            self._run.warnings.append(warning)

    def compare_replicas(self) -> None:
        """Compare the parameters with which the replicas end, where they are to be equal; collective.

        It comes last, because a late step says more about what differs.
        """
        found = self._run.found.get("parameters_hash")
        if found is not None and len(self._around.control.union([found])) > 1:
            self._run.fail("the replicas' parameters differ at the end of the run", "replica-agreement")

    def add_losses_to_a_weaker_one(self) -> None:
        """If the proof is not by a simulation, add the first and the last loss to it."""
        found = self._run.found
        proof = found.get("proof")
        weaker = ("replica-agreement", "sampled-gradients")
        if proof is None or not proof.passed or proof.method not in weaker:
            return
        warmup, steps = found["warmup_loss"], found["steps"].loss
        detail = f"{proof.detail}; loss {(warmup + steps)[0]:.4g} to {steps[-1]:.4g}"
        found["proof"] = msgspec.structs.replace(proof, detail=detail)

    def take_late_steps(self, obstacle: str | None) -> None:
        """Check steps after all that was measured, also in a run that leans on a proof; collective.

        `obstacle` is why none are checked. If one is wrong, `Run.fail` decides whether the run ends.
        """
        run, around = self._run, self._around
        if run.proof_failed:
            return
        run.begin("late proof")
        tune_kernels(around.device, deterministic=self._deterministic, on=False)
        timed_s = (sum(run.found["blocks_ns"]) + run.found["spent_ns"]["warm-up"]) / 1e9
        obstacle = run.absent.get("proof", obstacle or self._batches.sampler.obstacle)
        if obstacle is None:
            with self._compilation.reproducible(self._trainer.model.bare):
                late = prove_late(
                    self._setup,
                    self._trainer,
                    self._batches,
                    around.control,
                    longest_s=min(LONGEST_S, LATE_SHARE * timed_s),
                    beat=around.log.heartbeat,
                )
        else:
            late = LateProof(first=0, steps=0, failure=None, obstacle=obstacle)
        if late.failure is not None:
            run.fail(
                f"{late.failure}; in a step after the timed blocks, from step {late.first} on",
                "sampled-gradients" if late.sampled else "serial-simulation",
            )
        proof = run.found.get("proof")
        if proof is not None and proof.passed:
            detail = f"{proof.detail}; {_late_words(late)}"
            checked = {"late_first": late.first, "late_steps": late.steps} if late.steps else {}
            run.found["proof"] = msgspec.structs.replace(proof, detail=detail, **checked)


def _late_words(late: LateProof) -> str:
    """Say which steps after the timed blocks were checked, and how."""
    if not late.steps:
        return f"no step after the timed blocks: {late.obstacle}"
    last = late.first + late.steps - 1
    steps = f"step {last}" if late.steps == 1 else f"steps {late.first} to {last}"
    how = f", sampled: {late.obstacle}" if late.sampled else " as well"
    if late.obstacle is not None and not late.sampled:
        how += f", and no further one: {late.obstacle}"
    return f"after the timed blocks {steps}{how}"
