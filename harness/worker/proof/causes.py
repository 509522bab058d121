"""Name what a strategy cannot train in a user's own model: the parameter or module, and the line of the code.

A step that fails says little of its cause: words of torch, a NaN, a gradient that differs. After such a
failure the bare model is built again on this rank, and its forward pass is watched on the meta device, or
else on the CPU. Nothing is watched in a run that trains.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.rank.failure import classify
from results.errors import BenchError, UsageError
from results.layout import ModelLayout
from results.outcome import Outcome
from strategies.advice import WHOLE
from strategies.catalog import STRATEGIES
from strategies.sharding import ShardingFacts
from strategies.training.layouts import found_layout, homes_of
from strategies.training.missing_gradients import SAME_PARAMETERS, UnlikeStepError
from workloads.build import build_workload
from workloads.catalog import WORKLOADS, facts
from workloads.data import open_batches
from workloads.workload import Workload

SEEDS = 8
"""Forward passes of different random states: a module that half of the steps leave out is missed in 1 of
128."""
LONGEST_S = 30.0
"""Seconds after which the forward pass under way ends, and no further one begins."""
LARGEST_ON_CPU = 2**30
"""Bytes of parameters above which no forward pass is watched on the CPU."""
_WITH_CAUSES = {Outcome.CRASHED, Outcome.DIVERGED, Outcome.PROOF_FAILED, Outcome.HUNG}
_ROOT = Path(__file__).parents[3]
_NOT_THEIRS = (
    *(_ROOT / name for name in ("harness", "results", "strategies", "workloads")),
    Path(torch.__file__).parent,
)


@contextmanager
def named_causes(setup: CellSetup, beat: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise a UsageError for an error in this context whose cause is found in the user's model; not
    collective, as all ranks have the same model. `beat` is called as long as the search makes progress."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, BenchError) and not isinstance(error, UnlikeStepError)
        if known or (not isinstance(error, BenchError) and classify(error)[0] not in _WITH_CAUSES):
            raise
        cause = cause_of(setup, beat)
        if cause is None:
            raise
        raise UsageError(cause) from error


def cause_of(setup: CellSetup, beat: Callable[[], None]) -> str | None:
    """Return what the strategy cannot train in a user's own model, and the way out; None if it finds no
    cause."""
    known, size = facts(WORKLOADS.parse(setup.cell.workload)), 0
    for device in ("meta", "cpu") if known.own_code else ():
        # A user's model may raise anything, on the meta device in particular.
        with suppress(Exception):
            beat()
            if size > LARGEST_ON_CPU:
                # The meta device has shown that it is too large to be built on the CPU.
                break
            with torch.device(device):
                workload = build_workload(setup.cell.workload, source_folder=setup.source_folder)
            size = sum(parameter.nbytes for parameter in workload.module.parameters())
            if device == "meta" or size <= LARGEST_ON_CPU:
                return _found(setup, workload, torch.device(device), beat)
    return None


def _found(
    setup: CellSetup, workload: Workload, device: torch.device, beat: Callable[[], None]
) -> str | None:
    module = workload.module.to(device)
    layout = found_layout(module) if workload.layout is None else workload.layout
    batch = next(open_batches(replace(setup.data_request(workload, setup.replica), device=device)))
    ends = time.monotonic() + LONGEST_S

    def checked() -> None:
        beat()
        if time.monotonic() > ends:
            raise TimeoutError

    watch = Watch(module, layout, (setup.source_folder or Path.cwd()).resolve(), checked)
    # All ranks draw alike, so that they name the same module.
    with suppress(TimeoutError):
        for seed in range(SEEDS):
            seed_step(setup.cell.seed, seed, 0)
            with watch.watching():
                workload.loss_of(module, batch)
    strategy = STRATEGIES.facts(setup.cell.strategy)
    found: Iterator[str] = iter(())
    if isinstance(strategy, ShardingFacts):
        found = chain(_read_outside(watch, strategy.name), _changed(watch, strategy.name), _by_chance(watch))
    elif strategy.shards:
        found = _changed(watch, strategy.name)
    if setup.groups.tensor > 1:
        found = chain(found, _stacked(module, layout))
    if strategy.splits_tokens:
        compute = partial(workload.loss_of, module, batch)
        found = chain(found, _counted_in_inputs(module, layout, setup.groups.tensor, compute))
    return next(found, None)


def _read_outside(watch: Watch, strategy: str) -> Iterator[str]:
    for parameter, (block, line) in watch.outside.items():
        yield (
            f"{parameter} is read outside of the forward pass of {block} ({line}), and {strategy} gathers it "
            f"only there: compute with it within {block}, declare layout=ModelLayout() (one unit), or {WHOLE}"
        )


def _changed(watch: Watch, strategy: str) -> Iterator[str]:
    for parameter, line in watch.written.items():
        yield (
            f"{parameter} is written in the forward pass ({line}), and under {strategy} it must not change "
            f"within a step: compute with a changed copy (weight.clamp(...), not weight.clamp_(...)), or "
            f"{WHOLE}"
        )
    if watch.differentiated is not None:
        yield (
            f"the step computes gradients of the model within its loss ({watch.differentiated}), and "
            f"{strategy} expects one backward pass, after which it frees parameters: {WHOLE}"
        )


def _by_chance(watch: Watch) -> Iterator[str]:
    for part, line in watch.lines.items():
        if len({counts[part] for counts in watch.calls}) > 1:
            yield f"{part} is not called equally often in every step ({line}): {SAME_PARAMETERS}"


def _stacked(module: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Yield which layers seem to hold several matrices that their layout does not declare."""
    for split, after in pairwise(layout.splits):
        layer, reader = module.get_submodule(split.name), module.get_submodule(after.name)
        if (split.by, after.by) != ("outputs", "inputs"):
            continue
        assert isinstance(layer, nn.Linear)
        assert isinstance(reader, nn.Linear)
        times, rest = divmod(layer.out_features, reader.in_features)
        if times > split.parts and not rest:
            yield (
                f"{split.name} gives {layer.out_features} outputs, and {after.name} takes "
                f"{reader.in_features}: if its weight has {times} matrices, stacked, the layout must say so "
                f"(LinearSplit(name={split.name!r}, by='outputs', parts={times}))"
            )


def _counted_in_inputs(
    module: nn.Module, layout: ModelLayout, ranks: int, compute: Callable[[], object]
) -> Iterator[str]:
    """Yield the block that fails if it has one of `ranks` parts of the tokens, and its split layers compute
    with all of them."""
    entered: list[str] = []

    def enter(name: str, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        entered.append(name)
        first, *others = inputs
        return first.chunk(ranks, dim=1)[0] if len(entered) == 1 else first, *others

    def gathered(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return torch.cat([output] * ranks, dim=1)

    def own(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output.chunk(ranks, dim=1)[0]

    with ExitStack() as hooks, torch.no_grad():
        for name in layout.blocks:
            block = module.get_submodule(name)
            hooks.callback(block.register_forward_pre_hook(partial(enter, name)).remove)
        for split in layout.splits:
            layer, after = module.get_submodule(split.name), gathered if split.by == "outputs" else own
            hooks.callback(layer.register_forward_hook(after).remove)
        last = module.get_submodule(layout.blocks[-1])
        hooks.callback(last.register_forward_hook(gathered).remove)
        try:
            compute()
        except Exception as error:
            # A user's model may raise anything.
            yield (
                f"sequence parallelism gives {entered[-1]} a part of the tokens, and its split layers give "
                f"all of them; it raises {error}: take numbers of tokens from the output of a split layer, "
                f"not from the block's input, or leave sequence=true out"
            )


class Watch(TorchDispatchMode):
    """Watches what a forward pass of a bare model does to its parameters, and by which line of the user's
    code."""

    def __init__(
        self, module: nn.Module, layout: ModelLayout, folder: Path, beat: Callable[[], None]
    ) -> None:
        """`beat` is called whenever a module is, and may end a pass by an error."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._folder, self._beat = module, folder, beat
        homes = homes_of(module, layout)
        self._named = {
            parameter.untyped_storage()._cdata: (name, next(iter(homes[parameter])))
            for name, parameter in module.named_parameters()
            if len(homes[parameter]) == 1
        }
        self._active: list[str] = []
        self._counts: Counter[str] = Counter()
        self.calls: list[Counter[str]] = []
        """How often each forward pass that reached its end called each module."""
        self.lines: dict[str, str] = {}
        """The line that first called each module."""
        self.outside: dict[str, tuple[str, str]] = {}
        """Parameters of a block that were read while it was not called, each with the block."""
        self.written: dict[str, str] = {}
        self.differentiated: str | None = None
        """The line that computed gradients within the loss."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass."""
        self._counts = Counter()
        with ExitStack() as hooks:
            for name, part in self._module.named_modules():
                enters = part.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
                hooks.enter_context(enters)
                hooks.enter_context(part.register_forward_hook(lambda *_: self._leave(), always_call=True))
            with self:
                yield
            self.calls.append(self._counts)

    def _enter(self, name: str) -> None:
        self._active.append(name)
        self._counts[name] += 1
        if name not in self.lines:
            self.lines[name] = self._line()
        self._beat()

    def _leave(self) -> None:
        self._active.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if torch._C._current_graph_task_id() != -1:
            self.differentiated = self.differentiated or self._line()
        else:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, value in zip(func._schema.arguments, (*args, *kwargs.values()), strict=False):
            writes = place.alias_info is not None and place.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._met(tensor, writes=writes)

    def _met(self, tensor: Tensor, *, writes: bool) -> None:
        name, home = self._named.get(tensor.untyped_storage()._cdata, ("", ""))
        if name and writes:
            self.written.setdefault(name, self._line())
        elif home and home not in self._active:
            self.outside.setdefault(name, (home, self._line()))

    def _line(self) -> str:
        """Return the line of the user's folder, or else of a package, that this thread is at."""
        package = "in code of torch"
        for frame, line in walk_stack(sys._getframe(1)):
            path = Path(frame.f_code.co_filename)
            if any(path.is_relative_to(folder) for folder in _NOT_THEIRS):
                continue
            if path.is_relative_to(self._folder) and "site-packages" not in path.parts:
                return f"{path.relative_to(self._folder)}, line {line}"
            if "site-packages" in path.parts and package == "in code of torch":
                package = f"{path.name}, line {line}"
        return package
