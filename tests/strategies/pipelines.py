"""Helpers for tests of pipelines: models that can be cut, their training on ranks, steps that go wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.layout import ModelLayout
from strategies import Phase, Trainer, TrainSettings
from strategies.catalog import group_layout
from strategies.fsdp.shards import local
from strategies.pipeline.chain import chained_layout
from strategies.snapshot import Snapshot
from workloads.gpt import GPTShape
from workloads.gpt.model import GPT, build_gpt, token_loss

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
BLOCKS, WIDTH, TOKENS, ROWS, STEPS = 8, 8, 5, 12, 2
SHAPE = GPTShape(layers=2, width=WIDTH, heads=2, context=6, vocabulary=11, seq=TOKENS)
NAMES = tuple(f"body.{block}" for block in range(BLOCKS))
CHAIN = ModelLayout(blocks=NAMES, stem=("first",), head=("last",), sample=(6,))
LAYOUTS = {
    "gpt": build_gpt(SHAPE).layout,
    "tied": ModelLayout(
        blocks=NAMES, stem=("wte",), head=("norm", "wte"), sample=(TOKENS,), sample_type="int64"
    ),
}


class Chain(nn.Module):
    """Blocks of 8 features between 6 and 5."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH))
        self.body = nn.Sequential(*(block() for _ in range(BLOCKS)))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))

    def stem(self, x: Tensor) -> Tensor:
        return self.first(x)

    def head(self, x: Tensor) -> Tensor:
        return self.last(x)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Tied(nn.Module):
    """Tokens to logits; the head is the embedding's table."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, WIDTH)
        self.body = nn.ModuleList(Residual() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.body:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.wte.weight)


class Scale(nn.Module):
    """One parameter, without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def frozen() -> nn.Module:
    """The whole of a first stage of three or more, a part of another, and what is tied in none."""
    module = Chain(normed)
    module.first.requires_grad_(False)
    for block in (0, 1, 2):
        module.body[block].requires_grad_(False)
    module.body[6][0].weight.requires_grad_(False)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "gpt": lambda: GPT(SHAPE),
    "normed": lambda: Chain(normed),
    "frozen": frozen,
    "scales": lambda: Chain(Scale),
    "found": lambda: Chain(normed),
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def loss_of(model: str) -> Callable[[Tensor, Tensor], Tensor]:
    return token_loss if model in LAYOUTS else F.cross_entropy


def batch(model: str, step: int, micro: int, replica: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    if model in LAYOUTS:
        tokens = torch.randint(SHAPE.vocabulary, (ROWS, TOKENS + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(5, (ROWS,), generator=generator)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, clipped, accumulated": ("tied", {"clip_norm": 0.05, "accumulation": 2}),
    "tied, checkpointed, AdamW": ("tied", {"activation_checkpointing": True, "optimizer": "adamw:lr=0.01"}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "BatchNorm, checkpointed": ("normed", {"activation_checkpointing": "selective"}),
    "frozen, clipped": ("frozen", {"clip_norm": 0.05}),
    "one parameter a block": ("scales", {}),
    "GPT": ("gpt", {}),
    "tied": ("tied", {}),
    "found, accumulated": ("found", {"accumulation": 2}),
}


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def _layout_of(model: str, module: nn.Module) -> ModelLayout:
    if model == "found":
        return chained_layout(module, batch(model, 0, 0, 0)[0])
    return LAYOUTS.get(model, CHAIN)


def trainer_of(
    model: str, strategy: str, group: ExchangeGroup, *, double: bool = True, **settings: Any
) -> Trainer:
    module = build(model).double() if double else build(model)
    return Trainer(
        module,
        loss_of(model),
        device=CPU,
        settings=TrainSettings(strategy=strategy, **{"optimizer": "sgd:lr=0.1:momentum=0.9", **settings}),
        layout=_layout_of(model, module),
        group=group,
    )


def train(rank: int, strategy: str, cases: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """On a rank, of each case: what each step leaves."""
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    exchange, found = open_exchange(), {}
    for case in cases:
        model, settings = CASES[case]
        trainer = trainer_of(model, strategy, exchange, **settings)
        steps = []
        for step in range(STEPS):
            accumulation = trainer.settings.accumulation
            loss = trainer.compute_gradients(batch(model, step, at, replica) for at in range(accumulation))
            gradients = copied(trainer.model.named_gradients())
            steps.append({"loss": loss.item(), "gradients": gradients})
            trainer.update()
        steps[-1] |= {
            "parameters": copied(trainer.model.named_parameters()),
            "buffers": copied(trainer.model.named_buffers()),
            "state": dict(trainer.model.named_state(trainer.optimizer)),
            "own": [name for name, _ in trainer.model.bare.named_parameters()],
        }
        found[case] = steps
        exchange.reset()
    return found


class Noted:
    """The phases of a step as they begin."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begins(self, phase: Phase) -> None:
        self.seen.append(phase.value[0])

    def step_done(self, loss: Tensor) -> None:
        self.seen.append(".")


def step_of(rank: int, model: str, strategy: str, settings: dict[str, Any]) -> dict[str, Any]:
    """On a rank, in single precision: the second step's bytes, operations and phases."""
    exchange = open_exchange()
    trainer = trainer_of(model, strategy, exchange, double=False, **settings)
    micro = trainer.settings.accumulation
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    batches = [batch(model, step, at, replica, torch.float32) for step in range(2) for at in range(micro)]
    trainer.step(iter(batches[:micro]))
    before = exchange.traffic.payload_bytes, exchange.traffic.operations
    trainer.observer = noted = Noted()
    trainer.step(iter(batches[micro:]))
    found = {
        "bytes": exchange.traffic.payload_bytes - before[0],
        "operations": exchange.traffic.operations - before[1],
        "phases": "".join(noted.seen),
        "own": sum(4 * value.numel() for value in trainer.model.bare.parameters()),
        "buffers": sum(value.nbytes for value in trainer.model.bare.buffers()),
        "ideal": trainer.model.bubble_ideal,
    }
    exchange.reset()
    return found


def precise_step(rank: int, precision: str) -> dict[str, Any]:
    exchange = open_exchange()
    trainer = trainer_of("tied", "pipeline:1f1b", exchange, double=False, precision=precision)
    trainer.compute_gradients(iter([batch("tied", 0, 0, 0)]))
    found = {
        "gradients": copied(trainer.model.named_gradients()),
        "scale": trainer.scaler.get_scale(),
    }
    exchange.reset()
    return found


def overflowing_step(rank: int, where: int, strategy: str) -> list[tuple[float, bool]]:
    """On a rank: the scaler's factor after each of two steps, and whether the parameters moved; in the first
    one a gradient overflows on rank `where`."""
    exchange = open_exchange()
    trainer = trainer_of("tied", strategy, exchange, double=False, precision="fp16")
    found = []
    for step in range(2):
        before = copied(trainer.model.bare.named_parameters())
        trainer.compute_gradients(iter([batch("tied", step, 0, 0)]))
        if step == 0 and rank == where:
            next(p for p in trainer.model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        trainer.update()
        after = copied(trainer.model.bare.named_parameters())
        moved = any(not torch.equal(local(each), local(before[name])) for name, each in after.items())
        found.append((trainer.scaler.get_scale(), moved))
    exchange.reset()
    return found


def with_off_steps(rank: int, strategy: str) -> tuple[list[float], list[str]]:
    """On a rank: losses of steps without the exchange, which are undone; and what differs after two more
    steps from the same two steps before."""
    exchange = open_exchange()
    trainer = trainer_of("normed", strategy, exchange)
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    batches = [batch("normed", step, 0, replica) for step in range(4)]
    for step in range(2):
        trainer.step(iter([batches[step]]))
    snapshot, losses, ends = Snapshot(trainer), list[float](), list[dict[str, Tensor]]()
    for enabled in (True, False, True):
        exchange.traffic.enabled = enabled
        before = exchange.traffic.operations
        losses = losses or [trainer.step(iter([part])).item() for part in batches[:3] if not enabled]
        for part in batches[2:] if enabled else ():
            trainer.step(iter([part]))
        assert enabled or exchange.traffic.operations == before
        exchange.traffic.enabled = True
        ends.append(copied(trainer.model.named_parameters()) | copied(trainer.model.named_buffers()))
        snapshot.restore()
    exchange.reset()
    return losses, [name for name, value in ends[0].items() if not torch.equal(value, ends[2][name])]


def forgotten(rank: int) -> tuple[bool, bool]:
    exchange = open_exchange()
    trainer = trainer_of("tied", "pipeline:interleaved", exchange)
    trainer.step(iter([batch("tied", 0, 0, 0)]))
    model, module = weakref.ref(trainer.model), weakref.ref(trainer.model.bare)
    gc.disable()
    try:
        del trainer
        return model() is None, module() is None
    finally:
        gc.enable()
        exchange.reset()


def complaint(rank: int, rows: int, microbatches: int) -> str:
    exchange = open_exchange()
    trainer = trainer_of("normed", f"pipeline:gpipe:microbatches={microbatches}", exchange)
    inputs, targets = batch("normed", 0, 0, 0)
    try:
        trainer.step(iter([(inputs[:rows], targets[:rows])]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        exchange.reset()
    return ""


def resized(rank: int) -> dict[str, Tensor]:
    """On a rank: a step of 8 rows, then one of 12."""
    exchange = open_exchange()
    trainer = trainer_of("normed", "pipeline:1f1b", exchange, optimizer="sgd:lr=0")
    inputs, targets = batch("normed", 0, 0, 0)
    trainer.step(iter([(inputs[:8], targets[:8])]))
    trainer.compute_gradients(iter([(inputs, targets)]))
    gradients = copied(trainer.model.named_gradients())
    exchange.reset()
    return gradients


def raising(rank: int) -> str:
    """On a rank: what comes of an error in a stage; without the exchange nobody waits for the others."""
    exchange = open_exchange()
    trainer = trainer_of("normed", "pipeline:gpipe", exchange)
    trainer.step(iter([batch("normed", 0, 0, 0)]))
    for block in trainer.model.bare.get_submodule("body").children():
        block.forward = fail
    exchange.traffic.enabled = False
    try:
        trainer.step(iter([batch("normed", 1, 0, 0)]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        exchange.reset()
    return ""


def fail(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("no memory for (3, 8)")
