"""Models without a layout: which of them are chains that a pipeline can cut, and the reasons why others
cannot be cut."""

from __future__ import annotations

import pytest
import torch
from rank_builders import a_trainer
from torch import Tensor, nn

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.pipeline.chain import chained_layout
from strategies.training.layouts import found_layout

TOKENS = torch.zeros(2, 5, dtype=torch.int64)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Chain(nn.Module):
    """Tokens to logits, the table of the embedding shared with the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.ModuleList(Residual() for _ in range(4))
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 11)
        self.last.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.begun(self.table(tokens))
        for block in self.body:
            x = block(x)
        return self.ended(self.last(self.norm(x)))

    def begun(self, x: Tensor) -> Tensor:
        return x

    def ended(self, x: Tensor) -> Tensor:
        return x


class WrittenIn(Chain):
    """The tensor between two modules is the same one, with other values."""

    def begun(self, x: Tensor) -> Tensor:
        x += 1
        return x


class WrittenAfter(Chain):
    def ended(self, x: Tensor) -> Tensor:
        x *= 2
        return x


class NoisyInTraining(Chain):
    def begun(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, self.training)


class ExtraInTraining(Chain):
    """An auxiliary loss that training alone has."""

    def forward(self, tokens: Tensor) -> Tensor:
        y = super().forward(tokens)
        return y + self.last(self.norm(self.table(tokens))).mean() if self.training else y


class SoftInEvaluation(Chain):
    def ended(self, x: Tensor) -> Tensor:
        return x if self.training else x.softmax(-1)


class ShortInEvaluation(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.body if self.training else list(self.body)[:2]:
            x = block(x)
        return self.last(self.norm(x))


class Averaged(Chain):
    def ended(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Skipping(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        begin = x = self.table(tokens)
        for block in self.body:
            x = block(x)
        return self.last(self.norm(x + begin))


class Again(Chain):
    def begun(self, x: Tensor) -> Tensor:
        return self.body[0](x)


class Layers(nn.Module):
    """Blocks of torch's own, inside of a module of torch's own, which passes defaults along."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.encoder, self.last = (
            nn.Linear(6, 8),
            nn.TransformerEncoder(layer, 3),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)))


def test_a_chain_is_cut_at_its_blocks_and_what_is_around_them_is_stem_and_head() -> None:
    layout = chained_layout(Chain(), TOKENS)
    assert (layout.stem, layout.head) == (("table",), ("norm", "last"))
    assert layout.blocks == tuple(f"body.{number}" for number in range(4))
    assert (layout.sample, layout.sample_type, layout.chained) == ((5,), "int64", True)
    layout = chained_layout(Layers(), torch.zeros(2, 5, 6))
    assert layout.blocks == tuple(f"encoder.layers.{number}" for number in range(3))


def test_an_end_without_a_module_of_its_own_gets_a_block() -> None:
    layout = chained_layout(nn.Sequential(*(Residual() for _ in range(4))), torch.zeros(2, 8))
    assert (layout.stem, layout.blocks, layout.head) == (("0",), ("1", "2"), ("3",))


def test_a_chain_with_batch_norm_is_found_and_its_statistics_stay() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)))
    assert chained_layout(module, torch.zeros(1, 6)).blocks == ("1",)
    assert {name: value.item() for name, value in module.named_buffers() if "num_batches" in name} == {
        f"{place}.1.num_batches_tracked": 0 for place in range(3)
    }


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        (WrittenIn(), TOKENS, "computes something between table and body.0"),
        (WrittenAfter(), TOKENS, "computes something after last"),
        (Averaged(), TOKENS, "computes something after last"),
        (NoisyInTraining(), TOKENS, "computes something between table and body.0"),
        (ExtraInTraining(), TOKENS, "computes something between last and table"),
        (SoftInEvaluation(), TOKENS, "in evaluation mode its forward pass computes something after last"),
        (ShortInEvaluation(), TOKENS, "calls other modules in evaluation mode than in training"),
        (Skipping(), TOKENS, "computes something between body.3 and norm"),
        (Again(), TOKENS, "the block body.0 is called more than once"),
        (nn.Linear(6, 6), torch.zeros(2, 6), "no repeated blocks"),
        (Chain(), {"tokens": TOKENS}, "its inputs are a dict, not a tensor"),
        (Layers(), torch.zeros(2, 5, 7), "its forward pass fails on the meta device"),
    ],
)
def test_a_model_that_is_not_a_chain_is_refused_with_the_obstacle(module, inputs, reason) -> None:
    with pytest.raises(UsageError, match=f"finds no place in this one: .*{reason}.*use fsdp"):
        chained_layout(module, inputs)


# Which blocks are found in a model whose layout nobody gave.


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))


class Two(nn.Module):
    """Two runs, a block of another kind in one of them, and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.encoder = nn.Sequential(Block(), nn.Tanh(), Block(width=8))
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), Block(), Block()])})


class Tied(nn.Module):
    """Both blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].inner = self.blocks[0].inner


@pytest.mark.parametrize(
    ("module", "blocks"),
    [
        (Two(), ("encoder.0", "encoder.2", "decoder.layers.1", "decoder.layers.2")),
        (nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2), 2), ("layers.0", "layers.1")),
        (nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList()]), ("0.0", "0.1")),
        # Layers of torch's own have no parts, one block is no run, and activations have no parameters.
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Block()), ("3.more.0", "3.more.1")),
        (nn.LSTM(4, 4, num_layers=2), ()),
        (nn.Sequential(nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())), ()),
        (Tied(), ()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_blocks_are_modules_of_one_class_that_are_made_of_others(module, blocks) -> None:
    assert found_layout(module) == ModelLayout(blocks=blocks)


def test_a_trainer_without_a_layout_recomputes_the_blocks_that_it_finds() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
            self.calls = 0
            self.blocks[0][0].register_forward_hook(self._count)

        def _count(self, *_: object) -> None:
            self.calls += 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Deep()
    trainer = a_trainer(model, activation_checkpointing=True)
    trainer.step(iter([(torch.ones(2, 3), torch.zeros(2, 3))]))
    # Once in the forward pass, once in the backward pass.
    assert model.calls == 2
