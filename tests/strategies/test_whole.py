"""The complete trained model: `full_state_dict` and `export` of every strategy, and their refusals."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tied import Tied, tied_layout, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from strategies import Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.saving.whole import mean_of

CPU = torch.device("cpu")
STRATEGIES = (
    *(
        "ddp",
        "scratch-ddp",
        "zero1",
        "fsdp",
        "fsdp:tp=2",
        "hsdp",
        "tp",
        "pipeline:gpipe:microbatches=1",
        "local-sgd:4",
    ),
    *("scratch-fsdp:stage=1", "scratch-fsdp:stage=2", "scratch-fsdp"),
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("ones", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.down(torch.tanh(self.up(x * self.ones)))


class Whole(Tied):
    """With buffers that are saved and not."""

    def __init__(self) -> None:
        super().__init__(Block, 2)


def open_trainer(strategy: str, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    chosen = TrainSettings(
        strategy=strategy, optimizer="adamw", node_size=1 if strategy == "hsdp" else None, **settings
    )
    group = open_exchange() if strategy != "single" else None
    return Trainer(
        Whole(), token_loss, device=CPU, settings=chosen, layout=tied_layout(2, length=5), group=group
    )


def trained(trainer: Trainer, steps: int) -> Trainer:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(11, (4, 5), generator=generator)
        trainer.step(iter([(x, x.roll(1, 1))]))
    return trainer


def whole_of(rank: int, strategy: str, folder: Path) -> dict[str, Tensor]:
    """On a rank: `full_state_dict`, after it has loaded into a bare module and was exported as well."""
    trainer = trained(open_trainer(strategy), 2)
    before = [value.clone() for value in trainer.model.parameters()]
    found = trainer.full_state_dict()
    Whole().load_state_dict(found)
    for suffix in ("pt", "safetensors"):
        trainer.export(folder / f"{strategy}.{suffix}")
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.full_state_dict(rank=1) == {} if rank == 0 else trainer.full_state_dict(rank=1)
    trained(trainer, 1)
    return found


@pytest.fixture(scope="module")
def serial() -> dict[str, Tensor]:
    return trained(open_trainer("single"), 2).full_state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_model_has_the_bare_modules_names_and_the_values_of_training_on_one_device(
    ranks, strategy, serial, tmp_path
) -> None:
    """All replicas see the same data, so that every strategy trains as one device does, up to rounding."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_model

    first, second = ranks(2, whole_of, strategy, tmp_path)
    bare = Whole()
    assert list(first) == list(bare.state_dict())
    torch.testing.assert_close(first, serial, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    bare.load_state_dict(torch.load(tmp_path / f"{strategy}.pt", weights_only=True))
    torch.testing.assert_close(bare.state_dict(), first, rtol=0, atol=0)
    other = Whole()
    load_model(other, tmp_path / f"{strategy}.safetensors")
    torch.testing.assert_close(other.state_dict(), first, rtol=0, atol=0)


def values_of_a_given_up_module(rank: int, stage: int) -> tuple[list[float], str]:
    """On a rank: what the parameters of a `scratch-fsdp` module are read as, and what its state says."""
    trainer = trained(open_trainer(f"scratch-fsdp:stage={stage}"), 1)
    module = trainer.model.bare
    with pytest.raises(UsageError) as error:
        module.state_dict()
    with pytest.raises(UsageError, match="full_state_dict"):
        copy.copy(module.get_submodule("blocks.1")).state_dict()
    return [value.sum().item() for value in module.parameters()], str(error.value)


def test_a_module_whose_values_are_given_up_is_nan_and_says_what_to_call(ranks) -> None:
    for values, message in ranks(2, values_of_a_given_up_module, 3):
        assert all(math.isnan(value) for value in values)
        assert "trainer.full_state_dict()" in message


def state_of_zero1(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        trained(open_trainer("zero1"), 1).optimizer.state_dict()
    return str(error.value)


def test_the_optimizer_of_zero1_says_who_has_its_whole_state(ranks) -> None:
    assert all("trainer.save(folder)" in message for message in ranks(2, state_of_zero1))


def means(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a rank of local SGD that is in the middle of a period: its own parameters, and the whole state."""
    torch.manual_seed(0)
    settings = TrainSettings(strategy="local-sgd:4", optimizer="sgd:lr=0.1")
    trainer = Trainer(nn.Linear(3, 2), F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    torch.manual_seed(rank)
    trainer.step(iter([(torch.randn(4, 3), torch.randn(4, 2))]))
    return dict(trainer.model.bare.state_dict()), trainer.full_state_dict()


def test_replicas_that_differ_give_their_mean(ranks) -> None:
    (first, whole), (second, other) = ranks(2, means)
    assert not torch.equal(first["weight"], second["weight"])
    torch.testing.assert_close(whole, other, rtol=0, atol=0)
    torch.testing.assert_close(whole["weight"], (first["weight"] + second["weight"]) / 2)


def test_a_tensor_that_all_ranks_have_keeps_its_bits_in_a_mean(threads) -> None:
    value = torch.tensor([0.1, math.inf, -math.inf, 3.3])
    assert all(torch.equal(mean, value) for mean in threads(3, mean_of_copies, value))


def mean_of_copies(group: Any, value: Tensor) -> Tensor:
    return mean_of(value, Link(group))


def test_an_export_names_the_files_that_there_are(tmp_path) -> None:
    trainer = open_trainer("single")
    with pytest.raises(UsageError, match=r"export writes \.pt or \.safetensors, not 'model\.bin'"):
        trainer.export(tmp_path / "model.bin")


def test_an_export_without_safetensors_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        open_trainer("single").export(tmp_path / "model.safetensors")


def norms(rank: int, strategy: str, clip_norm: float) -> float:
    trainer = trained(open_trainer(strategy, clip_norm=clip_norm), 1)
    assert trainer.gradient_norm is not None
    return float(trainer.gradient_norm)


@pytest.mark.parametrize("strategy", ["ddp", "scratch-fsdp", "fsdp", "tp", "pipeline:gpipe:microbatches=1"])
def test_the_norm_of_the_gradients_is_a_result_of_a_step(ranks, strategy) -> None:
    """Replicas see the same data: every strategy has the norm of one device."""
    alone = norms(0, "single", 1e9)
    assert ranks(2, norms, strategy, 0.001) == pytest.approx([alone] * 2, rel=1e-5)
    assert trained(open_trainer("single"), 1).gradient_norm is None
