"""Tensor parallelism: every rank computes a part of each layer, on the same data.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. Linear layers come in pairs: the first is split by its
outputs, the layers between work on each part separately (heads, activation functions), and the second is
split by its inputs, so that the results of the ranks add up to the complete output. A pair needs one sum of
activations in the forward pass, after the second layer, and one of gradients in the backward pass, before the
first; parallel layers with the same input (query, key and value) share that sum. A rank thus exchanges two
sums of (samples, tokens, width) in each pass of a Transformer's block, for any number of ranks.

Every rank has all parameters that are not split: embeddings, norms, the head, and the biases that are added
after a sum, each with its gradient and optimizer state. All ranks compute these values identically, without
an exchange, as long as kernels compute the same bits from the same inputs. Kernels that add in no fixed order
(such as the one for an embedding's gradient on CUDA) break this. The memory of parameters that are not split
does not shrink with more ranks.

With `sequence=true` each rank has a part of the tokens between the layers that are split: see `sequence.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from results.errors import UsageError
from results.layout import LinearSplit, ModelLayout
from strategies.advice import SPLIT
from strategies.collectives.link import Link
from strategies.tensor_parallel.sequence import SequenceSplit, all_tokens, exchanged, own_sums
from strategies.training.boxes import Owned
from strategies.training.clipping import clip_shards
from strategies.training.layouts import layout_module, require_unhooked
from strategies.training.parallel import OptimizerState, ParallelModel, Setting
from strategies.training.replicas import Begin, take_values
from strategies.training.slicing import Slicing, Slicings

_OTHERWISE = f"{SPLIT}, which splits any model"


class TensorSplit:
    """A module whose layers have been split over the ranks of a link."""

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        link: Link,
        slicings: Slicings,
        begin: Begin,
        *,
        sequence: bool = False,
    ) -> None:
        """Split `module` in place; weights and biases stay parameters of their names, and their division is
        added to `slicings`.

        `begin` gives each layer its values, equal on all ranks, just before it is split, so that one layer is
        complete at a time; parameters that are not split get no values. With `sequence` each rank has a part
        of the tokens between the layers that are split. Raises UsageError for a model that cannot be split
        into as many parts as the link has ranks.
        """
        _require_splittable(module, layout, link.size)
        self.sequence = SequenceSplit(module, layout, link) if sequence else None
        self._slicings = slicings
        for _, run in groupby(layout.splits, key=lambda split: (_owner(split.name), split.by)):
            beside = list(run)
            entrance = _Entrance(link, len(beside), sequence=sequence)
            for split in beside:
                _split(module, split, entrance, link, slicings, begin)
        for name in layout.heads:
            owner, attribute = module.get_submodule(_owner(name)), name.rpartition(".")[2]
            setattr(owner, attribute, getattr(owner, attribute) // link.size)

    def sum_gradients(self, gradients: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        """Sum the gradients, by name, of parameters that are not cut and have seen only the tokens of this
        rank. Collective."""
        if self.sequence is not None:
            whole = ((name, value) for name, value in gradients if not self._slicings.cut(name))
            self.sequence.sum_gradients(whole, device)


class TensorParallelModel(ParallelModel):
    """One replica, split over all ranks, which get the same data and exchange only activations."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0."""
        super().__init__(module)
        self._device = setting.device
        link = self._link = self.decided_over = Link(setting.exchange.group)
        begin = partial(take_values, link, setting.fill)
        sequence = setting.spec.flag("sequence")
        self._slicings = Slicings()
        self._split = TensorSplit(module, setting.layout, link, self._slicings, begin, sequence=sequence)
        begin(value for name, value in module.named_parameters() if not self._slicings.cut(name))
        begin(module.buffers())

    def owned(self) -> Iterator[Owned]:
        return self._slicings.owned(self.bare.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in super().named_parameters():
            yield name, self._slicings.whole(name, parameter)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, gradient in super().named_gradients():
            yield name, self._slicings.whole(name, gradient)

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        shapes = {name: parameter.shape for name, parameter in self.bare.named_parameters()}
        for name, state in super().named_state(optimizer):
            whole: OptimizerState = {}
            for key, value in sorted(state.items()):
                laid_out_alike = isinstance(value, Tensor) and value.shape == shapes[name]
                whole[key] = self._slicings.whole(name, cast(Tensor, value)) if laid_out_alike else value
            yield name, whole

    @contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        yield
        if now:
            self._split.sum_gradients(super().named_gradients(), self._device)

    def clip_gradients(self, max_norm: float) -> Tensor:
        link = self._link
        gradients = [
            (value, self._slicings.copies(name, link.size)) for name, value in super().named_gradients()
        ]
        return clip_shards(gradients, max_norm, link, self._device)


def _same(values: Tensor, link: Link) -> Tensor:
    return values.view_as(values)


def _sum(values: Tensor, link: Link) -> Tensor:
    # A copy: autograd owns the gradient, and selective checkpointing keeps a product for later.
    total = values.clone(memory_format=torch.contiguous_format)
    link.all_reduce(total)
    return total


class _Entrance:
    """Passes an activation to parallel layers that are split by outputs, which share one sum of its
    gradient."""

    def __init__(self, link: Link, layers: int, *, sequence: bool) -> None:
        """`sequence`: gather the tokens of all ranks too."""
        self.link, self.sequence = link, sequence
        self._layers = layers
        self._left = 0
        self._seen: tuple[Tensor, Tensor] | None = None
        """The last activation and its result, until all layers have received it."""

    def enter(self, x: Tensor) -> Tensor:
        """Return `x` with a sum of its gradient, which layers with the same input share."""
        if self._seen is None or self._seen[0] is not x:
            moves = (all_tokens, own_sums) if self.sequence else (_same, _sum)
            inside = exchanged(x, self.link, *moves)
            self._seen, self._left = (x, inside), self._layers
        inside = self._seen[1]
        self._left -= 1
        if self._left == 0:
            self._seen = None
        return inside


class _SplitByOutputs(nn.Module):
    """A linear layer with this rank's outputs: (..., inputs) to (..., outputs / ranks)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, entrance: _Entrance) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._entrance = entrance

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._entrance.enter(x), self.weight, self.bias)


class _SplitByInputs(nn.Module):
    """A linear layer with this rank's inputs, summed over the ranks: (..., inputs / ranks) to (..., outputs).

    The bias is not split, and is added once. With `sequence` each rank receives the sums of its tokens.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, link: Link, *, sequence: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._link, self._sequence = link, sequence

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(x, self.weight)
        moves = (own_sums, all_tokens) if self._sequence else (_sum, _same)
        total = exchanged(part, self._link, *moves)
        return total if self.bias is None else total + self.bias.to(total.dtype)


def _split(
    module: nn.Module,
    split: LinearSplit,
    entrance: _Entrance,
    link: Link,
    slicings: Slicings,
    begin: Begin,
) -> None:
    """Replace a layer by this rank's part."""
    layer = module.get_submodule(split.name)
    assert isinstance(layer, nn.Linear)
    slicing = Slicing(link=link, dim=1 if split.by == "inputs" else 0, parts=split.parts)
    slicings.add(f"{split.name}.weight", slicing)
    if split.by == "inputs":
        begin([layer.weight])
        weight = slicing.parameter(layer.weight)
        part: nn.Module = _SplitByInputs(weight, layer.bias, link, sequence=entrance.sequence)
    else:
        slicings.add(f"{split.name}.bias", slicing)
        begin(layer.parameters())
        bias = None if layer.bias is None else slicing.parameter(layer.bias)
        part = _SplitByOutputs(slicing.parameter(layer.weight), bias, entrance)
    module.set_submodule(split.name, part)


def _require_splittable(module: nn.Module, layout: ModelLayout, ranks: int) -> None:
    if not layout.splits:
        raise UsageError(f"tensor parallelism needs a model whose layout says what it splits: {_OTHERWISE}")
    for split in layout.splits:
        _require_layer(module, split, ranks)
    for name in layout.heads:
        count = getattr(layout_module(module, _owner(name)), name.rpartition(".")[2])
        if count % ranks:
            raise UsageError(f"{name} ({count}) must be a multiple of the ranks ({ranks}): {_OTHERWISE}")
    for name, part in module.named_modules():
        if isinstance(part, _DropoutNd) and part.p > 0:
            raise UsageError(
                f"tensor parallelism does not support dropout ({name}): ranks would draw the same mask for "
                f"different parts of an activation; set p=0, or {_OTHERWISE}"
            )


def _require_layer(module: nn.Module, split: LinearSplit, ranks: int) -> None:
    layer = layout_module(module, split.name)
    require_unhooked(layer.named_parameters(split.name), "tensor parallelism")
    if not isinstance(layer, nn.Linear):
        raise UsageError(f"tensor parallelism splits only nn.Linear, not {split.name}: {_OTHERWISE}")
    features = layer.out_features if split.by == "outputs" else layer.in_features
    if features % (split.parts * ranks):
        raise UsageError(
            f"the {split.by} of {split.name} ({features}) must be a multiple of its matrices ({split.parts}) "
            f"times the ranks ({ranks}): {_OTHERWISE}"
        )
    users = [name for name, value in module.named_parameters(remove_duplicate=False) if value is layer.weight]
    if len(users) > 1:
        raise UsageError(
            f"tensor parallelism cannot split {split.name}.weight, because {', '.join(users)} share it: "
            f"{_OTHERWISE}"
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
