"""Rules for plan and library: which combinations make no sense, and why. This module does not import torch.

The rules of one strategy, compressor or collective are in its facts; the rules here hold for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, REFERENCE_STRATEGY, UNCOMPRESSED, Cell
from results.errors import SpecError
from results.value_types import takes
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from strategies.collectives.facts import CollectiveFacts
from strategies.compression.facts import CompressorFacts
from strategies.facts import StrategyFacts


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a cell makes no sense."""

    text: str
    """A sentence for the report."""
    predicate: str | None = None
    """The rest of a sentence whose subject is the name of the strategy: the same for all strategies that one
    rule refuses. None where the sentence has another subject."""

    def __str__(self) -> str:
        return self.text


def refusal(cell: Cell) -> Refusal | None:
    """Return why a cell makes no sense; None if it does."""
    strategy = STRATEGIES.facts(cell.strategy)
    return _of(strategy, _ranks(cell, strategy)) or _whole(strategy.redundant(cell)) or untrainable(cell)


def untrainable(cell: Cell) -> Refusal | None:
    """Return why no trainer takes a cell; None if one does. A distributed strategy may have one rank here,
    with which it trains as `single` does."""
    strategy = STRATEGIES.facts(cell.strategy)
    compressor, collective = COMPRESSIONS.facts(cell.compression), COLLECTIVES.facts(cell.collective)
    return _combination(cell, strategy, compressor, collective)


def _of(strategy: StrategyFacts, predicate: str | None) -> Refusal | None:
    return None if predicate is None else Refusal(f"{strategy.name} {predicate}", predicate)


def _whole(sentence: str | None) -> Refusal | None:
    return None if sentence is None else Refusal(sentence)


def require_possible(**fields: Any) -> None:
    """Raise SpecError, with the message of a plan, for settings of a library user that cannot be combined.

    `fields` are the fields of a cell except `workload`, `dataset` and `micro_batch`. A distributed strategy
    may have one rank here, with which it trains as `single` does.
    """
    hints = get_type_hints(Cell)
    for name, value in fields.items():
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            raise SpecError(f"{name} takes {takes(hints[name])}, not {value!r}") from None
    strategy = STRATEGIES.facts(fields["strategy"])
    compressor = COMPRESSIONS.facts(fields["compression"])
    collective = COLLECTIVES.facts(fields["collective"])
    fields |= {
        "strategy": strategy.spec.text,
        "compression": compressor.spec.text,
        "collective": collective.spec.text,
    }
    try:
        # The samples of a micro-batch are not known before the first one.
        cell = Cell(workload="", dataset="", micro_batch=strategy.microbatches, **fields)
    except ValueError as error:
        raise SpecError(str(error)) from None
    if reason := _combination(cell, strategy, compressor, collective):
        raise SpecError(reason.text)


def _combination(
    cell: Cell, strategy: StrategyFacts, compressor: CompressorFacts, collective: CollectiveFacts
) -> Refusal | None:
    return (
        _whole(strategy.refusal(cell))
        or _of(strategy, _fixed(cell, strategy))
        or _whole(_grouping(cell, strategy))
        or _of(strategy, _averaged(cell, strategy))
        or _whole(_machine(cell))
        or _of(strategy, _scaled(cell, strategy))
        or _whole(_compressed(cell, strategy, compressor))
        or _whole(_collected(cell, collective, compressor))
        or _of(strategy, _absent(strategy))
    )


def _absent(strategy: StrategyFacts) -> str | None:
    """Return why the engine of a strategy cannot be used on this machine."""
    missing = None if strategy.engine is None else strategy.engine.missing
    return None if missing is None else f"cannot run here: {missing}"


def _ranks(cell: Cell, strategy: StrategyFacts) -> str | None:
    """Return why a strategy is refused on too few or too many ranks."""
    if strategy.distributed and cell.gpus < 2:
        return f"needs at least 2 ranks; on 1 use {BASELINE_STRATEGY}"
    if strategy.distributed is False and cell.gpus != 1:
        return f"runs on 1 rank only; on more use {REFERENCE_STRATEGY}"
    return None


def _fixed(cell: Cell, strategy: StrategyFacts) -> str | None:
    """Return why a strategy refuses an exchange, a memory format or compilation."""
    if strategy.fixed_exchange and not cell.dense:
        return (
            f"needs --compression {UNCOMPRESSED} and --collective {DEFAULT_COLLECTIVE}, not "
            f"{cell.compression} and {cell.collective}: {strategy.fixed_exchange}"
        )
    if strategy.contiguous and cell.memory_format != "contiguous":
        return f"needs --memory-format contiguous: {strategy.contiguous}"
    if strategy.eager and cell.compile:
        return f"does not go with --compile: {strategy.eager}"
    return None


def _grouping(cell: Cell, strategy: StrategyFacts) -> str | None:
    try:
        strategy.groups(cell.gpus, cell.node_size)
    except SpecError as error:
        return str(error)
    return None


def _averaged(cell: Cell, strategy: StrategyFacts) -> str | None:
    """Return why the averages of a strategy exclude a precision or a compressor."""
    promise = strategy.promise
    if promise.of == "parameters" and cell.precision == "fp16":
        return "does not go with --precision fp16: each rank would scale its own loss; use bf16"
    if not promise.equal and cell.compresses:
        return (
            f"needs --compression {UNCOMPRESSED}, not {cell.compression}: "
            f"without equal replicas no proof shows what was lost; leave --compression out"
        )
    return None


def _scaled(cell: Cell, strategy: StrategyFacts) -> str | None:
    """Return why a strategy excludes products in float8."""
    if cell.precision == "float8" and strategy.groups(cell.gpus, cell.node_size).tensor > 1:
        return "does not go with --precision float8: a rank would scale its part of a row; use bf16"
    return None


def _machine(cell: Cell) -> str | None:
    if cell.precision == "tf32" and cell.device == "cpu":
        return "--precision tf32 needs --device cuda; use fp32"
    if cell.backend == "nccl" and cell.device == "cpu":
        return "--backend nccl needs --device cuda; use gloo"
    return None


def _compressed(cell: Cell, strategy: StrategyFacts, compressor: CompressorFacts) -> str | None:
    if compressor.ddp_hook and not (strategy.takes_ddp_hooks and cell.collective == DEFAULT_COLLECTIVE):
        hooked = " or ".join(facts.name for facts in STRATEGIES.all_facts if facts.takes_ddp_hooks)
        return (
            f"{compressor.name} needs {hooked} and --collective {DEFAULT_COLLECTIVE}, not "
            f"{strategy.spec.text} and {cell.collective}: it is a hook of torch's DistributedDataParallel; "
            f"use {compressor.instead}"
        )
    if compressor.gradients_alone and strategy.promise.of == "parameters":
        return (
            f"{strategy.name} does not go with {compressor.name}: {compressor.gradients_alone}, and "
            f"{strategy.name} exchanges differences of parameters; use {compressor.instead}"
        )
    return compressor.refusal(cell)


def _collected(cell: Cell, collective: CollectiveFacts, compressor: CompressorFacts) -> str | None:
    if collective.on_cuda and cell.device == "cuda":
        return (
            f"{collective.name} needs --device cpu, as it sends messages between CPU ranks; on CUDA use "
            f"{collective.on_cuda}"
        )
    if compressor.need not in collective.implements:
        return (
            f"{compressor.name} needs {compressor.need}, which {collective.name} does not implement; use "
            f"--collective {DEFAULT_COLLECTIVE}"
        )
    if collective.by_nodes and compressor.own_gradients_alone:
        return (
            f"{compressor.name} does not go with {collective.name}: {compressor.own_gradients_alone}, and "
            f"across nodes one rank sends for all of its node; use --collective {DEFAULT_COLLECTIVE}"
        )
    return collective.refusal(cell, compressor)
