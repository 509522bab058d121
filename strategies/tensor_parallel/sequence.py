"""Sequence parallelism: between the layers that are split, each rank has a part of the tokens.

Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. A rank gathers the tokens before a layer that is
split by outputs, and receives the sums of its part of the tokens after one that is split by inputs; the
backward pass does the opposite. The gathered tokens are kept until then. Parameters of a block that are not
split (norms, biases that are added after a sum) see the tokens of one rank, and their gradients are summed
over the ranks.
Stem and head stay whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.closed_form.terms import BUCKET_BYTES
from strategies.collectives.link import Link
from strategies.facts import uneven_tokens
from strategies.training.layouts import homes_of, layout_module

_MIXERS = (_NormBase, nn.GroupNorm, _ConvNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules that compute a token from others."""
_OTHERWISE = "leave sequence=true out"
Move = Callable[[Tensor, Link], Tensor]


class Exchange(torch.autograd.Function):
    """Moves an activation by one function, and its gradient by another."""

    @staticmethod
    def forward(context: Any, values: Tensor, link: Link, there: Move, back: Move) -> Tensor:
        context.link, context.back = link, back
        return there(values, link)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return context.back(gradient, context.link), None, None, None


def exchanged(values: Tensor, link: Link, there: Move, back: Move) -> Tensor:
    result: Tensor = Exchange.apply(values, link, there, back)  # type: ignore[no-untyped-call]
    return result


def own_tokens(values: Tensor, link: Link) -> Tensor:
    """Return this rank's tokens of (n, tokens, ...), copied, so that no rank keeps the others."""
    return values.chunk(link.size, dim=1)[link.rank].clone(memory_format=torch.contiguous_format)


def all_tokens(values: Tensor, link: Link) -> Tensor:
    """Gather the tokens of all ranks."""
    gathered = link.all_gather(values.flatten()).view(link.size, *values.shape)
    return gathered.movedim(0, 1).flatten(1, 2)


def own_sums(values: Tensor, link: Link) -> Tensor:
    """Return the sums over the ranks of this rank's tokens."""
    samples, tokens, *others = values.shape
    for_ranks = values.reshape(samples, link.size, tokens // link.size, *others).movedim(1, 0).contiguous()
    return link.reduce_scatter(for_ranks.view(link.size, -1)).view(for_ranks.shape[1:])


class SequenceSplit:
    """The part of the tokens that this rank has between the first and the last block."""

    def __init__(self, module: nn.Module, layout: ModelLayout, link: Link) -> None:
        """Raises UsageError for a model whose layout does not say where tokens are split."""
        _require_blocks(module, layout)
        self._link, self._within = link, False
        self._tokens = 0
        """The tokens of this rank."""
        blocks = [layout_module(module, name) for name in layout.blocks]
        module.register_forward_pre_hook(self._start)
        blocks[0].register_forward_pre_hook(partial(self._begin, layout.blocks[0]))
        blocks[-1].register_forward_hook(partial(self._end, layout.blocks[-1]))
        for name, block in zip(layout.blocks, blocks, strict=True):
            block.register_forward_pre_hook(partial(self._check, name), with_kwargs=True)
        homes = homes_of(module, layout)
        inside = {parameter for parameter, places in homes.items() if places != {""}}
        self._names = {name for name, parameter in module.named_parameters() if parameter in inside}
        for name, part in module.named_modules():
            if name and any(value not in inside for value in part.parameters(recurse=False)):
                part.register_forward_pre_hook(partial(self._outside, name))

    @torch.no_grad()
    def sum_gradients(self, gradients: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        """Sum over the ranks the gradients of parameters that have seen the tokens of one rank, in place.

        `gradients` are the gradients of the parameters that are not split, by name; `device` is one that the
        link can send from. Collective.
        """
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, gradient in gradients:
            if name not in self._names:
                continue
            if gradient.nbytes <= BUCKET_BYTES:
                alike[gradient.dtype].append(gradient)
                continue
            # A large one, of experts for example, is not copied.
            there = gradient.to(device).contiguous()
            self._link.all_reduce(there)
            if there is not gradient:
                gradient.copy_(there)
        for group in alike.values():
            total = torch.cat([gradient.flatten().to(device) for gradient in group])
            self._link.all_reduce(total)
            for gradient, own in zip(
                group, torch.split(total, [each.numel() for each in group]), strict=True
            ):
                gradient.copy_(own.view_as(gradient))

    @property
    def ranks(self) -> int:
        return self._link.size

    def begin_stage(self, x: Tensor, *, first: bool) -> Tensor:
        """Begin the forward pass of a stage of a pipeline; all except the `first` stage take a part of the
        tokens."""
        self._tokens, self._within = 0 if first else x.shape[1], not first
        return x

    def _start(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forget a forward pass that an error ended between two blocks."""
        self._within = False

    def _begin(self, name: str, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give the first block this rank's tokens."""
        first, *others = inputs or (None,)
        if not isinstance(first, Tensor) or first.dim() < 3:
            _refuse(f"the first input of {name} by position is not (samples, tokens, features)")
        if reason := uneven_tokens(first.shape[1], self._link.size):
            _refuse(reason)
        self._tokens, self._within = first.shape[1] // self._link.size, True
        return exchanged(first, self._link, own_tokens, all_tokens), *others

    def _check(self, name: str, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Refuse a block with inputs of another form, or with others that get a gradient, of which each rank
        would have a part."""
        first, *others = inputs or (None,)
        if not isinstance(first, Tensor) or first.dim() < 3 or first.shape[1] != self._tokens:
            _refuse(f"the first input of {name} by position is not the output of the block before it")
        others += named.values()
        if any(isinstance(value, Tensor) and value.requires_grad for value in others):
            _refuse(f"{name} takes a second input that gets a gradient")

    def _end(self, name: str, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        """Give what follows the last block all tokens; every rank computes the same gradient of them."""
        self._within = False
        if not isinstance(output, Tensor) or output.dim() < 3 or output.shape[1] != self._tokens:
            _refuse(f"{name} does not return (samples, tokens, features)")
        return exchanged(output, self._link, all_tokens, own_tokens)

    def _outside(self, name: str, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._within:
            _refuse(f"{name} is called between two blocks, and is in none")


def _require_blocks(module: nn.Module, layout: ModelLayout) -> None:
    within = tuple(f"{block}." for block in layout.blocks)
    for split in layout.splits:
        if not split.name.startswith(within):
            _refuse(f"{split.name} is in none of the blocks that the layout names")
    for name, part in module.named_modules():
        if name.startswith(within) and isinstance(part, _MIXERS):
            _refuse(f"{name}, a {type(part).__name__}, computes tokens from others")
    for name, parameter in module.named_parameters():
        homes = homes_of(module, layout)[parameter]
        if "" in homes and len(homes) > 1:
            _refuse(f"{' and '.join(sorted(filter(None, homes)))} and what is around the blocks share {name}")


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"sequence parallelism splits the tokens between the blocks, and {why}: {_OTHERWISE}")
