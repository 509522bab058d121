"""Strategies of tests: ranks average gradients, all or in pairs, or parameters in pairs every second step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from strategies.closed_form.terms import Term, runs, term
from strategies.collectives.link import Link
from strategies.exchange.buckets import buckets_of
from strategies.facts import StrategyFacts
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.promise import Promise
from strategies.training.loss import Batch
from strategies.training.parallel import GradientTask, ParallelModel, Setting
from strategies.training.replicas import take_from_first


def pair(replica: int, replicas: int) -> Sequence[int]:
    """0 and 1, 2 and 3."""
    first = replica // 2 * 2
    return range(first, min(first + 2, replicas))


class PairedGradients(StrategyFacts):
    """Replicas of a pair stay equal; pairs differ."""

    name = "paired-gradients"
    help = "gradients are averaged in pairs"
    model = f"{__name__}:PairedGradientsModel"
    promise = Promise(partners=pair)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        return iter(())


class PairedParameters(PairedGradients):
    """Replicas of a pair are equal after every second step."""

    name = "paired-parameters"
    help = "parameters are averaged in pairs after every second step"
    model = f"{__name__}:PairedParametersModel"
    promise = Promise(of="parameters", every=2, partners=pair)


class Plain(StrategyFacts):
    """Replicas average all gradients, a bucket at a time, and state so."""

    name = "plain"
    help = "gradients are averaged after the backward pass"
    model = f"{__name__}:PlainModel"
    bucket_copies = 1
    fixed_exchange = "it averages by one sum a bucket"

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        weights = [weight.values for part in parts.parts for weight in part.weights]
        yield term(
            "gradients",
            "all-reduce",
            ("replicate", cell.gpus),
            payload=VALUE_BYTES * parts.trained.values,
            operations=runs(weights),
        )


class PlainModel(ParallelModel):
    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module)
        self.link = Link(setting.exchange.group)
        for tensor in (*module.parameters(), *module.buffers()):
            take_from_first(self.link, [tensor])

    def sum(self, values: Tensor, task: GradientTask) -> None:
        self.link.all_reduce(values)

    def compute_gradients(self, batches: Iterator[Batch], task: GradientTask) -> Tensor:
        loss = super().compute_gradients(batches, task)
        named = dict(self.bare.named_parameters())
        for bucket in buckets_of({name: value.detach() for name, value in named.items()}):
            for piece in bucket.pieces:
                piece.of(bucket.values).copy_(named[piece.name].grad / self.link.size)
            self.sum(bucket.values, task)
            for piece in bucket.pieces:
                named[piece.name].grad = piece.of(bucket.values)
        return loss


class _Paired(ParallelModel):
    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module)
        everyone = Link(setting.exchange.group)
        for tensor in (*module.parameters(), *module.buffers()):
            take_from_first(everyone, [tensor])
        pairs = [list(pair(rank, everyone.size)) for rank in range(0, everyone.size, 2)]
        self.link = everyone.split(pairs)
        settings = setting.exchange
        self.gradient_exchange = self.pair = GradientExchange(
            ExchangeSettings(group=self.link.group, compression=settings.compression, seed=settings.seed),
            device=setting.device,
        )


class PairedGradientsModel(_Paired):
    def compute_gradients(self, *arguments: Any) -> Tensor:
        loss = super().compute_gradients(*arguments)
        named = dict(self.bare.named_parameters())
        for bucket in buckets_of({name: value.detach() for name, value in named.items()}):
            for piece in bucket.pieces:
                piece.of(bucket.values).copy_(named[piece.name].grad / self.link.size)
            self.pair.start(bucket).wait()
            for piece in bucket.pieces:
                named[piece.name].grad = piece.of(bucket.values)
        return loss


class PairedParametersModel(_Paired):
    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module, setting)
        self.steps = 0

    @torch.no_grad()
    def updated(self) -> None:
        self.steps += 1
        if self.steps % 2:
            return
        for tensor in (*self.parameters(), *self.bare.buffers()):
            if tensor.is_floating_point():
                shares = tensor.detach() / self.link.size
                self.link.all_reduce(shares)
                tensor.copy_(shares)
