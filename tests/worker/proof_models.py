"""Models of a user's own, `py:proof_models:NAME`, for cells that are proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from results.layout import LinearSplit, ModelLayout, splits_of
from workloads import DataShare, Workload
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt
from workloads.moe import MoEShape
from workloads.moe.model import build_moe


def gpt() -> Workload:
    return build_gpt(GPTShape(layers=3, width=16, heads=2, context=16, vocabulary=256, seq=16))


def gpt_of_samples() -> Workload:
    """Throughput counts samples, as where a user names no unit."""
    return replace(gpt(), unit="samples", units_per_sample=1)


def gpt_of_doubles() -> Workload:
    whole = gpt()
    whole.module.double()
    return whole


def gpt_by_a_step() -> Workload:
    whole = gpt()

    def step(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        return whole.loss(model(batch[0]), batch[1])

    return replace(whole, loss=None, step=step)


def without_finite_gradients() -> Workload:
    whole = gpt()
    return replace(whole, loss=lambda outputs, y: whole.loss(outputs, y) + (0 * outputs).sqrt().sum())


def masked_gpt() -> Workload:
    """Its own samples have a mask in addition to the tokens that are their targets."""
    whole, generator = gpt(), torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (40, 17), generator=generator, device="cpu")
    mask = torch.rand(40, 16, generator=generator, device="cpu").round()

    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(outputs.float().transpose(1, 2), targets["tokens"], reduction="none")
        return (each * targets["mask"]).mean()

    data = [(row[:-1], {"tokens": row[1:], "mask": kept}) for row, kept in zip(tokens, mask, strict=True)]
    return replace(whole, loss=loss, data=data)


def last_token() -> Workload:
    """Learns only the token after a sample, and checks the numbers of the samples in the batch."""
    whole = gpt()

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        inputs, targets = whole.synthetic(generator, samples)
        return inputs, torch.stack([torch.arange(samples), targets[:, -1]], dim=1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        places, tokens = targets.unbind(dim=1)
        if places.tolist() != list(range(len(outputs))):
            raise ValueError(f"the targets are of samples {places.tolist()}")
        return F.cross_entropy(outputs[:, -1].float(), tokens)

    return replace(whole, synthetic=synthetic, loss=loss)


def mixture() -> Workload:
    """Its experts matter, and some of them have no token in a step."""
    whole = build_moe(
        MoEShape(
            **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "hidden": 8, "vocabulary": 256},
            **{"context": 16, "seq": 8, "tied": True, "experts": 32, "chosen": 2},
        )
    )
    for name, parameter in whole.module.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.5)
    return whole


class Grouped(nn.Module):
    """A block of attention whose four heads of queries share one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.mix = nn.Linear(16, 24), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (6, 4)).transpose(1, 2)
        query, key, value = heads.split([4, 1, 1], dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return x + self.mix(mixed.transpose(1, 2).flatten(2))


class GroupedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(256, 16), nn.Embedding(16, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(Grouped() for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(16) if positions is None else positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def grouped() -> Workload:
    layout = ModelLayout(blocks=("blocks.0", "blocks.1"))

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Any, Tensor]:
        tokens = torch.randint(256, (samples, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(module=GroupedGPT(), loss=gpt().loss, synthetic=synthetic, layout=layout)


def padded() -> Workload:
    """The last quarter of each sequence has no targets."""
    whole = grouped()

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Any, Tensor]:
        inputs, targets = whole.synthetic(generator, samples)
        return inputs, torch.cat([targets[:, :12], torch.full((samples, 4), -100)], dim=1)

    return replace(whole, synthetic=synthetic)


class Conditioned(nn.Module):
    """A block that uses its second input twice; three of them are given the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.shift, self.scale = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, *, given: dict[str, Tensor]) -> Tensor:
        return x + torch.tanh(self.hidden(x) + self.shift(given["to"])) * self.scale(given["to"])


class Attending(nn.Module):
    """Blocks whose only child, the projection of torch's attention, is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return self.last(x)


def attending() -> Workload:
    return replace(workload(Attending(), F.mse_loss, 4), layout=None)


class ConditionedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Conditioned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = given = self.stem(x)
        for block in self.blocks:
            x = block(x, given={"to": given})
        return self.head(x)


def conditioned() -> Workload:
    return replace(workload(ConditionedBlocks(), F.mse_loss), layout=None)


def sparse() -> Workload:
    """A batch may meet a row of the table twice, and its sparse gradient then has that row twice."""

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        return torch.randint(4, (samples,), generator=generator), torch.randn(samples, 3, generator=generator)

    module = nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 3))
    return Workload(module=module, loss=F.mse_loss, synthetic=synthetic)


class Teacher(nn.Module):
    """Forward moves its frozen copy of the student after it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, followed in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.lerp_(followed.data, 0.25)
        return self.student(x) + self.teacher(x)


def teacher() -> Workload:
    return workload(Teacher(), F.mse_loss)


def odd() -> Workload:
    """Weights of 30, 65 and 39 numbers: one behind another begin at no multiple of 64 bytes."""
    layers = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3)
    return workload(nn.Sequential(*layers), F.mse_loss)


def normed() -> Workload:
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    return workload(nn.Sequential(*layers), F.mse_loss)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)) + x)


def residual() -> Workload:
    """Many convolutions, each with BatchNorm of few samples: together they amplify rounding."""

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(samples, 3, 4, 4, generator=generator)
        return images, torch.randint(4, (samples,), generator=generator)

    blocks = [Residual() for _ in range(24)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    module = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)
    return Workload(module=module, loss=F.cross_entropy, synthetic=synthetic)


def wide() -> Workload:
    layers = nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    return workload(nn.Sequential(*layers), F.mse_loss)


def diverging() -> Workload:
    return workload(nn.Linear(6, 3), lambda y, t: F.mse_loss(y, t) / (t[0, 0] > 0))


def data_of_its_own() -> Workload:
    """Its batches come from a generator that nobody seeds."""
    module = nn.Linear(6, 3)
    loader = torch.Generator()
    loader.seed()
    return Workload(
        module=module,
        loss=F.mse_loss,
        synthetic=lambda _, samples: (
            torch.randn(samples, 6, generator=loader),
            torch.randn(samples, 3, generator=loader),
        ),
    )


class OwnNoise(nn.Module):
    """Noise from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.source = torch.Generator()
        self.source.seed()

    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = self.layer(x + torch.randn(x.shape, generator=self.source))
        return noisy


def noise_of_its_own() -> Workload:
    return workload(OwnNoise(), F.mse_loss)


def loud() -> Workload:
    return workload(nn.Linear(6, 3), F.mse_loss)


def deafening() -> Workload:
    return workload(nn.Linear(6, 3), lambda y, t: 1000 * F.mse_loss(y, t))


def quiet_tokens() -> Workload:
    """Gradients as small as a token's share of a mean over millions: they lose digits in half precision."""
    whole = gpt()
    return replace(whole, loss=lambda y, t: whole.loss(y, t) * 2.0**-22)


def deafening_for_ever() -> Workload:
    """Its scaled gradients overflow at every factor, though its loss is finite."""
    return workload(nn.Linear(6, 3), lambda y, t: F.mse_loss(y, t) + _Infinite.apply(y))


class _Infinite(torch.autograd.Function):
    """Zero, with a gradient that is infinite."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full(ctx.shape, math.inf)


class Attention(nn.Module):
    """Keys with a bias, which softmax takes away: it adds the same to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(2, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        shares = torch.softmax(query @ key.transpose(2, 3), 3)
        return self.out((shares @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, and a layer with a bias, which the BatchNorm behind it takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.wide = Attention(), nn.Linear(8, 16)
        self.norm, self.narrow = nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        normed = self.norm(self.wide(x).transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(F.gelu(normed))


class Cancelling(nn.Module):
    """Some of its gradients are zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def stem(self, x: Tensor) -> Tensor:
        return self.first(x)

    def head(self, x: Tensor) -> Tensor:
        return self.last(x)


def cancelling() -> Workload:
    """On samples of 4 tokens; it can be split in every way."""
    blocks = tuple(f"blocks.{block}" for block in range(2))
    outputs = (LinearSplit(name=f"attention.{name}", by="outputs") for name in ("query", "key", "value"))
    layout = ModelLayout(
        blocks=blocks,
        stem=("first",),
        head=("last",),
        sample=(4, 6),
        splits=splits_of(blocks, (*outputs, LinearSplit(name="attention.out", by="inputs"))),
        heads=tuple(f"{block}.attention.heads" for block in blocks),
    )
    return workload(Cancelling(), F.mse_loss, 4, layout=layout)


class Spoken(nn.Module):
    """Called by keywords; gives its loss among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(8, 5)

    def forward(self, *, text: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(text["ids"]) * text["mask"][..., None]
        for block in self.blocks:
            x = x + block(x)
        logits = self.out(x.sum(1))
        return {"logits": logits, "loss": F.cross_entropy(logits.float(), labels)}


def spoken() -> Workload:
    """Nested dictionaries of samples that are 3 to 7 tokens long."""

    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Any]:
        length = int(torch.randint(3, 8, (), generator=generator))
        ids = torch.randint(11, (samples, length), generator=generator)
        mask = torch.rand(samples, length, generator=generator).round()
        labels = torch.randint(5, (samples,), generator=generator)
        return {"text": {"ids": ids, "mask": mask}, "labels": labels}

    return Workload(module=Spoken(), synthetic=synthetic)


class Numbered(Dataset[dict[str, Tensor]]):
    """Forty samples, each of which follows from its index; or not."""

    def __init__(self, *, noise: bool = False) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = None if self._noise else torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=generator), "y": torch.full((3,), index / 40)}


def _step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def of_a_dataset() -> Workload:
    return Workload(module=nn.Linear(6, 3), step=_step, data=Numbered())


def of_noise() -> Workload:
    return Workload(module=nn.Linear(6, 3), step=_step, data=Numbered(noise=True))


def of_a_loader() -> Workload:
    def opened(share: DataShare) -> Iterable[dict[str, Tensor]]:
        own = Subset(Numbered(), range(share.replica, 40, share.replicas))
        return DataLoader(own, share.micro_batch, drop_last=True)

    return Workload(module=nn.Linear(6, 3), step=_step, data=opened)


def of_a_loader_for_all() -> Workload:
    """It forgets to shard."""

    def opened(share: DataShare) -> Iterable[dict[str, Tensor]]:
        return DataLoader(Numbered(), share.micro_batch, drop_last=True)

    return Workload(module=nn.Linear(6, 3), step=_step, data=opened)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(0.3 * torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turns).abs()


def waves() -> Workload:
    return workload(Waves(), F.mse_loss)


def of_graphs() -> Workload:
    """A graph has three nodes and one label, and a batch has the nodes of all its graphs in a row."""

    def opened(share: DataShare) -> Iterable[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(share.replica)
        for _ in range(8):
            nodes = torch.randn(3 * share.micro_batch, 6, generator=generator)
            yield {"nodes": nodes, "label": nodes[::3, :3]}

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["nodes"]).unflatten(0, (-1, 3)).mean(dim=1), batch["label"])

    return Workload(
        module=nn.Linear(6, 3), step=step, data=opened, samples_of=lambda batch: len(batch["label"])
    )


def two_losses() -> Workload:
    """A user's own step over a tuple of three."""

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, near, far = (torch.randn(samples, 6, generator=generator) for _ in range(3))
        return x, near, [far]

    def step(model: Callable[..., Any], batch: tuple[Tensor, Tensor, list[Tensor]]) -> dict[str, Tensor]:
        x, near, [far] = batch
        y = model(x)
        first, second = F.mse_loss(y, near), F.l1_loss(y, far)
        return {"loss": first + 0.5 * second, "near": first.detach()}

    return Workload(
        module=nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), step=step, synthetic=synthetic
    )


def contrastive() -> Workload:
    """Each sample against the features of all ranks, which the loss gathers."""

    def loss(features: Tensor, targets: Tensor) -> Tensor:
        every = [torch.empty_like(features) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, features.detach())
        return (features @ torch.cat(every).T).logsumexp(dim=1).mean() - (features * targets).mean()

    return workload(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), loss)


def cancelling_by_a_step() -> Workload:
    def step(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return replace(cancelling(), loss=None, step=step)


def workload(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    *tokens: int,
    layout: ModelLayout | None = None,
) -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        shape = samples, *tokens
        return torch.randn(*shape, 6, generator=generator), torch.randn(*shape, 3, generator=generator)

    return Workload(module=module, loss=loss, synthetic=synthetic, layout=layout or ModelLayout())
