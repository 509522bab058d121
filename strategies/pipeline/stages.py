"""A model cut into a pipeline's stages: the cost of its pieces, their ranks, and the modules of each rank.

A model with a cuttable layout is `head(block_n(... block_1(stem(inputs))))`. The first stage has the stem
and the last one the head, whatever they cost; the blocks are divided into runs, one a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.advice import SPLIT, WHOLE
from strategies.pipeline.facts import balanced_cut
from strategies.pipeline.order import stages_of
from strategies.training.flops import FlopCounter
from strategies.training.layouts import layout_module, require_dense

StageFunction = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The division of a model into stages, and the ranks of a pipeline that have them."""

    layout: ModelLayout
    runs: tuple[range, ...]
    """The blocks of each stage, by their indices in the layout."""
    ranks: int
    schedule: str = "1f1b"

    @property
    def stages(self) -> int:
        return len(self.runs)

    def stages_of(self, rank: int) -> list[int]:
        return stages_of(self.schedule, rank, self.ranks, self.stages)

    def rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self.ranks) if stage in self.stages_of(rank))

    def modules(self, stage: int) -> list[str]:
        """Return the names of a stage's modules in the order of the forward pass."""
        names = [self.layout.blocks[block] for block in self.runs[stage]]
        if stage == 0:
            names = [*self.layout.stem, *names]
        return [*names, *self.layout.head] if stage == self.stages - 1 else names

    def pieces(self, module: nn.Module, stage: int) -> list[StageFunction]:
        """Return the functions that a stage calls, one after another."""
        pieces: list[StageFunction] = [
            module.get_submodule(self.layout.blocks[block]) for block in self.runs[stage]
        ]
        # A rank has only the modules of its own stages.
        if stage == 0:
            pieces = [*_end(module, self.layout, "stem"), *pieces]
        if stage == self.stages - 1:
            pieces = [*pieces, *_end(module, self.layout, "head")]
        return pieces

    def ranks_of(self, module: nn.Module) -> dict[Tensor, set[int]]:
        """Return the ranks that have each parameter and buffer of the complete model."""
        found: dict[Tensor, set[int]] = {}
        for stage in range(self.stages):
            for name in self.modules(stage):
                part = module.get_submodule(name)
                for tensor in (*part.parameters(), *part.buffers()):
                    found.setdefault(tensor, set()).add(self.rank_of(stage))
        return found


def _end(module: nn.Module, layout: ModelLayout, end: Literal["stem", "head"]) -> list[StageFunction]:
    """Return the functions that are called before the blocks, or after them."""
    if layout.chained:
        return [module.get_submodule(name) for name in getattr(layout, end)]
    return [getattr(module, end)]


def cut_model(
    module: nn.Module, twin: Twin, layout: ModelLayout, *, ranks: int, stages: int, schedule: str = "1f1b"
) -> Cut:
    """Return the cut whose largest stage is minimal, by the FLOPs of the forward pass of one sample.

    Raises UsageError, with advice, for a model that cannot be cut into these stages.
    """
    if stages > len(layout.blocks):
        raise UsageError(
            f"{len(layout.blocks)} blocks are too few for {stages} stages: use fewer ranks or chunks"
        )
    stem, *costs, head = twin.costs(layout)
    costs[0] += stem
    costs[-1] += head
    cut = Cut(layout=layout, runs=tuple(balanced_cut(costs, stages)), ranks=ranks, schedule=schedule)
    _require_owners(module, cut)
    return cut


def require_cuttable(module: nn.Module, layout: ModelLayout) -> None:
    """Raise UsageError, with advice, for a model that cannot be cut into a pipeline."""
    has_ends = layout.chained or (hasattr(module, "stem") and hasattr(module, "head"))
    if not layout.can_be_cut or not has_ends:
        raise UsageError(
            "pipeline cuts a model between its blocks, which this one does not name: give it a layout and "
            f"the methods stem and head, or {SPLIT}"
        )
    for name in (*layout.stem, *layout.blocks, *layout.head):
        layout_module(module, name)
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise UsageError(
                f"pipeline does not support dropout ({name} has p={part.p:g}): each stage draws its own "
                f"random numbers, so that no proof could check it; set p=0, or {SPLIT}"
            )
    require_dense(module, "pipeline", WHOLE)


def _require_owners(module: nn.Module, cut: Cut) -> None:
    """Require that each tensor is in a stage, each rank has a parameter, and only both ends share a
    parameter."""
    owners = cut.ranks_of(module)
    busy: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor not in owners:
            raise UsageError(
                f"pipeline finds no stage for {name}: it is in no block, stem or head of the layout"
            )
        if isinstance(tensor, nn.Parameter):
            busy |= owners[tensor]
            if len(owners[tensor]) > 1 and owners[tensor] != {0, cut.rank_of(cut.stages - 1)}:
                raise UsageError(
                    f"pipeline shares parameters only between its first and last stage, and {name} is also "
                    f"in another: {SPLIT}"
                )
    if len(busy) < cut.ranks:
        raise UsageError("a stage of the pipeline would have no parameters: use fewer ranks or chunks")


@dataclass(kw_only=True, eq=False)
class Call:
    """One call of a module in a forward pass."""

    name: str
    module: nn.Module
    positional: tuple[object, ...]
    named: dict[str, object]
    first: bool
    """Whether it takes the model's inputs as they are."""
    versions: tuple[int, ...]
    """The versions of its positional tensors when it was called: the number of writes to them."""
    result: object = None
    written: int = -1
    """The version of the result when it was returned."""

    @property
    def changed(self) -> bool:
        """Whether the result has been written to since."""
        return isinstance(self.result, Tensor) and self.result._version != self.written

    def takes(self, before: Call) -> bool:
        """Return whether its input is the unchanged result of another call."""
        given = self.positional[0] if self.positional else None
        return given is before.result and self.versions[:1] == (before.written,)


def _hooks(root: nn.Module, name: str, inputs: Tensor, calls: list[Call]) -> Sequence[RemovableHandle]:
    """Register hooks that record the calls of one module."""

    def begins(module: nn.Module, positional: tuple[object, ...], named: dict[str, object]) -> None:
        versions = tuple(each._version for each in positional if isinstance(each, Tensor))
        first = bool(positional) and positional[0] is inputs and versions[0] == 0
        calls.append(
            Call(name=name, module=module, positional=positional, named=named, first=first, versions=versions)
        )

    def ends(module: nn.Module, positional: object, result: object) -> None:
        calls[-1].result = result
        calls[-1].written = result._version if isinstance(result, Tensor) else -1

    part = root.get_submodule(name)
    return part.register_forward_pre_hook(begins, with_kwargs=True), part.register_forward_hook(ends)


class Twin:
    """A copy of a model on the meta device (without memory and arithmetic): it gives the shapes and FLOPs of
    the model's pieces.

    Shapes and FLOPs are taken in evaluation mode, in which BatchNorm accepts one sample as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, object] = {}
        for parameter in module.parameters():
            fake = self._mode.from_tensor(parameter.detach())
            known[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            known[id(buffer)] = self._mode.from_tensor(buffer)
        # The copy takes `known` as the copies of all tensors, so that the model is in memory only once.
        self._module = copy.deepcopy(module, known).eval()
        self._first = next(self._module.parameters(), torch.empty(0))

    def costs(self, layout: ModelLayout) -> list[int]:
        """Return the FLOPs of the forward pass of one sample: of the stem, of each block, of the head.

        If FLOPs are unknown, blocks count alike, as in the parts of a user's model (`results.parts.Part`).

        Raises UsageError for a model whose computation depends on the values of its tensors.
        """
        counted = getattr(torch, layout.sample_type)
        # A model in double precision takes inputs in double precision.
        dtype = self._first.dtype if counted.is_floating_point else counted
        try:
            return self._counted(layout, self.tensor((1, *layout.sample), dtype))
        except Exception as error:  # on the meta device a user's model may raise any exception
            raise UsageError(
                f"pipeline is cut by FLOPs, which cannot be counted on the meta device: {error}; {SPLIT}"
            ) from error

    def _counted(self, layout: ModelLayout, x: Tensor) -> list[int]:
        module, costs = self._module, []
        pieces: list[Sequence[StageFunction]] = [_end(module, layout, "stem")]
        pieces += [[module.get_submodule(name)] for name in layout.blocks]
        pieces += [_end(module, layout, "head")]
        # The backend is named, so that the count does not depend on the attention kernel that torch prefers.
        with self._mode, sdpa_kernel(SDPBackend.MATH), FlopCounter(module) as counter:
            for functions in pieces:
                before = counter.total
                for function in functions:
                    x = function(x)
                costs.append(counter.total - before)
        known = counter.uncounted is None and counter.unread is None
        return costs if known else [0, *(1 for _ in layout.blocks), 0]

    def calls(self, names: Sequence[str], inputs: Tensor, *, training: bool) -> tuple[list[Call], object]:
        """Return the calls of these modules in a forward pass over two samples like `inputs` (BatchNorm needs
        two in training), and its result.

        Raises any error of a forward pass on the meta device.
        """
        calls: list[Call] = []
        with self._mode:
            dtype = self._first.dtype if inputs.is_floating_point() else inputs.dtype
            x = self.tensor((2, *inputs.shape[1:]), dtype)
            hooks = [hook for name in names for hook in _hooks(self._module, name, x, calls)]
            try:
                output = self._module.train(training)(x)
            finally:
                self._module.eval()
                for hook in hooks:
                    hook.remove()
        return calls, output

    def edges(self, cut: Cut, inputs: Tensor, context: Context) -> list[Tensor]:
        """Return the input of the first stage, `inputs`, and the output of each stage, computed in
        `context`."""
        edges = [inputs]
        with self._mode:
            for stage in range(cut.stages):
                edges.append(StageModule(cut.pieces(self._module, stage), context)(edges[-1]))
        return edges

    def tokens_of(self, edge: Tensor, ranks: int) -> Tensor:
        """Return the tokens of one of `ranks` ranks of an edge, (samples, tokens, ...)."""
        part = self.tensor((len(edge), edge.shape[1] // ranks, *edge.shape[2:]), edge.dtype)
        return part.requires_grad_(edge.requires_grad)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without values on the model's device."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=self._first.device)


class StageModule(nn.Module):
    """Pieces of a model one after another; their parameters stay the model's, under the model's names."""

    def __init__(
        self, pieces: Sequence[StageFunction], context: Context, parts: Sequence[nn.Module] = ()
    ) -> None:
        """`context` is the context of the computation, such as autocast; `parts` have the parameters, which
        torch asks a stage for if it divides a backward pass."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._pieces = tuple(pieces)
        self._context = context

    def forward(self, x: Tensor) -> Tensor:
        with self._context():
            for piece in self._pieces:
                x = piece(x)
        # The next stage gets the bytes as they lie in memory, so they must be contiguous.
        return x.contiguous()


def prune(module: nn.Module, kept: Collection[str], path: str = "") -> None:
    """Delete all modules except the `kept` ones, their parts, and the modules that contain them.

    The modules that remain keep their names. `path` is the name of `module` with a dot after it.
    """
    for name, part in list(module._modules.items()):
        if part is None or path + name in kept:
            continue
        inner = f"{path}{name}."
        if any(other.startswith(inner) for other in kept):
            prune(part, kept, inner)
        else:
            delattr(module, name)
