"""The Trainer on one process: a step is what a hand-written loop does, bit for bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_builders import a_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from results.cell import Cell
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Phase, Trainer, TrainSettings
from strategies.devices import KINDS, Host, MemoryFigures
from strategies.snapshot import Snapshot
from strategies.training.precision import set_float32_math

CPU = torch.device("cpu")
STEPS = 4
Batches = Iterator[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A convolution, two blocks with BatchNorm and dropout, and a classifier of 5: a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.a, self.b = self._block(), self._block()
        self.head = nn.Linear(4 * 6 * 6, 5)

    def _block(self) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.stem(x))).flatten(1))


LAYOUT = ModelLayout(blocks=("a", "b"))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches() -> Batches:
    for index in count():
        generator = torch.Generator().manual_seed(index)
        yield torch.randn(4, 3, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw:lr=0.01": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01),
    "sgd:lr=0.1:weight_decay=0.001": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.001),
}


def plain_loop(module: nn.Module, settings: TrainSettings, steps: int = STEPS) -> list[float]:
    """The loop that a user would write; fp32 and bf16. Returns the losses."""
    module.train()
    optimizer, data, losses = OPTIMIZERS[settings.optimizer](module.parameters()), batches(), []
    for _ in range(steps):
        mean = torch.zeros(())
        for _ in range(settings.accumulation):
            inputs, targets = next(data)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = F.cross_entropy(module(inputs), targets) / settings.accumulation
            loss.backward()
            mean += loss.detach()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def trained(module: nn.Module, settings: TrainSettings, steps: int = STEPS) -> list[float]:
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings, layout=LAYOUT)
    data = batches()
    return [trainer.step(data).item() for _ in range(steps)]


def assert_equal_bits(ours: nn.Module, theirs: nn.Module) -> None:
    """Parameters and buffers, num_batches_tracked too."""
    mine, others = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_equals_a_plain_loop_bit_for_bit(net, optimizer, accumulation, clip_norm, precision) -> None:
    settings = TrainSettings(
        optimizer=optimizer,
        accumulation=accumulation,
        clip_norm=clip_norm,
        precision=precision,
    )
    twin = copy.deepcopy(net)
    torch.manual_seed(1)
    expected = plain_loop(twin, settings)
    torch.manual_seed(1)
    assert trained(net, settings) == expected
    assert_equal_bits(net, twin)


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_the_precision_of_matrix_products_can_be_read_by_every_api_of_torch(precision) -> None:
    allowed = precision == "tf32"
    set_float32_math("fp32" if allowed else "tf32")
    try:
        set_float32_math(precision)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if allowed else "ieee")
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is allowed
    finally:
        set_float32_math("fp32")


def scalar() -> nn.Linear:
    """y = w x with w = 1."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its gradient is the mean input, whatever w is."""
    return outputs.mean()


def test_two_steps_of_sgd_with_momentum_come_to_what_a_hand_calculates() -> None:
    module = scalar()
    trainer = a_trainer(module, mean_output, optimizer="sgd:lr=0.5:momentum=0.5", accumulation=2)
    data = iter([(torch.tensor([[x]]), torch.zeros(1)) for x in (1.0, 3.0, 1.0, 3.0)])
    # g = (1 + 3) / 2 = 2; v = 2; w = 1 - 0.5 * 2 = 0. The loss before: (1 * 1 + 1 * 3) / 2 = 2.
    assert trainer.step(data).item() == 2.0
    assert module.weight.item() == 0.0
    # g = 2; v = 0.5 * 2 + 2 = 3; w = 0 - 0.5 * 3 = -1.5. The loss before: 0.
    assert trainer.step(data).item() == 0.0
    assert module.weight.item() == -1.5


@pytest.mark.parametrize("clip_norm", [None, 100.0])
def test_fp16_leaves_out_a_step_that_overflows_and_goes_on(clip_norm) -> None:
    module = scalar()
    trainer = a_trainer(
        module, mean_output, optimizer="sgd:lr=0.5:momentum=0", precision="fp16", clip_norm=clip_norm
    )
    data = iter([(torch.tensor([[1.0]]), torch.zeros(1)) for _ in range(2)])
    # The scaled gradient, 1 * 2^16, is above the largest float16, 65504.
    trainer.step(data)
    assert module.weight.item() == 1.0
    assert trainer.scaler.get_scale() == 2.0**15
    # 1 * 2^15 fits: w = 1 - 0.5 * 1.
    loss = trainer.step(data)
    assert loss.item() == 1.0
    assert module.weight.item() == 0.5
    assert trainer.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(("accumulation", "how"), [(1, True), (2, True), (2, "selective")])
def test_checkpointing_changes_no_parameter_no_running_statistic_and_no_dropout(
    net, accumulation, how
) -> None:
    twin = copy.deepcopy(net)
    losses = {}
    for module, checkpointing in ((net, how), (twin, False)):
        torch.manual_seed(1)
        settings = TrainSettings(activation_checkpointing=checkpointing, accumulation=accumulation)
        losses[checkpointing] = trained(module, settings)
    assert losses[how] == losses[False]
    assert_equal_bits(net, twin)
    assert net.a[1].num_batches_tracked == STEPS * accumulation


def test_checkpointing_a_model_without_blocks_is_refused(net) -> None:
    with pytest.raises(UsageError, match="layout names its blocks"):
        a_trainer(net, F.cross_entropy, activation_checkpointing=True)


class Caching(nn.Linear):
    """Its second call takes what the first has left."""

    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = super().forward(x).tanh()
            return self.cache
        return self.cache * 1.0


def test_checkpointing_a_block_that_keeps_a_cache_is_refused_with_what_to_do() -> None:
    trainer = a_trainer(
        nn.Sequential(Caching(4, 4)), layout=ModelLayout(blocks=("0",)), activation_checkpointing=True
    )
    with pytest.raises(UsageError, match="use_cache=False"):
        trainer.step(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))


def unequal(rank: int, folder: Path) -> str:
    """On a rank: what ends it where rank 1 has two batches, and rank 0 has three."""
    trainer = a_trainer(nn.Linear(4, 4), strategy="ddp")
    batches = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * (3 - rank))
    try:
        while True:
            trainer.step(batches)
    except StopIteration as error:
        (folder / "ended").write_text(str(error))
        os._exit(0)
    except RuntimeError as error:
        return str(error)


def test_a_rank_whose_batches_end_says_so_and_ends_the_others(ranks, tmp_path) -> None:
    other = ranks(2, unequal, tmp_path, dying=(1,))[0]
    assert "Connection closed" in other or "reset" in other
    assert (tmp_path / "ended").read_text().startswith("the batches of rank 1 of 2 ended after 2 steps")


def without_dropout(net: Net) -> Net:
    """Compiled, or in another memory format, dropout draws other numbers."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


@pytest.mark.slow
# Torch's own: of its compiler when that is imported, and of tracing over a graph break.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_a_compiled_step_is_the_step_within_rounding(net, checkpointing) -> None:
    twin = copy.deepcopy(without_dropout(net))
    settings = TrainSettings(optimizer="sgd:lr=0.01", activation_checkpointing=checkpointing)
    expected = trained(twin, settings)
    compiled = TrainSettings(
        optimizer="sgd:lr=0.01", activation_checkpointing=checkpointing, compile=True
    )  # fmt: skip
    try:
        assert trained(net, compiled) == pytest.approx(expected, rel=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    finally:
        torch._dynamo.reset()
    for (name, ours), theirs in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_channels_last_gives_the_same_losses_within_rounding(net) -> None:
    twin = copy.deepcopy(without_dropout(net))
    expected = trained(twin, TrainSettings(optimizer="sgd:lr=0.01"))
    settings = TrainSettings(optimizer="sgd:lr=0.01", memory_format="channels_last")
    # Other convolution kernels add up 27 to 36 products in another order.
    assert trained(net, settings) == pytest.approx(expected, rel=1e-4)
    assert net.stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert not twin.stem.weight.is_contiguous(memory_format=torch.channels_last)


class Recorder:
    """Records the calls to an observer."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.losses: list[float] = []

    def begins(self, phase: Phase) -> None:
        self.told.append(phase.value)

    def step_done(self, loss: Tensor) -> None:
        assert not loss.requires_grad
        self.told.append("done")
        self.losses.append(loss.item())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_observer_is_told_of_the_phases_in_their_order(net, accumulation) -> None:
    trainer = a_trainer(net, F.cross_entropy, accumulation=accumulation)
    trainer.observer = recorder = Recorder()
    data = batches()
    losses = [trainer.step(data).item() for _ in range(2)]
    assert recorder.told == [*["data", "forward", "backward"] * accumulation, "optimizer", "done"] * 2
    assert recorder.losses == losses


def test_settings_are_taken_from_a_cell_by_name() -> None:
    fields: dict[str, object] = {
        "strategy": "ddp",
        "optimizer": "adamw",
        "accumulation": 4,
        "precision": "bf16",
        "clip_norm": 1.0,
        "activation_checkpointing": True,
        "compile": True,
        "memory_format": "channels_last",
    }
    rest = {"workload": "mlp", "dataset": "synthetic", "micro_batch": 2, "device": "cpu", "backend": "gloo"}
    cell = Cell(gpus=2, **rest, **fields)
    assert TrainSettings.of(cell) == TrainSettings(**fields)


def state(trainer: Trainer) -> dict[str, object]:
    """Everything that a step changes, copied."""
    return copy.deepcopy(
        {
            "module": trainer.model.bare.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scaler": trainer.scaler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def assert_same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=False)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd:momentum=0", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_snapshot_brings_everything_back_and_training_goes_on_as_if_nothing_had_been(
    net, optimizer, precision
) -> None:
    trainer = a_trainer(net, F.cross_entropy, optimizer=optimizer, precision=precision)
    data = batches()
    for _ in range(3):
        trainer.step(data)
    before = state(trainer)
    snapshot = Snapshot(trainer)
    ahead = [next(data) for _ in range(2)]
    losses = [trainer.step(iter([batch])).item() for batch in ahead]
    after = state(trainer)
    with pytest.raises(AssertionError):
        assert_same(after, before)
    snapshot.restore()
    assert_same(state(trainer), before)
    assert [trainer.step(iter([batch])).item() for batch in ahead] == losses
    assert_same(state(trainer), after)


class Roomy(Host):
    """The CPU, taken for a device of 1,000 bytes whose memory of the host is pinned."""

    free = 0

    def memory(self) -> Any:
        return MemoryFigures(
            allocated=0, allocated_peak=0, reserved=0, reserved_peak=0, free=self.free, total=1000
        )

    def begin_copy_to_host(self, values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the whole state would be pinned")


# A weight and its momentum are 8 bytes, and 100 are to stay free.
@pytest.mark.parametrize(("free", "to_the_host"), [(107, [4, 4]), (108, [])])
def test_a_snapshot_of_a_device_is_on_it_where_that_leaves_a_tenth_free(
    monkeypatch, free, to_the_host
) -> None:
    module = scalar()
    trainer = a_trainer(module, mean_output, optimizer="sgd:lr=0.5")
    trainer.step(iter([(torch.tensor([[2.0]]), torch.zeros(1))]))
    monkeypatch.setitem(KINDS, "cpu", Roomy)
    monkeypatch.setattr(Roomy, "free", free)
    copies, move = list[int](), Tensor.to

    def noted(value: Tensor, *place: Any, **how: Any) -> Tensor:
        copies.append(value.nbytes)
        return move(value, *place, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", noted)
        snapshot = Snapshot(trainer)
    assert copies == to_the_host
    trainer.step(iter([(torch.tensor([[2.0]]), torch.zeros(1))]))
    assert module.weight.item() != 0.0
    snapshot.restore()
    # 1 - 0.5 * 2 after the first step.
    assert module.weight.item() == 0.0


def test_a_snapshot_from_before_the_first_step_brings_that_moment_back() -> None:
    module = scalar()
    trainer = a_trainer(module, mean_output, optimizer="sgd:lr=0.5:momentum=0.5")
    snapshot = Snapshot(trainer)
    for _ in range(2):
        trainer.step(iter([(torch.tensor([[2.0]]), torch.zeros(1))]))
        # v = g = 2; w = 1 - 0.5 * 2 = 0, each time anew.
        assert module.weight.item() == 0.0
        snapshot.restore()
        assert module.weight.item() == 1.0


def test_a_loss_that_is_not_finite_is_told_once_and_its_step_named() -> None:
    trainer = a_trainer(scalar(), mean_output)
    given = iter([(torch.tensor([[value]]), torch.zeros(1)) for value in (1.0, torch.nan, 1.0)])
    trainer.step(given)
    with pytest.warns(RuntimeWarning, match="the loss of step 2 is not finite"):
        trainer.step(given)
    trainer.step(given)
