"""The Llama's parts against what their papers say, written down once more as plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workloads.build import build_workload
from workloads.llama.model import GroupedAttention, Llama, RMSNorm, rotated, rotations
from workloads.llama.shape import LlamaShape

SMALL = LlamaShape(
    layers=2, width=16, heads=4, kv_heads=2, hidden=24, context=12, vocabulary=20, seq=6, tied=True
)


def test_rms_norm_by_hand() -> None:
    norm = RMSNorm(2)
    nn.init.constant_(norm.weight, 2.0)
    # Root mean square of (3, 4): sqrt(25 / 2) = 3.5355.
    expected = torch.tensor([6.0, 8.0]) / math.sqrt(12.5)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), expected)


def test_rms_norm_does_not_overflow_in_half_precision() -> None:
    out = RMSNorm(4).half()(torch.full((4,), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones(4, dtype=torch.float16))


def test_rotary_positions_turn_pairs_by_the_papers_angles() -> None:
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    out = rotated(x, rotations(x, theta=100.0))
    for place in range(3):
        for pair in range(2):
            # Speeds 100 ** 0 and 100 ** -0.5; a pair is one number of the complex plane.
            angle = place * (1.0, 0.1)[pair]
            before = complex(x[0, 0, place, pair], x[0, 0, place, pair + 2])
            after = before * complex(math.cos(angle), math.sin(angle))
            assert complex(out[0, 0, place, pair], out[0, 0, place, pair + 2]) == pytest.approx(
                after, rel=1e-6
            )


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(8), torch.randn(8)
    rows = [v.expand(1, 1, 10, 8) for v in (query, key)]
    turned_query, turned_key = (rotated(v, rotations(v, 10_000.0))[0, 0] for v in rows)
    products = turned_query @ turned_key.T
    for distance in range(10):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[0, 0], products[5, 0])


def _naive(attention: GroupedAttention, x: Tensor) -> Tensor:
    """Head by head and position by position, over (tokens, width) in float64."""
    tokens, width = x.shape
    size = width // attention.heads
    weights = [getattr(attention, f"{name}_proj").weight.double() for name in ("q", "k", "v")]
    query, key, value = (x @ weight.T for weight in weights)
    out = torch.zeros(tokens, width, dtype=torch.float64)
    for head in range(attention.heads):
        shared = head // (attention.heads // attention.kv_heads)
        q = query[None, None, :, head * size : (head + 1) * size]
        k = key[None, None, :, shared * size : (shared + 1) * size]
        turns = rotations(q, attention.theta)
        q, k = rotated(q, turns)[0, 0], rotated(k, turns)[0, 0]
        v = value[:, shared * size : (shared + 1) * size]
        for place in range(tokens):
            weight = torch.softmax(k[: place + 1] @ q[place] / math.sqrt(size), dim=0)
            out[place, head * size : (head + 1) * size] = weight @ v[: place + 1]
    return out @ attention.o_proj.weight.double().T


def test_attention_is_that_of_the_naive_loop() -> None:
    torch.manual_seed(0)
    attention = GroupedAttention(SMALL)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 6, 16)
    torch.testing.assert_close(
        attention(x)[0].double(), _naive(attention, x[0].double()), rtol=1e-4, atol=1e-5
    )


def test_the_head_is_the_embedding_only_where_it_is_tied() -> None:
    tied = Llama(SMALL)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    with torch.device("meta"):
        own = build_workload("llama-7b").module
    assert own.get_parameter("lm_head.weight") is not own.get_parameter("embed_tokens.weight")
