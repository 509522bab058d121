"""Eight kinds of models that bench does not ship, `py:foreign_models:NAME`, each of few parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from workloads import Workload

WIDTH = 16
VOCABULARY = 23


class Attention(nn.Module):
    """Two-headed attention from (batch, queries, WIDTH) to (batch, keys, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor, *, causal: bool = False) -> Tensor:
        parts = self.query(x), self.key(source), self.value(source)
        heads = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(*heads, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.wide, self.narrow = Attention(), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x)
        return x + self.narrow(F.gelu(self.wide(x)))


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x, causal=True)
        return x + self.cross(x, memory)


class Translator(nn.Module):
    """An encoder whose output conditions every block of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.ModuleList(EncoderBlock() for _ in range(2))
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.out(x)


def encoder_decoder() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Tensor]:
        source = torch.randint(VOCABULARY, (samples, 7), generator=generator)
        return {"source": source, "target": torch.randint(VOCABULARY, (samples, 6), generator=generator)}

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        target = batch["target"]
        return F.cross_entropy(model(batch["source"], target[:, :-1]).transpose(1, 2), target[:, 1:])

    return Workload(module=Translator(), step=step, synthetic=synthetic)


class Experts(nn.Module):
    """Each token goes to the better of four experts: an expert may be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        # Every expert is called, if need be with no token, so that all ranks use the same parameters.
        parts = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero(as_tuple=True)
            parts = parts.index_put(places, expert(x[places]), accumulate=True)
        return x + weight[..., None] * parts


def mixture_of_experts() -> Workload:
    blocks = nn.ModuleList(Experts() for _ in range(2))
    return of_vectors(nn.Sequential(nn.Linear(6, WIDTH), *blocks, nn.Linear(WIDTH, 3)))


class LowRank(nn.Module):
    """A frozen layer whose output two narrow, trained layers correct."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def lora() -> Workload:
    layers = (LowRank(nn.Linear(*sizes)) for sizes in ((6, WIDTH), (WIDTH, WIDTH), (WIDTH, 3)))
    return of_vectors(nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))))


class Conditioned(nn.Module):
    """Convolutions that a time's embedding scales."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm, self.time = nn.GroupNorm(2, outputs), nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * (1 + self.time(time)[..., None, None])
        return self.second(F.silu(x))


class Denoiser(nn.Module):
    """A U-Net of two levels; every block is conditioned on the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Conditioned(1, 4), Conditioned(4, 4), Conditioned(8, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self.time(time)
        down, middle, up = self.blocks
        high = down(x, embedded)
        low = middle(F.avg_pool2d(high, 2), embedded)
        joined = torch.cat([high, F.interpolate(low, scale_factor=2)], 1)
        return self.out(up(joined, embedded))


def diffusion() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Tensor]:
        images, noise = (torch.randn(samples, 1, 8, 8, generator=generator) for _ in range(2))
        return {"images": images, "noise": noise, "time": torch.rand(samples, 1, generator=generator)}

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        share = batch["time"][..., None, None]
        return F.mse_loss(
            model((1 - share) * batch["images"] + share * batch["noise"], batch["time"]), batch["noise"]
        )

    return Workload(module=Denoiser(), step=step, synthetic=synthetic)


class Recommender(nn.Module):
    """Bags of items per user, in embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(31, WIDTH, sparse=True)
        self.items = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=True)
        self.out = nn.Linear(2 * WIDTH, 1)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        return self.out(torch.cat([self.users(user), self.items(items)], 1))[:, 0]


def sparse_recommender() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Tensor]:
        user = torch.randint(31, (samples,), generator=generator)
        items = torch.randint(VOCABULARY, (samples, 5), generator=generator)
        return {"user": user, "items": items, "clicked": torch.rand(samples, generator=generator).round()}

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["user"], batch["items"]), batch["clicked"])

    return Workload(module=Recommender(), step=step, synthetic=synthetic)


class Tied(nn.Module):
    """The embedding is the output's weight, and two blocks are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight
        block = EncoderBlock()
        self.blocks = nn.ModuleList([block, EncoderBlock(), block])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def tied() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (samples, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(
        module=Tied(), loss=lambda y, t: F.cross_entropy(y.transpose(1, 2), t), synthetic=synthetic
    )


class Recognizer(nn.Module):
    """A recurrent network over utterances of unlike lengths, aligned by CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(5, WIDTH, 3, padding=1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, 7)

    def forward(self, sound: Tensor, lengths: Tensor) -> Tensor:
        x = self.front(sound).relu().transpose(1, 2)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.out(x).log_softmax(-1)


def ragged_speech() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Tensor]:
        lengths = torch.randint(8, 13, (samples,), generator=generator)
        sound = torch.randn(samples, 5, int(lengths.max()), generator=generator)
        return {
            "sound": sound,
            "lengths": lengths,
            "text": torch.randint(1, 7, (samples, 3), generator=generator),
        }

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        spoken = model(batch["sound"], batch["lengths"])
        written = torch.full_like(batch["lengths"], batch["text"].shape[1])
        return F.ctc_loss(spoken.transpose(0, 1), batch["text"], batch["lengths"], written)

    return Workload(module=Recognizer(), step=step, synthetic=synthetic)


class Messages(nn.Module):
    """One round: every node adds what its neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sources, targets = edges
        received = torch.zeros_like(nodes).index_add(0, targets, self.sent(nodes)[sources])
        return torch.tanh(self.own(nodes) + received)


class Graphs(nn.Module):
    """Sums over the nodes of each graph after two rounds of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.rounds = nn.ModuleList(Messages() for _ in range(2))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graphs, each = nodes.shape[:2]
        x = self.embed(nodes).flatten(0, 1)
        # The nodes of all graphs have numbers of their own.
        flat = (edges + each * torch.arange(graphs)[:, None, None]).transpose(0, 1).flatten(1)
        for message in self.rounds:
            x = message(x, flat)
        return self.out(x).view(graphs, each).sum(1)


def graph() -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> dict[str, Tensor]:
        nodes = torch.randn(samples, 6, 4, generator=generator)
        edges = torch.randint(6, (samples, 2, 10), generator=generator)
        return {"nodes": nodes, "edges": edges, "energy": nodes.sum((1, 2)).sin()}

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["nodes"], batch["edges"]), batch["energy"])

    return Workload(module=Graphs(), step=step, synthetic=synthetic)


def of_vectors(module: nn.Module) -> Workload:
    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, 6, generator=generator)
        return inputs, inputs[:, :3].sin()

    return Workload(module=module, loss=F.mse_loss, synthetic=synthetic)
