"""The discrete choices of a step: recorded on the ranks, and repeated and judged by its simulation.

The best k of some scores (`workloads.choices`) are not continuous in them. If two scores are nearly equal,
ranks that sum in another order send a token elsewhere, rightly, and no bound on its gradients holds. So a
simulation takes every choice from the ranks and compares gradients of equal choices. The choices themselves
are judged by the scores that the simulation computes meanwhile.

The bound. If no score differs by more than d between a rank and the simulation, nor does the i-th largest, so
that the score of the rank's i-th choice is within 2 d of the simulation's i-th largest. On CPU in fp32,
uncompiled, both sides do the same arithmetic: d = 0. Elsewhere rounding is a share of the terms of a score.
The scores of a token are sums of equally many and large terms, and so their deviation shows the size of an
error: 2 d is `NEAR` times the deviation of all scores of the call. Scores of moe-nano, of 4 layers and of 24,
that take products and sums in halves, as another kernel may, differ by at most 57 units of roundoff of the
deviation in fp32 and by 10 in bf16 and fp16, where two choices were exchanged at a distance of up to 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from harness.worker.proof.comparison import ProofFinding
from harness.worker.proof.reference import exact_arithmetic
from results.cell import Cell, Precision
from results.groups import GroupLayout
from strategies.catalog import STRATEGIES
from strategies.context.facts import GATHERED
from workloads.choices import Choice

NEAR: Mapping[Precision, float] = MappingProxyType(
    {"fp32": 2.0**-14, "tf32": 2.0**-7, "bf16": 2.0**-4, "fp16": 2.0**-7, "float8": 2.0**-1}
)
"""Distance of two scores that rounding may exchange, relative to the deviation of the scores: 16 units of
roundoff; in fp32, where even 1024 are little, 1024. The products of float8 moved scores by 0.22 of it."""

Recorded = dict[str, list[Tensor]]
"""The choices of one rank in one step by the name of the module, call after call: (tokens, k) in host
memory."""
Watch = Callable[[str, Tensor, Tensor], Tensor | None]
"""Gets a module's name, its scores and the places that it has chosen; may return others."""


@contextmanager
def recorded(module: nn.Module, cell: Cell) -> Iterator[Recorded]:
    """Record what the choices in `module` choose in this context, but not a forward pass that is only
    repeated.

    Nothing is recorded of a compiled cell: the compiler would not see that the recording has ended.
    """
    found: Recorded = {}

    def record(name: str, scores: Tensor, chosen: Tensor) -> None:
        if not _repeats():
            found.setdefault(name, []).append(chosen.flatten(0, -2).to("cpu", torch.int32))

    with nullcontext() if cell.compile else _watched(module, record):
        yield found


@contextmanager
def _watched(module: nn.Module, watch: Watch) -> Iterator[None]:
    def hook(name: str, _: nn.Module, inputs: tuple[Tensor, ...], chosen: Tensor) -> Tensor | None:
        return watch(name, inputs[0].detach(), chosen)

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            if isinstance(part, Choice):
                hooks.enter_context(part.register_forward_hook(partial(hook, name)))
        yield


def _repeats() -> bool:
    """Return whether a backward pass is under way, in which activation checkpointing repeats a forward
    pass."""
    return torch._C._current_graph_task_id() != -1


class Choices:
    """Has the simulations of one step choose what all ranks chose in it."""

    def __init__(
        self, cell: Cell, groups: GroupLayout, every: Sequence[Recorded], findings: list[ProofFinding]
    ) -> None:
        """`every` are the choices of each rank; what is wrong with them is added to `findings`."""
        self._groups, self._every, self._findings = groups, every, findings
        facts = STRATEGIES.facts(cell.strategy)
        self._samples = cell.micro_batch // facts.microbatches
        """The samples of a forward pass."""
        self._ends = facts.attention == GATHERED
        """Whether a rank has two parts of each sequence, one near its head and one near its tail."""
        self._near = 0.0 if exact_arithmetic(cell) else NEAR[cell.precision]

    @contextmanager
    def repeated(self, module: nn.Module, replica: int, *, judged: bool = True) -> Iterator[None]:
        """Have `module`, in the forward passes of a replica's step, choose what its ranks chose.

        If `judged`, a choice that differs from the module's own by more than rounding is a finding.
        """
        ranks = {rank: own for rank, own in enumerate(self._every) if self._groups.replica(rank) == replica}
        calls: Counter[str] = Counter()
        last: dict[str, Tensor] = {}

        def repeat(name: str, scores: Tensor, own: Tensor) -> Tensor | None:
            if not _repeats():
                taken = self._taken(name, ranks, calls[name], own.flatten(0, -2))
                calls[name] += 1
                last.pop(name, None)
                if taken is not None:
                    last[name] = taken.to(own).view_as(own)
                    if judged:
                        self._judge(f"{name} in pass {calls[name]} of replica {replica}", scores, last[name])
            return last.get(name)

        with _watched(module, repeat):
            yield
        for rank, own in ranks.items():
            for name, chosen in own.items():
                what = f"rank {rank} chose {len(chosen)} times in {name}, and the simulation {calls[name]}"
                self._found(what, float(len(chosen) != calls[name]), 0.0)

    def _taken(self, name: str, ranks: Mapping[int, Recorded], call: int, own: Tensor) -> Tensor | None:
        """Return the choices of a replica's ranks, (tokens, k) in the order of whole samples; None if they
        chose nothing for a token."""
        taken = torch.full(own.shape, -1, dtype=torch.int32)
        for rank, recorded in ranks.items():
            if call >= len(recorded.get(name, ())):
                continue
            chosen = recorded[name][call]
            places = self._places(rank, len(own), len(chosen))
            if places is None:
                what = f"rank {rank} chose for {len(chosen)} tokens in {name}, of {len(own)} in the replica"
                self._found(what, 1.0, 0.0)
                continue
            before = taken[places]
            different = (before != chosen) & (before >= 0)
            self._found(f"ranks that compute the same tokens chose otherwise in {name}", different.sum(), 0.0)
            taken[places] = chosen
        return taken if (taken >= 0).all() else None

    def _places(self, rank: int, tokens: int, own: int) -> Tensor | None:
        """Return the places of a rank's `own` tokens among the `tokens` of a forward pass; None if they are
        others.

        If each rank of a sequence has a part of it, or the ranks of a layer have parts of that, is known by
        their numbers.
        """
        groups, place = self._groups, self._groups.place(rank)
        length = tokens // self._samples
        at = torch.arange(length)
        if own < tokens and groups.context > 1:
            first = place["context"]
            parts = at.chunk(2 * groups.context if self._ends else groups.context)
            at = torch.cat([parts[first], parts[-1 - first]]) if self._ends else parts[first]
        if own < self._samples * len(at) and groups.tensor > 1:
            at = at.chunk(groups.tensor)[place["tensor"]]
        places = (torch.arange(self._samples)[:, None] * length + at).flatten()
        return places if len(places) == own else None

    def _judge(self, where: str, scores: Tensor, taken: Tensor) -> None:
        """Compare the scores of the choices that are taken with the largest ones, place by place."""
        scores, taken = scores.flatten(0, -2).double(), taken.flatten(0, -2)
        distances = (scores.topk(taken.shape[-1]).values - scores.gather(1, taken)).abs().amax(1)
        deviation = (scores - scores.mean(1, keepdim=True)).square().mean().sqrt()
        worst = int(distances.argmax())
        farthest, bound = float(distances[worst]), self._near * float(deviation)
        sample, token = divmod(worst, len(scores) // self._samples)
        what = (
            f"{where} chooses {taken[worst].tolist()} for token {token} of sample {sample}, with scores that "
            f"are up to {farthest:.3g} from the largest in the serial simulation, more than {bound:.3g}"
        )
        self._found(what, farthest, bound)

    def _found(self, what: str, difference: float | Tensor, bound: float) -> None:
        finding = ProofFinding.within("choices", what, float(difference), bound)
        if not finding.passed:
            self._findings.append(finding)
