"""`pipeline` without torch: its facts, the blocks of each stage, and the memory of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

from results.cell import REFERENCE_STRATEGY, Cell
from results.errors import SpecError
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from results.spec import Option
from strategies.closed_form.moments import Footprint
from strategies.closed_form.sizes import Activations, Sizes, Stage
from strategies.closed_form.terms import (
    BUCKET_BYTES,
    Collective,
    Piece,
    Receivers,
    Term,
    sums_of_units,
    term,
    term_of,
)
from strategies.context.facts import GATHERED, ULYSSES, attention_messages
from strategies.context.facts import OPTIONS as CONTEXT
from strategies.experts.facts import OPTIONS as EXPERTS
from strategies.experts.facts import refusal as same_tokens
from strategies.experts.facts import require_even, row_messages, views
from strategies.facts import AutoPoint, Proposal, StrategyFacts, quotient
from strategies.fsdp.facts import padded_bytes, shard_bytes, units_of
from strategies.pipeline.order import FOLDED, LOOPED, SPLITTING, Shape, idle_share, replayed_bubble, stages_of
from strategies.tensor_parallel.facts import OPTIONS as SEQUENCE
from strategies.tensor_parallel.facts import activation_messages

_CHUNKS = 2
_WEIGHED = ("zero-bubble", "zbv")
_LOSS_BYTES = 8


class Pipeline(StrategyFacts):
    """The memory is the stages of the fullest rank, and activations of the microbatches in flight on it."""

    name = "pipeline"
    help = "the blocks in stages, one after another; micro-batches follow each other through them"
    positional = Option(
        kind="str",
        choices=("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"),
        help="the schedule: gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv or dualpipev",
        example="gpipe",
    )
    options = MappingProxyType(
        {
            "microbatches": Option(
                kind="int", default=4, minimum=1, help="pieces that a micro-batch is cut into"
            ),
            "chunks": Option(
                kind="int",
                default=_CHUNKS,
                minimum=1,
                maximum=64,
                help="stages of a rank, only for interleaved, looped-bfs and zero-bubble",
            ),
            "dp": Option(kind="int", default=1, minimum=1, help="parallel pipelines, each with its own data"),
            "pp": Option(
                kind="int", default=0, minimum=0, help="ranks of a pipeline, instead of dp; 0: as dp leaves"
            ),
            "shard": Option(
                kind="int",
                default=1,
                minimum=1,
                help="ranks that share each stage in shards; 1 with ep: the fewest that ep needs",
            ),
            "tp": Option(kind="int", default=1, minimum=1, help="ranks that compute each layer together"),
            **SEQUENCE,
            **CONTEXT,
            **EXPERTS,
            "reshard": Option(
                kind="bool",
                default=False,
                help="with shard: gather a block for each pass of a microbatch, not once a step",
            ),
        }
    )
    model = "strategies.pipeline.model:PipelineModel"
    by_blocks = True
    unprojected = "the laws are of ranks that all compute at once, and a pipeline has a bubble"
    fixed_exchange = "it exchanges activations, not gradients"
    contiguous = "it sends activations row by row"
    norm_in_double = True
    eager = (
        "it exchanges activations inside of the model, which torch.compile cannot trace; leave --compile out"
    )

    @property
    def schedule(self) -> str:
        """A name of the choices of the positional option."""
        return str(self.spec.positional)

    @property
    def microbatches(self) -> int:
        return self.spec.integer("microbatches")

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return self.spec.integer("chunks") if self.schedule in LOOPED else 1 + (self.schedule in FOLDED)

    def shape(self, ranks: int) -> Shape:
        """Return the schedule over the ranks of all pipelines."""
        each = self.spec.integer("pp") or ranks // (self.spec.integer("dp") * self.width)
        return Shape(self.schedule, each, self.chunks, self.microbatches)

    @property
    def shards(self) -> bool:
        return True

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        each, copies = self.spec.integer("pp"), self.spec.integer("dp")
        if each and copies > 1:
            raise SpecError(f"{self.spec.text} has pp and dp, which follow from each other: leave dp out")
        left = quotient(self.spec.text, ranks, (each or copies) * self.width)
        groups = GroupLayout(
            pipeline=each or left,
            replicate=left if each else copies,
            shard=self.shard,
            context=self.spec.integer("cp"),
            tensor=self.spec.integer("tp"),
            expert=self.spec.integer("ep"),
        )
        return require_even(self.spec.text, groups)

    @property
    def shard(self) -> int:
        """Ranks that share each stage in shards."""
        given, within = self.spec.integer("shard"), self.spec.integer("cp") * self.spec.integer("tp")
        expert = self.spec.integer("ep")
        return given if given > 1 else expert // math.gcd(expert, within)

    @property
    def width(self) -> int:
        """Ranks of a stage in one copy of the pipeline."""
        return self.shard * self.spec.integer("cp") * self.spec.integer("tp")

    @property
    def attention(self) -> str | None:
        return self.spec.word("attention") if self.spec.integer("cp") > 1 else None

    @property
    def gathers_keys(self) -> bool:
        return self.attention == GATHERED

    @property
    def splits_tokens(self) -> bool:
        return self.spec.flag("sequence")

    def _of_tokens(self, groups: GroupLayout) -> int:
        """Return the number of ranks over which the tokens between two stages are divided."""
        return groups.context * (groups.tensor if self.splits_tokens else 1)

    def refusal(self, cell: Cell) -> str | None:
        if cell.micro_batch % self.microbatches:
            return (
                f"the micro-batch ({cell.micro_batch} samples) must be a multiple of microbatches "
                f"({self.microbatches}); give another --batch-size, or microbatches that divide "
                f"{cell.micro_batch}"
            )
        if cell.activation_checkpointing and self.schedule in SPLITTING:
            return (
                f"{self.schedule} divides the backward pass, and torch would compute a block again for every "
                f"group of its parameters: leave --activation-checkpointing out, or use pipeline:interleaved"
            )
        ranks = self.shape(cell.gpus).ranks
        return self._without() or same_tokens(self.spec) or self._apart() or self._misfit(ranks)

    def _apart(self) -> str | None:
        """Return why ranks with the same experts have no exchange of their gradients; None if they have."""
        expert, tensor = self.spec.integer("ep"), self.spec.integer("tp")
        if self.shard * self.spec.integer("cp") == 1 and 1 < expert < tensor:
            return (
                f"{self.spec.text} has no shards in which ranks with the same experts could add up their "
                f"gradients: use ep={tensor}, or add shard=2"
            )
        return None

    def _without(self) -> str | None:
        """Return why an option is refused without another one, or with this schedule; None if none is."""
        if self.spec.flag("reshard") and self.shard * self.spec.integer("cp") == 1:
            return f"{self.spec.text} has no shards: add shard=2, or leave reshard out"
        if self.attention is None and self.spec.word("attention") != ULYSSES:
            return f"{self.spec.text} splits no sequence: add cp=2, or leave attention out"
        if self.splits_tokens and self.spec.integer("tp") == 1:
            return f"{self.spec.text} splits no layers: add tp=2, or leave sequence out"
        if self.spec.flag("reshard") and self.schedule in SPLITTING:
            return (
                f"{self.schedule} divides the backward pass, and needs the gathered parameters until the "
                f"gradients of weights are there: leave reshard out, or use pipeline:interleaved"
            )
        return None

    def _misfit(self, ranks: int) -> str | None:
        """Return why the schedule is refused with this number of ranks of a pipeline; None if it is not."""
        pieces = self.microbatches
        if ranks < 2:
            return (
                f"{self.spec.text} leaves {ranks} stage for each pipeline: use {REFERENCE_STRATEGY}, a "
                f"smaller dp, or a larger pp"
            )
        if self.schedule not in LOOPED and self.spec.integer("chunks") != _CHUNKS:
            return (
                f"chunks ({self.spec.integer('chunks')}) needs pipeline:interleaved, pipeline:looped-bfs or "
                f"pipeline:zero-bubble: {self.schedule} has {('one stage', 'two stages')[self.chunks - 1]} a "
                f"rank; leave chunks out"
            )
        instead = {"interleaved": "1f1b", "looped-bfs": "gpipe"}.get(self.schedule)
        if instead and self.chunks < 2:
            return f"{self.schedule} needs chunks of at least 2, not {self.chunks}: use pipeline:{instead}"
        if self.schedule in ("interleaved", "zero-bubble") and pieces % (rounds := max(1, pieces // ranks)):
            return (
                f"microbatches ({pieces}) must be a multiple of their rounds ({rounds}) through {ranks} "
                f"pipeline ranks; use microbatches={ranks * -(-pieces // ranks)}"
            )
        least, other = {"1f1b": (ranks, "gpipe"), "dualpipev": (2 * ranks, "zbv")}.get(self.schedule, (1, ""))
        if pieces < least:
            return (
                f"microbatches ({pieces}) must be at least {least} for {self.schedule} on {ranks} pipeline "
                f"ranks; use microbatches={least}, or pipeline:{other}"
            )
        return None

    def unfit(self, cell: Cell, blocks: int) -> str | None:
        groups = self.groups(cell.gpus, cell.node_size)
        stages = self.chunks * groups.pipeline
        if not blocks:
            return f"{cell.workload} has no blocks that a pipeline could be made of; use {REFERENCE_STRATEGY}"
        if stages > blocks:
            instead = "use fewer chunks" if self.chunks > 2 else f"use {REFERENCE_STRATEGY}"
            if (most := blocks // self.chunks) >= 2:
                instead = (
                    f"use pp={most}"
                    if self.spec.integer("pp")
                    else f"use at most {most * cell.gpus // groups.pipeline} ranks"
                )
            return f"{cell.workload} has {blocks} blocks, too few for {stages} stages; {instead}"
        return None

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        """Yield 1F1B with each number of stages that divides the ranks and does not exceed the blocks, in
        order, and zero-bubble and zbv where the blocks are enough for two stages a rank. Without overlap of
        a pair dualpipev idles as long as zbv, and breadth first takes more memory than interleaved.

        The number of microbatches is the number of stages or more; a divided backward pass has the most.
        """
        gpus = point.cell.gpus
        numbers = [stages for stages in range(2, gpus + 1) if gpus % stages == 0]
        for stages in [number for number in numbers if number <= point.blocks] or numbers[:1]:
            copies = gpus // stages
            samples = point.micro_batch(f"pipeline:gpipe:microbatches=1:dp={copies}")
            refused = samples if isinstance(samples, str) else None
            counts = [stages] if isinstance(samples, str) else microbatch_counts(samples, stages)
            schedules = [("1f1b", count) for count in counts]
            schedules += [(name, counts[-1]) for name in _WEIGHED if 2 * stages <= point.blocks]
            grids = [f"dp={copies}"] + [f"pp={stages}:shard={copies}"] * (copies > 1)
            for ranks, (schedule, count) in product(grids, schedules):
                yield Proposal(
                    strategy=f"pipeline:{schedule}:microbatches={count}:{ranks}",
                    complexity=(8, schedule != "1f1b", "shard" in ranks),
                    refused=refused,
                )

    def stages(self, cell: Cell, parts: ModelParts) -> list[list[Stage]]:
        """Return the stages of each rank of a pipeline: runs of blocks whose largest cost is minimal."""
        ranks = self.shape(cell.gpus).ranks
        count = ranks * self.chunks
        costs = [block.flops for block in parts.blocks]
        costs[0] += parts.stem.flops
        costs[-1] += parts.head.flops
        runs = balanced_cut(costs, count)
        stages = [Stage(blocks=run, stem=at == 0, head=at == count - 1) for at, run in enumerate(runs)]
        placed = self.placement(cell.gpus) or [[rank] for rank in range(ranks)]
        return [[stages[at] for at in own] for own in placed]

    def placement(self, ranks: int) -> list[list[int]]:
        schedule, each, chunks, _ = self.shape(ranks)
        return [stages_of(schedule, rank, each, each * chunks) for rank in range(each)] if chunks > 1 else []

    def in_flight(self, cell: Cell, rank: int) -> int:
        """Return the maximum number of microbatches between forward and backward on all stages of `rank`.

        GPipe: all m, and looped-bfs v m. 1F1B: p - s of stage s, at most m (Narayanan et al. 2021,
        arXiv:2104.04473, section 2.2.1). Interleaved with v stages a rank: (v - 1) R + 2 (p - s - 1) + 1, at
        most v m, where R is p if it divides m; for s = 0 this is v p (1 + (p - 1) / (p v)) (Korthikanti et
        al. 2022, arXiv:2205.05198, section 4.2.3). The others follow from their order (`order.py`):
        zero-bubble begins p - s - 1 passes ahead, zbv has 2 p on every rank if m is at least 2 p - 1, and
        dualpipev one more. A divided backward pass begins with the gradient of the input.
        """
        shape, pieces = self.shape(cell.gpus), self.microbatches
        behind = shape.ranks - rank - 1
        if self.schedule in ("gpipe", "looped-bfs"):
            return self.chunks * pieces
        if self.schedule == "dualpipev":
            return 2 * shape.ranks + 1
        if self.schedule == "zbv":
            return min(pieces, shape.ranks + behind) + min(pieces, rank + 1)
        hops = 2 if self.schedule == "interleaved" else 1
        return min(self.chunks * pieces, (self.chunks - 1) * shape.per_round + hops * behind + 1)

    def kept(self, cell: Cell, rank: int) -> int:
        """Return the maximum number of microbatches whose activations `rank` keeps: until the gradients of
        the weights are there, which zero-bubble computes `rank` passes later."""
        late = rank if self.schedule == "zero-bubble" else 0
        return min(self.chunks * self.microbatches, self.in_flight(cell, rank) + late)

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        """Yield the moments of the rank whose fullest moment is largest."""
        sizes = self.sizes(cell, parts)
        ranks = range(sizes.groups.pipeline)
        every = [list(self._moments_of(sizes, rank)) for rank in ranks]
        return iter(max(every, key=lambda moments: max(moment.total for moment in moments)))

    def _moments_of(self, sizes: Sizes, rank: int) -> Iterator[Footprint]:
        parts, cell = sizes.parts, sizes.cell
        pieces, own = self.microbatches, self.stages(cell, parts)[rank]
        sharded, has = sizes.groups.shard_ranks > 1, parts_of_rank(parts, own)
        units = units_of(sizes, halved=False, parts=has)
        trained = units.trained.whole
        samples, flights = cell.micro_batch // pieces, self.kept(cell, rank)
        largest = max(
            (Activations(sizes, stage, samples=samples, flights=-(-flights // len(own))) for stage in own),
            key=lambda kept: kept.begin,
        )
        received = (
            samples
            * pieces
            * sum(_edges(parts, [stage])[0] for stage in own)
            // self._of_tokens(sizes.groups)
        )
        averaged = trained if sizes.groups.replicate > 1 and not sharded else 0
        rest = {"parameters": units.shard, "buckets": received + averaged}
        state, update = sizes.state(units.trained.shard), sizes.update(units.trained.shard)
        # Each unit is gathered in one piece, of which the last one is still there.
        stays = units.around + units.block if self.spec.flag("reshard") else units.whole
        during = rest | {"gathered": (stays + units.block) * sharded, "optimizer": state}
        yield Footprint(moment="model built", parameters=sizes.built)
        begin = largest.begin * len(own) + largest.gradients * self._divided(cell, rank, own)
        before = trained if sizes.accumulates or pieces * len(own) > flights else 0
        # The second microbatch's backward pass begins with gradients, and the first one's activations freed.
        for gradients, activations in ((before, begin), (trained, begin - begin // flights)):
            yield Footprint(moment="backward begins", gradients=gradients, activations=activations, **during)
        twice = VALUE_BYTES * has.trained.shared_values
        yield Footprint(moment="backward ends", gradients=trained + twice, activations=largest.end, **during)
        if sharded:
            # What is around the blocks is freed, and its gradients are copied and summed, before blocks are.
            copies = 2 * units.trained.full_around
            kept = during | {"gathered": stays - units.around, "buckets": received + copies}
            yield Footprint(moment="backward ends", gradients=trained, **kept)
        fewer = update + received  # Received values may have half precision.
        yield Footprint(
            moment="update", optimizer=state + update, gradients=units.trained.shard, estimated=fewer, **rest
        )

    def _divided(self, cell: Cell, rank: int, own: list[Stage]) -> int:
        """Return the number of microbatches that have the gradient of the input, but no gradients of weights;
        the first stage computes both at once."""
        if self.schedule not in SPLITTING or all(stage.stem for stage in own):
            return 0
        return 1 + self.kept(cell, rank) - self.in_flight(cell, rank)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        """Yield the messages of the rank that sends most activations; the first and the last stage sum the
        gradient of a shared parameter, unless one rank has both."""
        groups = self.groups(cell.gpus, cell.node_size)
        sent = (_edges(parts, own) for own in self.stages(cell, parts))
        payload, edges = max(sent, key=lambda each: each[0])
        yield term(
            "activations",
            "send",
            ("pipeline", groups.pipeline),
            payload=cell.batch_per_replica * payload / self._of_tokens(groups),
            operations=cell.accumulation * self.microbatches * edges,
            overlap="compute",
        )
        yield from self._messages_of_layers(cell, parts, groups)
        if groups.shard_ranks > 1:
            yield from self._messages_of_shards(cell, parts, groups)
        elif groups.replicate > 1:
            largest = self.updated_bytes(cell, parts)
            buckets = -(-largest // BUCKET_BYTES)
            across: Receivers = ("replicate", groups.replicate)
            yield term("gradients", "all-reduce", across, payload=largest, operations=buckets)
        if parts.trained.shared_values and groups.pipeline > 1 and self.schedule not in FOLDED:
            shared = padded_bytes(groups, _shared(parts.trained)) // groups.shard_ranks
            yield term("shared gradients", "all-reduce", ("pipeline", 2), payload=shared, operations=1)
        yield term("loss", "broadcast", ("pipeline", groups.pipeline), payload=_LOSS_BYTES, operations=1)

    def _messages_of_layers(self, cell: Cell, parts: ModelParts, groups: GroupLayout) -> Iterator[Term]:
        """Yield the messages within the layers of the rank with the largest blocks."""
        every = (parts_of_rank(parts, own) for own in self.stages(cell, parts))
        own = max(every, key=lambda one: sum(block.input for block in one.blocks))
        pieces, sequence = self.microbatches, self.splits_tokens
        if groups.tensor > 1:
            yield from activation_messages(
                cell, own, groups, self.checkpoints, sequence=sequence, pieces=pieces
            )
        if self.attention is not None:
            yield from attention_messages(cell, own, groups, self.attention, self.checkpoints, pieces=pieces)
        if groups.expert > 1:
            yield from row_messages(cell, own, groups, self.checkpoints, pieces=pieces)

    def _messages_of_shards(self, cell: Cell, parts: ModelParts, groups: GroupLayout) -> Iterator[Term]:
        """Yield the messages of the rank with the largest shards: a gathering of each unit in a step, or with
        `reshard` two of each block in a microbatch, and one sum of gradients of each unit."""
        padded = partial(padded_bytes, groups)
        every = (parts_of_rank(parts, own) for own in self.stages(cell, parts))
        own = max(every, key=lambda one: sum(map(padded, (one.around, *one.blocks))))
        often = 2 * cell.accumulation * self.microbatches if self.spec.flag("reshard") else 1
        summed: Collective = "reduce-scatter" if cell.backend == "nccl" else "all-reduce"
        for view in views(groups):
            gathered = [size for size in map(view.padded, (own.around, *own.blocks * often)) if size]
            sums, within = sums_of_units(view.padded, own), (view.dimension, view.ranks)
            if view.ranks > 1:
                payload, operations = sum(gathered) / view.ranks, len(gathered)
                what = f"parameters{view.of}"
                yield term(what, "all-gather", within, payload=payload, operations=operations)
                yield term_of(f"gradients{view.of}", summed, within, sums, overlap="none")
            if groups.replicate > 1:
                pieces = tuple(Piece(size / view.ranks, at) for size, at in sums)
                across: Receivers = ("replicate", groups.replicate)
                yield term_of(f"shards of gradients{view.of}", "all-reduce", across, pieces, overlap="none")

    def updated_bytes(self, cell: Cell, parts: ModelParts) -> int:
        groups = self.groups(cell.gpus, cell.node_size)
        every = (parts_of_rank(parts.trained, own) for own in self.stages(cell, parts))
        return max(sum(shard_bytes(groups, part) for part in (own.around, *own.blocks)) for own in every)

    def busiest_share(self, cell: Cell, parts: ModelParts) -> float:
        groups = self.groups(cell.gpus, cell.node_size)
        largest = max(_flops(parts, own, groups.tensor) for own in self.stages(cell, parts))
        return largest / groups.context / parts.flops

    def bubble(self, ranks: int) -> float:
        """Return (p - 1) / m, and a v-th of that with v stages a rank (Narayanan et al. 2021,
        arXiv:2104.04473, sections 2.2.1 and 2.2.2); each micro-batch has one bubble. With fewer microbatches
        than ranks the first one reaches p - m passes after the last one each next stage of a rank.

        A divided backward pass, with F, B and W the times of the forward pass and of both parts, leaves
        zero-bubble (p - 1) (F + B - W) / v (ZB-H1 in Qi et al. 2023, arXiv:2401.10241, table 2), or
        (p - 1) F / v if that is more, if m is at least p. ZB-V idles nowhere between its first and its last
        pass if F = B = W (section 6), but all ranks wait for the last one, which begins p - 1 passes late
        and has as many to catch up. F = B = W is assumed, as of products with weights; then the order of
        dualpipev, which torch computes without overlap, idles for the p - 1 passes of zbv.
        `order.idle_share` replays the order for other times, and `order.replayed_bubble` for those of each
        stage.
        """
        shape = self.shape(ranks)
        if self.schedule in FOLDED:
            late = max(shape.ranks - 1, 2 * (2 * shape.ranks - 1 - shape.pieces))
            return late / (6 * shape.pieces)
        if self.schedule == "zero-bubble" and shape.pieces < shape.ranks:
            return idle_share(shape)
        parts = 3 if self.schedule in SPLITTING else 1
        late = (shape.chunks - 1) * max(0, shape.ranks - shape.pieces)
        return (shape.ranks - 1 + late) / (parts * shape.pieces * shape.chunks)

    def replayed_bubble(self, ranks: int, seconds: Mapping[tuple[int, str], float]) -> float | None:
        return replayed_bubble(self.shape(ranks), seconds)


def parts_of_rank(parts: ModelParts, stages: list[Stage]) -> ModelParts:
    """Return what a rank with these stages has: with the last one, but not the first, it has a copy of a
    parameter that both ends share."""
    stem, head = (any(getattr(stage, end) for stage in stages) for end in ("stem", "head"))
    nothing = Part(weights=(), saved=Saved())
    last = replace(parts.head, weights=parts.head.weights + (() if stem else _shared(parts).weights))
    return replace(
        parts,
        stem=parts.stem if stem else nothing,
        blocks=tuple(parts.blocks[index] for stage in stages for index in stage.blocks),
        head=last if head else nothing,
        shared_values=parts.shared_values if stem and head else 0,
    )


def _shared(parts: ModelParts) -> Part:
    """Return the parameters that both ends share; the facts say only how many values there are."""
    values, trained = parts.shared_values, parts.trained.shared_values > 0
    rows = Weight(rows=values, trained=trained)
    found = next((weight for weight in parts.stem.weights if weight.values == values), rows)
    return Part(weights=(found,) if values else (), saved=Saved())


def _edges(parts: ModelParts, stages: list[Stage]) -> tuple[int, int]:
    """Return the bytes of one sample that stages send forward and backward (they receive as many), and the
    number of messages: a stage's input, and the gradient of its output, which is the input of the next
    block. Nothing is sent between two of these stages."""
    begins, ends = ({getattr(stage.blocks, at) for stage in stages} for at in ("start", "stop"))
    sent = [stage.blocks.start for stage in stages if not stage.stem and stage.blocks.start not in ends]
    sent += [stage.blocks.stop for stage in stages if not stage.head and stage.blocks.stop not in begins]
    return sum(parts.blocks[block].input for block in sent), len(sent)


def _flops(parts: ModelParts, stages: list[Stage], tensor: int) -> float:
    blocks = sum(parts.blocks[index].flops for stage in stages for index in stage.blocks)
    return blocks / tensor + sum(
        parts.stem.flops * stage.stem + parts.head.flops * stage.head for stage in stages
    )


def microbatch_counts(samples: int, stages: int) -> list[int]:
    """Return divisors of a micro-batch that keep all stages busy, each at least twice the one before.

    Without such a divisor return the number of stages, for which the micro-batch is too small.
    """
    found: list[int] = []
    for count in range(stages, samples + 1):
        if samples % count == 0 and (not found or count >= 2 * found[-1]):
            found.append(count)
    return found or [stages]


def balanced_cut(costs: Sequence[int], stages: int) -> list[range]:
    """Return runs of blocks, one for each stage and none empty, whose largest cost is minimal.

    `costs` has at least as many blocks as there are stages. Among equally good cuts, blocks are in the latest
    possible stage: an early stage keeps the activations of more microbatches (1F1B).
    """
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _late_runs(costs, stages, middle)[0].start == 0:
            high = middle
        else:
            low = middle + 1
    return _late_runs(costs, stages, low)


def _late_runs(costs: Sequence[int], stages: int, most: int) -> list[range]:
    """Return runs from the last stage back, each as long as a cost of `most` and the stages before it allow.

    The first run begins after block 0 if the blocks do not fit.
    """
    runs = []
    end = len(costs)
    for before in reversed(range(stages)):
        begin = end - 1
        held = costs[begin]
        while begin > before and held + costs[begin - 1] <= most:
            begin -= 1
            held += costs[begin]
        runs.append(range(begin, end))
        end = begin
    return runs[::-1]
