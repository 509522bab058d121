"""Llama from scratch: RMSNorm before each part, rotary positions, grouped queries, a gated MLP, no biases.

Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288. Modules are named as in Hugging Face's, without
`model.` and `self_attn`'s prefix; rotary positions turn halves of a head against each other, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit, ModelLayout, splits_of
from workloads.gpt.model import initialise, language_model
from workloads.llama import LlamaShape
from workloads.workload import Workload

NORM_EPSILON = 1e-5


def build_llama(shape: LlamaShape) -> Workload:
    """Build the language model with its cross-entropy, for samples of `shape.seq` tokens."""
    splits = (
        *(LinearSplit(name=name, by="outputs") for name in ("mlp.gate_proj", "mlp.up_proj")),
        LinearSplit(name="mlp.down_proj", by="inputs"),
    )
    return language_model(Llama(shape), shape, layout_of(shape, splits))


def layout_of(shape: LlamaShape, splits: Sequence[LinearSplit] = ()) -> ModelLayout:
    """Return the layout of a `Llama`, with the splits inside of an MLP."""
    blocks = tuple(f"layers.{layer}" for layer in range(shape.layers))
    attention = (
        *(LinearSplit(name=f"self_attn.{name}_proj", by="outputs") for name in ("q", "k", "v")),
        LinearSplit(name="self_attn.o_proj", by="inputs"),
    )
    return ModelLayout(
        blocks=blocks,
        stem=("embed_tokens",),
        # A tied head is the embedding's own matrix.
        head=("norm", "lm_head"),
        sample=(shape.seq,),
        sample_type="int64",
        splits=splits_of(blocks, (*attention, *splits)),
        heads=tuple(f"{block}.self_attn.{name}" for block in blocks for name in ("heads", "kv_heads")),
    )


class RMSNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension: Zhang & Sennrich, arXiv:1910.07467."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # In single precision at least: a square of fp16 overflows at 256.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPSILON)
        return (wide * scale).type_as(x) * self.weight


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., arXiv:2104.09864) and grouped queries
    (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.theta = shape.heads, shape.kv_heads, shape.theta
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        query, key = _split(self.q_proj(x), self.heads), _split(self.k_proj(x), self.kv_heads)
        turns = rotations(query, self.theta, positions)
        query, key = rotated(query, turns), rotated(key, turns)
        value = _split(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        if group > 1:
            # The same product as with `enable_gqa`, but supported by every backend and FLOP counter.
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return y


def _split(x: Tensor, heads: int) -> Tensor:
    """Reshape (n, tokens, heads * size) to (n, heads, tokens, size)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def rotations(x: Tensor, theta: float, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (tokens, size / 2) each, of the angles `position / theta ** (2 i / size)` of
    heads (n, heads, tokens, size); positions (tokens,), None: from 0."""
    tokens, size = x.shape[-2:]
    if positions is None:
        positions = torch.arange(tokens, device=x.device)
    place = positions.to(torch.float32)
    speed = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = torch.outer(place, speed)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads (n, heads, tokens, size): element i of the first half with element i of the second half,
    by the angle of the position."""
    cosine, sine = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class GatedMLP(nn.Module):
    """The gated MLP with SiLU: Shazeer, arXiv:2002.05202."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class LlamaBlock(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, shape: LlamaShape, mlp: Callable[[Any], nn.Module] = GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = GroupedAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = mlp(shape)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Llama(nn.Module):
    """Tokens (n, seq) to logits (n, seq, rows)."""

    def __init__(self, shape: LlamaShape, block: Callable[[Any], nn.Module] = LlamaBlock) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.rows, shape.width)
        self.layers = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.rows, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight
        initialise(self, layers=shape.layers, added=("o_proj", "down_proj"))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.stem(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, seq) to the input of the first block, (n, seq, width)."""
        x: Tensor = self.embed_tokens(tokens)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Map the output of the last block to logits."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits
