"""Closed forms against published figures and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.parts import ModelParts
from workloads.catalog import WORKLOADS, facts
from workloads.gpt import GPTShape


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        # torchvision's documentation of its weights, num_params.
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        # The classifier shrinks from 1000 to 10 classes: 11,689,512 - 990 * (512 + 1).
        ("resnet18-32px", 11_181_642),
        # Hugging Face's gpt2, gpt2-medium, gpt2-large and gpt2-xl, num_parameters().
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        # 256*128 + 64*128 + 4 * (12*128^2 + 13*128) + 2*128.
        ("gpt-nano", 834_304),
        # Liu et al., arXiv:2402.14905: "124.6M"; 32000*576 + 30 * 3,540,096 + 576.
        ("llama-125m", 124_635_456),
        # Hugging Face's meta-llama/Llama-3.2-1B and Llama-2-7b, num_parameters().
        ("llama-1b", 1_235_814_400),
        ("llama-7b", 6_738_415_616),
        # 256*128 + 4 * (2*128^2 + 2*128*64 + 3*128*352 + 2*128) + 128.
        ("llama-nano", 771_200),
        # Hugging Face's mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1 and ibm-granite/
        # granite-3.0-3b-a800m-base, num_parameters().
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("granite-3b", 3_298_793_472),
        # 256*128 + 4 * (2*128^2 + 2*128*64 + 8*128 + 8*3*128*128 + 2*128) + 128.
        ("moe-nano", 1_807_488),
        # 785*512 + 513*256 + 257*10.
        ("mlp", 535_818),
    ],
)
def test_parameters_are_the_published_ones(text, parameters) -> None:
    assert facts(WORKLOADS.parse(text)).parameters == parameters


@pytest.mark.parametrize(
    ("text", "macs"),
    [
        # The usual "1.81, 4.09 and 7.80 GMAC at 224 px", to the last one.
        ("resnet18", 1_814_073_344),
        ("resnet50", 4_089_184_256),
        ("resnet101", 7_801_405_440),
        # 12 blocks of 1024 * 12*768^2 + 2 * 1024^2 * 768, and the head 1024 * 768 * 50257.
        ("gpt2-small", 12 * (7_247_757_312 + 1_610_612_736) + 39_523_713_024),
        # 784*512 + 512*256 + 256*10.
        ("mlp", 535_040),
    ],
)
def test_forward_flops_are_twice_the_published_multiply_adds(text, macs) -> None:
    assert facts(WORKLOADS.parse(text)).forward_flops == 2 * macs


def test_gpt_nano_by_hand() -> None:
    """T = 64, d = 128, h = 4: 16 T d + T (h + 4) = 131,584 values of a block, 4 of which are split by 2.

    At two ranks 12 T d + T h = 98,560 are halved: 131,584 - 49,280 = 82,304.
    """
    parts = facts(WORKLOADS.parse("gpt-nano")).parts
    assert isinstance(parts, ModelParts)
    assert parts.blocks[0].saved.over(1) == 4 * 131_584
    assert parts.blocks[0].saved.over(2) == 4 * 82_304
    # 12 d^2 + 13 d, of which 12 d^2 + 7 d are split: biases of query, key, value and of 4 d.
    assert parts.blocks[0].values == 12 * 128**2 + 13 * 128
    assert parts.blocks[0].values_over(2) == 6 * 128**2 + 7 * 64 + 6 * 128


def test_padding_fills_every_first_dimension() -> None:
    """d = 10 over 4 shards: a norm of 10 becomes 12, and 30 x 10 becomes 32 x 10."""
    shape = GPTShape(layers=1, width=10, heads=1, context=20, vocabulary=37, seq=3)
    block = shape.parts().blocks[0]
    norms, qkv, projection = 4 * 12, 32 * 10 + 32, 12 * 10 + 12
    assert block.padded_values(4) == norms + qkv + projection + (40 * 10 + 40) + (12 * 40 + 12)
    assert block.padded_values(1) == block.values
    assert replace(shape, layers=3).parts().blocks == (block,) * 3
