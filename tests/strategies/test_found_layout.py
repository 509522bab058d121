"""Which blocks are found in a model whose layout nobody gave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from results.layout import ModelLayout
from strategies import Trainer, TrainSettings
from strategies.training.layouts import found_layout


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
def test_blocks_are_modules_of_one_class_that_are_made_of_others(
    module: nn.Module, blocks: tuple[str, ...]
) -> None:
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
    settings = TrainSettings(activation_checkpointing=True)
    trainer = Trainer(model, nn.functional.mse_loss, device=torch.device("cpu"), settings=settings)
    trainer.step(iter([(torch.ones(2, 3), torch.zeros(2, 3))]))
    # Once in the forward pass, once in the backward pass.
    assert model.calls == 2
