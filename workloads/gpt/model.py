"""GPT-2 from scratch: learned positions, pre-LayerNorm, GELU by tanh, the head tied to the embedding.

Radford et al. 2019. Modules are named as in nanoGPT. Dropout is left out, as in today's pre-training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit, ModelLayout, splits_of
from workloads.gpt import GPTShape
from workloads.shape import TextShape
from workloads.workload import TokenInput, Workload


def build_gpt(shape: GPTShape) -> Workload:
    """Build the language model with its cross-entropy, for samples of `shape.seq` tokens."""
    return language_model(GPT(shape), shape, _layout(shape))


def language_model(module: nn.Module, shape: TextShape, layout: ModelLayout) -> Workload:
    """Return the workload of a model that predicts the next of `shape.seq` tokens."""
    takes = TokenInput(length=shape.seq, vocabulary=shape.vocabulary)
    return Workload(
        module=module,
        loss=token_loss,
        synthetic=takes.synthetic,
        unit="tokens",
        units_per_sample=shape.seq,
        layout=layout,
        input=takes,
    )


def _layout(shape: GPTShape) -> ModelLayout:
    blocks = tuple(f"h.{layer}" for layer in range(shape.layers))
    splits = (
        LinearSplit(name="attn.c_attn", by="outputs", parts=3),
        LinearSplit(name="attn.c_proj", by="inputs"),
        LinearSplit(name="mlp.c_fc", by="outputs"),
        LinearSplit(name="mlp.c_proj", by="inputs"),
    )
    return ModelLayout(
        blocks=blocks,
        stem=("wte", "wpe"),
        head=("ln_f", "wte"),
        sample=(shape.seq,),
        sample_type="int64",
        splits=splits_of(blocks, splits),
        heads=tuple(f"{block}.attn.heads" for block in blocks),
    )


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits (n, tokens, rows) over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(part) for part in self.c_attn(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return y

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (n, tokens, width) to (n, heads, tokens, width / heads)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers, four times the width between them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT(nn.Module):
    """Tokens (n, seq) to logits (n, seq, rows)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.rows, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        initialise(self, layers=shape.layers, added=("c_proj",))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.stem(tokens, positions)
        for block in self.h:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens (n, seq) to the input of the first block, (n, seq, width); positions (seq,), None: from
        0."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.wte(tokens) + self.wpe(positions)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Map the output of the last block to logits."""
        return F.linear(self.ln_f(x), self.wte.weight)


def initialise(model: nn.Module, *, layers: int, added: tuple[str, ...]) -> None:
    """Initialise as GPT-2: normal with 0.02, and 1 / sqrt(2 layers) of it for layers that add to the residual
    stream, by the endings of their names (`added`); biases zero."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            less = math.sqrt(2 * layers) if name.endswith(added) else 1.0
            nn.init.normal_(module.weight, std=0.02 / less)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
