"""A pipeline's parameters as a whole: copies of one are compared, and one without a gradient is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings
from strategies.training.gathered import CopiesDifferError

Ranks = Callable[..., list[Any]]
WIDTH, VOCABULARY, BLOCKS = 4, 7, 6


class Block(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class Tied(nn.Module):
    """Tokens to logits: the matrix of `lm_head`, which the head may call or not, is the embedding's."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.body = nn.ModuleList(Block() for _ in range(BLOCKS))
        self._calls = calls

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.body:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.wte(tokens)
        return y

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_submodule(self._calls).weight)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    tokens = torch.arange(12).view(4, 3) % VOCABULARY
    while True:
        yield tokens, tokens.flip(0)


def trainer_of(strategy: str, *, calls: str = "wte", frozen: tuple[str, ...]) -> Trainer:
    """Of a model of which the parameters whose names end so are not trained."""
    torch.manual_seed(0)
    module = Tied(calls)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    layout = ModelLayout(
        blocks=tuple(f"body.{block}" for block in range(BLOCKS)),
        stem=("wte",),
        head=(calls,),
        sample=(3,),
        sample_type="int64",
    )
    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.1:momentum=0.9")
    return Trainer(
        module, loss, device=torch.device("cpu"), settings=settings, layout=layout, group=open_exchange()
    )


IDLE = ("idle.weight", "idle.bias")


def told_of_copies(trainer: Trainer) -> list[str]:
    """What is said of parameters, gradients and state as each of them is asked for."""
    model, told = trainer.model, []
    asked = (model.named_parameters, model.named_gradients, partial(model.named_state, trainer.optimizer))
    for ask in asked:
        try:
            for _ in ask():
                pass
            told.append("")
        except CopiesDifferError as error:
            told.append(str(error))
    return told


def drifted(rank: int, where: int, what: str, calls: str) -> list[list[str]]:
    """On a rank: what is said before and after a value of one copy is the next that there is."""
    trainer = trainer_of("pipeline:1f1b", calls=calls, frozen=IDLE)
    trainer.step(data())
    trainer.compute_gradients(data())
    told = [told_of_copies(trainer)]
    if rank == where:
        table = next(value for value in trainer.model.parameters() if value.shape == (VOCABULARY, WIDTH))
        values: dict[str, Any] = {
            "parameter": table.detach(),
            "gradient": table.grad,
            "state": trainer.optimizer.state[table]["momentum_buffer"],
        }
        values[what][3, 2] = torch.nextafter(values[what][3, 2], torch.tensor(torch.inf))
    return [*told, told_of_copies(trainer)]


@pytest.mark.parametrize("calls", ["wte", "lm_head"])
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize(("at", "what"), list(enumerate(("parameter", "gradient", "state"))))
def test_copies_that_differ_in_one_bit_are_told_on_all_ranks(
    ranks: Ranks, where: int, at: int, what: str, calls: str
) -> None:
    expected = [""] * 3
    expected[at] = "wte.weight is not the same on the ranks that have a copy of it"
    assert ranks(3, drifted, where, what, calls) == [[[""] * 3, expected]] * 3


def complaint(rank: int, strategy: str, frozen: tuple[str, ...]) -> str:
    """On a rank: what is said of two steps, and of the copies after them."""
    try:
        trainer = trainer_of(strategy, frozen=frozen)
        for _ in range(2):
            trainer.step(data())
    except UsageError as error:
        return str(error)
    return "".join(told_of_copies(trainer))


def test_a_trained_parameter_without_gradient_is_refused_on_all_ranks(ranks: Ranks) -> None:
    there = "no gradient came for a parameter on another rank, whose error names it"
    # Block 0 is in the first stage.
    frozen = tuple(f"{block}.{name}" for block in range(1, BLOCKS) for name in IDLE)
    here = (
        "no gradient came for body.0.idle.weight, body.0.idle.bias (2 parameters), and every stage updates "
        "all that it trains: freeze what is not used, or use ddp:find_unused=true or "
        "scratch-ddp:find_unused=true"
    )
    assert ranks(2, complaint, "pipeline:gpipe", frozen) == [here, there]
    assert ranks(3, complaint, "pipeline:1f1b", frozen) == [here, there, there]
    # The copies of a stage are beside each other.
    assert ranks(4, complaint, "pipeline:1f1b:dp=2", frozen) == [here, here, there, there]


def test_what_is_frozen_needs_no_gradient_at_either_end(ranks: Ranks) -> None:
    assert ranks(2, complaint, "pipeline:1f1b", IDLE) == [""] * 2
    assert ranks(2, complaint, "pipeline:1f1b", (*IDLE, "wte.weight")) == [""] * 2
    assert ranks(4, complaint, "pipeline:1f1b:dp=2", (*IDLE, "wte.weight")) == [""] * 4
