"""`python -m harness.worker.check FOLDER`, on each of two ranks: try out a workload for `bench check`.

Each strategy has a separate process group, so that one that fails leaves nothing behind for the next. Rank 0
writes the report after each part, so that a rank that ends early leaves what was found until then.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from harness.worker.cell.model_parts import built_on_meta, count_flops, parts_of
from harness.worker.cell.setup import CellSetup, layout_of, seed_step
from harness.worker.check_report import LONGEST_S, RANKS, CheckReport, CheckRequest, StrategyWord, Verdict
from harness.worker.exchange.group import open_exchange
from harness.worker.proof.causes import named_causes
from harness.worker.proof.proof import prove
from harness.worker.rank.control import Control
from harness.worker.rank.failure import ProofFailedError, classify
from harness.worker.rank.rank import Rank, leave_after
from results import files
from results.cell import BASELINE_STRATEGY, SYNTHETIC, Cell
from results.errors import BenchError, SpecError, UsageError
from results.layout import ModelLayout
from strategies.catalog import STRATEGIES, group_layout
from strategies.evaluation import evaluation_mode
from strategies.pipeline.stages import require_cuttable
from strategies.refusal import refusal
from strategies.trainer import Trainer
from strategies.training.layouts import found_layout
from workloads.batch import Batch, named_tensors
from workloads.catalog import WORKLOADS, facts
from workloads.data import DataRequest
from workloads.datasets.facts import DATASETS, Own
from workloads.training_data import open_training
from workloads.workload import Workload

CPU = torch.device("cpu")
READ_S = 10.0
"""Time limit for reading an epoch of data of unknown length."""
BEYOND_ROUNDING = 1e-4
"""A relative difference of two losses that rounding does not explain."""
PROVING_S = 30.0
"""No further strategy is proven once this much time was spent."""
WAIT_S = 60.0
"""How long a rank waits for the other one, which may have failed."""
_REQUEST = msgspec.json.Decoder(CheckRequest)


class Check:
    """One rank of a check."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._request = files.read(folder / "request.json").parsed(_REQUEST)
        self._source = Path(self._request.source_folder)
        self._store = dist.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
        self._found = CheckReport()
        self._dataset = self._request.dataset or SYNTHETIC

    def run(self) -> None:
        """Check the workload by itself, and then with each strategy."""
        try:
            self._count_parts() if self._request.parts else self._train_alone()
        except (Exception, SystemExit) as error:
            # Whatever a user's code raises goes into the report.
            words = words_of(error, self._source)
            self._say(failure=words)
            self._store.set(self._key("alone", self._rank), words)
        else:
            self._ask_all()

    def _ask_all(self) -> None:
        proven, together, before, began = False, True, "the workload alone", time.perf_counter()
        if self._request.strategies:
            # One rank may build and step far slower than the other.
            together = self._meet("alone", LONGEST_S / 2)
            if together and (failed := self._store.get(self._key("alone", 1 - self._rank)).decode()):
                self._say(failure=f"on rank {1 - self._rank} alone: {failed}")
                return
        for number, strategy in enumerate(self._request.strategies):
            if together:
                # Both ranks follow the clock of rank 0.
                if self._rank == 0:
                    self._store.set(f"late {number}", str(time.perf_counter() - began > PROVING_S))
                late = self._store.get(f"late {number}").decode() == str(True)
                word, together = self._asked(number, strategy, prove_it=not (proven and late))
                proven |= word.verdict == "proven"
                before = strategy
            else:
                words = f"not asked: the other rank did not end {before} in time"
                word = StrategyWord(strategy=strategy, verdict="failed", words=words)
            self._say(strategies=(*self._found.strategies, word))

    def _say(self, **found: Any) -> None:
        self._found = msgspec.structs.replace(self._found, **found)
        if self._rank == 0:
            written = self._folder / "found.part"
            written.write_bytes(msgspec.json.encode(self._found))
            written.rename(self._folder / "found.json")

    def _setup(self, strategy: str, gpus: int) -> CellSetup:
        request = self._request
        cell = Cell(
            workload=request.workload,
            dataset=self._dataset,
            strategy=strategy,
            gpus=gpus,
            micro_batch=request.micro_batch,
            device="cpu",
            backend="gloo",
            optimizer=request.optimizer,
            model_parallel=group_layout(strategy, gpus).model_parallel,
        )
        own = self._rank % gpus
        rank = Rank(rank=own, local_rank=own, node_rank=0, gpus=gpus, local_gpus=gpus)
        return CellSetup(cell=cell, rank=rank, device=CPU, source_folder=self._source)

    def _train_alone(self) -> None:
        """Build the workload and take two steps on this rank by itself.

        The process group of one rank lets a model call collectives.
        """
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            self._take_steps()
        finally:
            dist.destroy_process_group()

    def _take_steps(self) -> None:
        setup = self._setup(BASELINE_STRATEGY, 1)
        workload = setup.workload()
        if workload.synthetic is None and self._request.dataset is None:
            self._dataset = Own.name
            setup = self._setup(BASELINE_STRATEGY, 1)
        self._say_sizes(workload)
        batches = setup.batches(workload, 0)
        first = next(batches)
        self._say(
            batch=tuple(
                f"{name or 'batch'} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                for name, tensor in named_tensors(first)
            )
        )
        trainer = setup.trainer(workload, None)
        seed_step(0, 0, 0)
        loss, kept = _activations(trainer, iter([first]))
        state = [value for values in trainer.optimizer.state.values() for value in values.values()]
        tensors = [value for value in state if isinstance(value, Tensor)]
        # A sparse momentum has no nbytes, and a value for each row that occurred; in time that is every row.
        state_bytes = sum(value.numel() * value.element_size() for value in tensors)
        self._say(loss=loss, activation_bytes=kept, optimizer_bytes=state_bytes)
        began = time.perf_counter()
        trainer.step(batches)
        self._say(step_s=time.perf_counter() - began)
        # The halves of one batch may be padded alike by chance.
        notes = (uneven(workload, each, self._request.micro_batch) for each in (first, *islice(batches, 3)))
        self._say(notes=tuple(note for note in notes if note is not None)[:1])
        read_epoch(setup.data_request(workload, 0))
        self._count_flops()

    def _say_sizes(self, workload: Workload) -> None:
        named = list(workload.module.parameters())
        trained = [parameter for parameter in named if parameter.requires_grad]
        self._say(
            module=type(workload.module).__name__,
            parameters=sum(parameter.numel() for parameter in named),
            trained=sum(parameter.numel() for parameter in trained),
            parameter_bytes=sum(parameter.nbytes for parameter in named),
            trained_bytes=sum(parameter.nbytes for parameter in trained),
            blocks=_layout(workload).blocks,
        )

    def _count_flops(self) -> None:
        request = self._request
        count = partial(
            count_flops,
            request.workload,
            micro_batch=request.micro_batch,
            source_folder=self._source,
        )
        try:
            try:
                flops = count()
            except BenchError:
                # The model has just run on the CPU, and does not on the meta device.
                flops = count(device="cpu")
        except BenchError as error:
            return self._say(absent={"flops": str(error)})
        known, samples = facts(WORKLOADS.parse(request.workload)), request.micro_batch
        wrong = known.contradicted(parameters=self._found.parameters, forward_flops=flops.forward / samples)
        self._say(flops=round(flops.total / samples), notes=(*self._found.notes, *wrong))

    def _count_parts(self) -> None:
        request = self._request
        workload = built_on_meta(request.workload, source_folder=self._source)
        self._say(splits=bool(_layout(workload).splits), uncut=_uncut(workload, request.micro_batch))
        try:
            self._say(parts=parts_of(workload))
        except BenchError as error:
            self._say(absent={"parts": str(error)})

    def _asked(self, number: int, strategy: str, *, prove_it: bool) -> tuple[StrategyWord, bool]:
        """Try a strategy; return its verdict, and whether both ranks are still together."""
        try:
            setup = self._setup(strategy, RANKS)
            reason: object = refusal(setup.cell)
        except SpecError as error:
            reason = error
        if reason is not None:
            return StrategyWord(strategy=strategy, verdict="refused", words=str(reason)), True
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group {number}", self._store),  # type: ignore[attr-defined]
            rank=self._rank,
            world_size=RANKS,
            timeout=timedelta(seconds=WAIT_S),
        )
        try:
            verdict, words = self._tried(setup, prove_it=prove_it)
        finally:
            together = self._meet(str(number), WAIT_S)
            if together:
                dist.destroy_process_group()
        return StrategyWord(strategy=strategy, verdict=verdict, words=words), together

    def _tried(self, setup: CellSetup, *, prove_it: bool) -> tuple[Verdict, str]:
        try:
            with named_causes(setup):
                return self._stepped(setup, prove_it=prove_it)
        except BenchError as error:
            return "refused", str(error)
        except (Exception, SystemExit) as error:
            # Whatever a workload or a strategy raises goes into the report.
            return "failed", words_of(error, self._source)

    def _stepped(self, setup: CellSetup, *, prove_it: bool) -> tuple[Verdict, str]:
        strategy = setup.cell.strategy
        exchange = open_exchange(timedelta(seconds=WAIT_S))
        workload = setup.workload()
        batches = setup.batches(workload, setup.replica)
        trainer = setup.trainer(workload, exchange)
        unproven = STRATEGIES.facts(strategy).promise.unproven
        if not prove_it or unproven is not None:
            seed_step(0, 0, setup.replica)
            loss = trainer.step(batches)
            why = unproven or f"check it with --strategy {strategy}"
            return "runs", f"loss {loss.item():.4g} after one step; not proven: {why}"
        proof = prove(setup, trainer, batches, Control(CPU, exchange))
        if batches.shared is not None:
            self._say(warnings=(batches.shared,))
        if not proof.passed:
            raise ProofFailedError(proof.detail)
        return "proven", proof.detail

    def _key(self, where: str, rank: int) -> str:
        return f"done {where} {rank}"

    def _meet(self, where: str, longest_s: float) -> bool:
        """Wait until the other rank has also reached `where`; return whether it did in time."""
        self._store.set(self._key(where, self._rank), "")
        try:
            self._store.wait([self._key(where, 1 - self._rank)], timedelta(seconds=longest_s))
        except RuntimeError:
            return False
        return True


def _layout(workload: Workload) -> ModelLayout:
    return found_layout(workload.module) if workload.layout is None else workload.layout


def _uncut(workload: Workload, micro_batch: int) -> str | None:
    """Return why no pipeline can be made of a workload that was built on the meta device; None if one can."""
    module = workload.module.to("meta").train()
    try:
        layout = layout_of(workload, micro_batch)
        require_cuttable(module, found_layout(module) if layout is None else layout)
    except UsageError as error:
        return str(error)
    return None


def _activations(trainer: Trainer, batches: Iterator[Any]) -> tuple[float, int]:
    """Take a step; return its loss, and the bytes that autograd keeps for backward, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in trainer.model.bare.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.compute_gradients(batches)
    trainer.update()
    return loss.item(), sum(kept.values())


def uneven(workload: Workload, batch: Batch, samples: int) -> str | None:
    """Return a note if the loss of a batch, in evaluation mode, differs from the mean loss of its two halves.

    Return None as well if this comparison is impossible: the batch cannot be halved, or the loss draws random
    numbers or cannot be computed in evaluation mode.
    """
    batches = [batch, *_halves(batch, samples)]
    if len(batches) == 1:
        return None
    drawn = torch.get_rng_state()
    try:
        with torch.no_grad(), evaluation_mode(workload.module):
            whole, *halves = (workload.loss_of(workload.module, each).item() for each in batches)
    except Exception:
        # A user's model may do anything else in evaluation mode.
        return None
    mean = sum(halves) / 2
    is_drawn = not torch.equal(drawn, torch.get_rng_state())
    if is_drawn or abs(whole - mean) <= BEYOND_ROUNDING * max(map(abs, (whole, *halves))):
        return None
    return (
        f"the loss of a batch is {whole:.6g}, and the mean loss of its two halves is {mean:.6g}: the loss "
        f"differs from a mean over samples (padded tokens, a sum, terms across the batch), so that results "
        f"depend on how a batch is divided over ranks and micro-batches"
    )


def _halves(batch: Batch, samples: int) -> list[Batch]:
    """Return the two halves of a batch; nothing if it cannot be halved."""
    leaves, form = pytree.tree_flatten(batch)
    along = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves]
    if samples % 2 or any(len(leaf) != samples for leaf, has in zip(leaves, along, strict=True) if has):
        return []
    halved = [leaf.chunk(2) if has else (leaf, leaf) for leaf, has in zip(leaves, along, strict=True)]
    return [pytree.tree_unflatten(half, form) for half in zip(*halved, strict=True)]


def read_epoch(request: DataRequest) -> None:
    """Read data of unknown length to the end of their first epoch, or for `READ_S`.

    The epoch may have a batch of another size. Raises UsageError as training would.
    """
    if DATASETS.facts(request.dataset).takes != Own.takes:
        return
    data, began = open_training(request), time.perf_counter()
    while data.samples_per_epoch is None and not data.epoch and time.perf_counter() - began < READ_S:
        next(data)


def words_of(error: BaseException, folder: Path) -> str:
    """Return the message of an error, with the last line of the user's own code that led to it."""
    words = str(error) if isinstance(error, BenchError) else classify(error)[1]
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f"{words} ({Path(own[-1].filename).relative_to(folder)}, line {own[-1].lineno})" if own else words


def main() -> int:
    """Run a rank of the check, and return its exit code."""
    torch.set_num_threads(1)
    Check(Path(sys.argv[1]), int(os.environ["RANK"])).run()
    return 0


if __name__ == "__main__":
    leave_after(main)
