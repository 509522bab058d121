"""The strategy `auto`: of those that fit into memory, the one with the least predicted time a sample.

Memory and traffic are closed forms (`strategies.closed_form`), and the time of a step follows from them by
stated rules (`harness.plan.estimate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from harness.plan.estimate import StepTimes, offloaded_bytes, predicted_times
from harness.plan.points import Reason, unsplittable
from harness.plan.surroundings import MIB, SHARE, Devices, Surroundings
from results.cell import Cell
from results.parts import ModelParts, Unknown
from results.spec import split
from strategies.auto import Auto
from strategies.catalog import STRATEGIES
from strategies.closed_form.moments import Footprint
from strategies.closed_form.terms import Term
from strategies.facts import AutoPoint
from strategies.predictions import footprint, traffic
from strategies.refusal import refusal
from workloads import catalog as workloads
from workloads.catalog import WORKLOADS, facts

AUTO = Auto.name
TIE = 0.10
"""Candidates that are slower than the fastest by up to this share count as equal, since predictions are not
more exact. The simplest of them is chosen."""

Made = Callable[[str], Cell | Reason]
"""Returns the cell of a point with another strategy, or the reason why the point has no such cell."""

_ADVICE = "give more ranks, a smaller --batch-size, or more --accumulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCandidate:
    cell: Cell
    memory: Footprint
    terms: tuple[Term, ...]
    times: StepTimes
    around: Surroundings
    host_bytes: int = 0
    """Bytes that all ranks of a host take in the memory of the host, in addition to their devices' memory."""

    @property
    def strategy(self) -> str:
        return self.cell.strategy

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.around.room and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether the host has room for the offloaded shards; True if its memory is not known."""
        there = self.around.devices.host_bytes
        return there is None or self.host_bytes <= SHARE * there

    @property
    def sample_s(self) -> float:
        """Seconds of a sample: strategies differ in how many a step has."""
        return self.times.step / self.cell.global_batch

    @property
    def sent(self) -> float:
        return sum(term.wire_bytes for term in self.terms)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The candidates for one point, and the choice among them."""

    candidates: tuple[StrategyCandidate, ...]
    """The simplest candidate is first."""
    refused: tuple[tuple[str, Reason], ...]
    """Strategies that are refused for the point, with the reasons."""
    around: Surroundings
    kept: str | None = None
    """The strategy that the study has at this point already, and keeps."""

    @property
    def chosen(self) -> StrategyCandidate | None:
        """Return the candidate that the study has already, else the fastest that fits, or a simpler one that
        is as fast; None if none fits."""
        had = (candidate for candidate in self.candidates if candidate.strategy == self.kept)
        return next(had, None) or self._now

    @property
    def _now(self) -> StrategyCandidate | None:
        """Return the choice in a new study."""
        return _best([candidate for candidate in self.candidates if candidate.fits])

    @property
    def lightest(self) -> str | None:
        """The options of the simplest candidate that fits, with activation checkpointing if it needs that."""
        for each in (*self.candidates, *self._checkpointed):
            if each.fits:
                flag = " --activation-checkpointing" if each.cell.activation_checkpointing is True else ""
                return f"--strategy {each.strategy}{flag}"
        return None

    @property
    def reason(self) -> str:
        """One clause: why this one, or why none."""
        chosen = self.chosen
        if chosen is None:
            if not self.candidates:
                [(why, _)] = Counter(why.text for _, why in self.refused).most_common(1)
                return f"auto: no strategy can run this point: {why}"
            nearest = min(self.candidates, key=lambda candidate: candidate.memory.total)
            return f"auto: nothing fits: the nearest, {_need(nearest)}; {self._help()}"
        if chosen is not self._now:
            now = "nothing fits" if self._now is None else f"{self._now.strategy} would be chosen"
            return f"because the study has it at this point already; in a new study {now}"
        if (wanted := self._missed(chosen)) is not None:
            # A candidate may be clearly faster than the choice with activation checkpointing.
            lighter = _best([candidate for candidate in self._checkpointed if candidate.fits])
            faster = lighter is not None and (1 + TIE) * lighter.sample_s < chosen.sample_s
            hint = f"; {self._with(lighter)}, which fits" if lighter is not None and faster else ""
            return f"because {_need(wanted)}{hint}"
        # A strategy of equal time and memory is not an alternative.
        equal = (chosen.sample_s, chosen.memory.total)
        fitting = [other for other in self.candidates if other.fits]
        others = [other for other in fitting if (other.sample_s, other.memory.total) != equal]
        if not others:
            return "the only one that fits" if len(self.candidates) > 1 else "the only candidate"
        second = min(others, key=lambda candidate: candidate.sample_s)
        if second.sample_s <= chosen.sample_s:
            return f"because it fits, is within {TIE:.0%} of {second.strategy}, and simpler"
        ratio = second.sample_s / chosen.sample_s
        return f"because it fits, and {second.strategy} is predicted to take {ratio:.2f} times as long"

    def _missed(self, chosen: StrategyCandidate) -> StrategyCandidate | None:
        """The best of the candidates that do not fit, and that would change the choice if they fitted."""

        def with_it(missed: StrategyCandidate) -> list[StrategyCandidate]:
            return [candidate for candidate in self.candidates if candidate.fits or candidate is missed]

        without = [candidate for candidate in self.candidates if not candidate.fits]
        return _best([missed for missed in without if _best(with_it(missed)) is not chosen])

    def _help(self) -> str:
        if not self._checkpointed:
            return _ADVICE
        least = min(self._checkpointed, key=lambda candidate: candidate.memory.total)
        return f"{self._with(least)}, which {'fits' if least.fits else f'is not enough: {_ADVICE}'}"

    def _with(self, lighter: StrategyCandidate) -> str:
        instead = self.around.cell.activation_checkpointing == "selective"
        flag = "--activation-checkpointing" + " instead of --selective-checkpointing" * instead
        return f"with {flag} {lighter.strategy} needs {lighter.memory.total / MIB:,.0f} MiB"

    @cached_property
    def _checkpointed(self) -> tuple[StrategyCandidate, ...]:
        """The same candidates with all activations of blocks computed again; empty where that does not
        help."""
        cell = self.around.cell
        parts = facts(WORKLOADS.parse(cell.workload)).parts
        if isinstance(parts, Unknown) or not parts.blocks or cell.activation_checkpointing is True:
            return ()
        cells = (candidate.cell for candidate in self.candidates)
        lighter = (msgspec.structs.replace(cell, activation_checkpointing=True) for cell in cells)
        return tuple(weighed(cell, parts, self.around) for cell in lighter)


def _need(candidate: StrategyCandidate) -> str:
    """Say which memory the candidate exceeds, and by how much."""
    if candidate.memory.total > candidate.around.room:
        need, room = candidate.memory.total, candidate.around.room
        return (
            f"{candidate.strategy} needs {need / MIB:,.0f} MiB of the {room / MIB:,.0f} that may be planned"
        )
    there = SHARE * (candidate.around.devices.host_bytes or 0)
    need = candidate.host_bytes
    return f"{candidate.strategy} needs {need / MIB:,.0f} MiB of its host's {there / MIB:,.0f}"


def _best(candidates: Sequence[StrategyCandidate]) -> StrategyCandidate | None:
    """The simplest candidate that is as fast as the fastest one within TIE; None without candidates."""
    most = (1 + TIE) * min((candidate.sample_s for candidate in candidates), default=0.0)
    return next((candidate for candidate in candidates if candidate.sample_s <= most), None)


def choose(cell: Cell, made: Made, *, devices: Devices, gpus_per_node: int | None) -> Choice | Reason:
    """Weigh the strategies for the point of `cell`, whose own strategy and micro-batch are ignored.

    Returns a reason where nothing can be weighed.
    """
    known = facts(WORKLOADS.parse(cell.workload))
    parts, flops = known.parts, known.forward_flops
    if isinstance(parts, Unknown):
        return Reason("auto", f"auto: memory and traffic of {cell.workload} are {parts}; name a strategy")
    if isinstance(flops, Unknown):
        return Reason("auto", f"auto: the FLOPs of {cell.workload} are {flops}; name a strategy")
    if not cell.dense:
        return Reason(
            "auto",
            "auto weighs gradients that are exchanged as they are, by the default collective: name a "
            "strategy",
        )
    around = Surroundings.of(cell, devices, gpus_per_node)

    def micro_batch(strategy: str) -> int | str:
        there = made(STRATEGIES.parse(strategy).text)
        return there.text if isinstance(there, Reason) else there.micro_batch

    point = point_of(cell, around.node_size, micro_batch)
    candidates = []
    broken = STRATEGIES.admit_all()
    refused = [(name, Reason("strategy", str(error))) for name, error in broken.items()]
    proposals = (proposal for facts in STRATEGIES.all_facts for proposal in facts.proposals(point))
    for proposal in sorted(proposals, key=lambda proposal: proposal.complexity):
        strategy = STRATEGIES.parse(proposal.strategy).text
        there = Reason("strategy", proposal.refused) if proposal.refused else made(strategy)
        if isinstance(there, Reason):
            refused.append((strategy, there))
        else:
            candidates.append(weighed(there, parts, around))
    return Choice(candidates=tuple(candidates), refused=tuple(refused), around=around)


def point_of(cell: Cell, node_size: int, micro_batch: Callable[[str], int | str]) -> AutoPoint:
    """Return the point of a cell, with what is known of its model."""
    known = facts(WORKLOADS.parse(cell.workload))
    blocks, tokens, heads = known.blocks, known.units_per_sample, known.heads
    return AutoPoint(
        cell=cell,
        node_size=node_size,
        blocks=0 if isinstance(blocks, Unknown) else blocks,
        micro_batch=micro_batch,
        tokens=None if isinstance(tokens, Unknown) or known.unit != "tokens" else tokens,
        heads=None if isinstance(heads, Unknown) else next(iter(heads), None),
        experts=0 if isinstance(known.parts, Unknown) else max(known.parts.experts, default=0),
    )


def weighed(cell: Cell, parts: ModelParts, around: Surroundings) -> StrategyCandidate:
    """Predict memory and time of a cell whose model has these parts."""
    placed = around.placed(cell)
    terms = tuple(traffic(placed, parts))
    return StrategyCandidate(
        cell=cell,
        memory=footprint(placed, parts),
        terms=terms,
        times=predicted_times(placed, parts, terms, around),
        around=around,
        host_bytes=around.host_size * offloaded_bytes(placed, parts),
    )


_SHARDING = {"reshard": "true", "stage": "3", "offload": "cpu"}
"""Options of strategies that take memory off a device, with the value that does so."""

_MOST_PIECES = 256
"""Micro-batches into which a micro-batch is divided at most."""


def lighter(cell: Cell, around: Surroundings) -> str | None:
    """Name the cheapest of accumulation, checkpointing, reshard, offload and more ranks of each sequence that
    makes a cell fit which does not, as a clause.

    The cell may not fit although it is predicted to: a change must also save a part of what is predicted.
    Computation that the study has measured counts as measured. None if no single change is enough, or if the
    model states no parts or no FLOPs.
    """
    known = facts(WORKLOADS.parse(cell.workload))
    parts = known.parts
    if isinstance(parts, Unknown) or isinstance(known.forward_flops, Unknown) or not cell.dense:
        return None
    most = min(around.room, int(SHARE * footprint(around.placed(cell), parts).total))

    def fits(changed: Cell) -> bool:
        if refusal(changed) or workloads.refusal(changed) or unsplittable(changed):
            return False
        return footprint(around.placed(changed), parts).total <= most

    # Of several changes of one kind the first that is enough changes least.
    kinds = [*_changes(cell), _longer(cell, around)]
    first = [next(((options, one) for options, one in kind if fits(one)), None) for kind in kinds]
    weighted = {one[0]: weighed(one[1], parts, around) for one in first if one is not None}
    found = {options: after for options, after in weighted.items() if after.fits_host}
    if not found:
        return None
    before = weighed(cell, parts, around)
    options, best = min(found.items(), key=lambda item: item[1].sample_s)
    by = "measured computation" if "computation" in best.times.measured else "prediction"
    # A measured and a predicted time have no ratio.
    alike = best.times.measured == before.times.measured
    slower = f", {best.sample_s / before.sample_s:.2f} times the time of a sample" if alike else ""
    return f"{options} fits by {by} ({best.memory.total / MIB:,.0f} of {around.room / MIB:,.0f} MiB{slower})"


def _changes(cell: Cell) -> Iterator[Iterable[tuple[str, Cell]]]:
    """Yield the changes of each kind: options, and the cell with them. The samples of an update stay."""
    changed, count, samples = msgspec.structs.replace, cell.accumulation, cell.micro_batch
    yield (
        (
            f"--accumulation {count * pieces}",
            changed(cell, micro_batch=samples // pieces, accumulation=count * pieces),
        )
        for pieces in range(2, min(samples, _MOST_PIECES) + 1)
        if samples % pieces == 0
    )
    if cell.activation_checkpointing is False:
        selective = changed(cell, activation_checkpointing="selective")
        yield [("--activation-checkpointing selective", selective)]
    if cell.activation_checkpointing is not True:
        yield [("--activation-checkpointing all", changed(cell, activation_checkpointing=True))]
    for option, value in _SHARDING.items():
        if option in STRATEGIES.parse(cell.strategy).options:
            strategy = _with_option(cell.strategy, option, value)
            if strategy != cell.strategy and not (option == "offload" and cell.device == "cpu"):
                yield [(f"--strategy {strategy}", changed(cell, strategy=strategy))]


def _longer(cell: Cell, around: Surroundings) -> Iterator[tuple[str, Cell]]:
    """Yield the strategy with more ranks of a node for each sequence. A replica has the same samples, and an
    update has the samples of fewer replicas."""
    groups, same = STRATEGIES.facts(cell.strategy).groups(cell.gpus, around.node_size), cell.micro_batch
    known = facts(WORKLOADS.parse(cell.workload))
    if "cp" not in STRATEGIES.parse(cell.strategy).options or known.unit != "tokens":
        return
    for context in range(2 * groups.context, around.node_size // groups.tensor + 1):
        if context % groups.context or around.node_size % (groups.tensor * context):
            continue
        strategy = _with_option(cell.strategy, "cp", str(context))
        replica = cell.model_parallel // groups.context * context
        longer = msgspec.structs.replace(cell, strategy=strategy, model_parallel=replica)
        yield f"--strategy {strategy} with micro-batches of {same}", longer


def _with_option(strategy: str, option: str, value: str) -> str:
    name, positional, options = split(strategy)
    words = [f"{key}={text}" for key, text in (options | {option: value}).items()]
    return STRATEGIES.parse(":".join([name, *([positional] if positional else ()), *words])).text
