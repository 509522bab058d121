"""Models of transformers with random weights: `py:transformers_models:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from results.layout import LinearSplit, ModelLayout, splits_of
from workloads import Workload

VOCABULARY, TOKENS, LAYERS = 97, 32, 2
SPLITS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "outputs"),
    "self_attn.o_proj": "inputs",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "outputs"),
    "mlp.down_proj": "inputs",
}


def synthetic_of(batch: Callable[[Tensor], Any]) -> Callable[[torch.Generator, int], Any]:
    def synthetic(generator: torch.Generator, samples: int) -> Any:
        return batch(torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=generator))

    return synthetic


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def llama(**options: Any) -> Workload:
    """Targets are shifted before the model sees them."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=False, **options,
    )  # fmt: skip
    blocks = tuple(f"model.layers.{layer}" for layer in range(LAYERS))
    splits = [LinearSplit(name=name, by=by) for name, by in SPLITS.items()]
    return Workload(
        module=LlamaForCausalLM(config),
        loss=token_loss,
        synthetic=synthetic_of(lambda x: ({"input_ids": x[:, :-1]}, x[:, 1:])),
        layout=ModelLayout(blocks=blocks, splits=splits_of(blocks, splits)),
    )


def eager() -> Workload:
    return llama(attn_implementation="eager")


def masked() -> Workload:
    """A mask that leaves out no token."""

    def batch(x: Tensor) -> Any:
        return {"input_ids": x[:, :-1], "attention_mask": torch.ones_like(x[:, 1:])}, x[:, 1:]

    return replace(llama(), synthetic=synthetic_of(batch))


def padded() -> Workload:
    """Only the last chunk of two has padding."""

    def batch(x: Tensor) -> Any:
        mask = (torch.arange(TOKENS) < TOKENS - 4).long().expand(len(x), -1)
        return {"input_ids": x[:, :-1], "attention_mask": mask}, x[:, 1:]

    return replace(llama(), synthetic=synthetic_of(batch))


def packed() -> Workload:
    def batch(x: Tensor) -> Any:
        places = torch.arange(TOKENS).remainder(12).expand(len(x), -1)
        return {"input_ids": x[:, :-1], "position_ids": places}, x[:, 1:]

    return replace(llama(), synthetic=synthetic_of(batch))


def shifting() -> Workload:
    """The model shifts its targets itself."""

    def batch(x: Tensor) -> Any:
        return {"input_ids": x[:, :-1], "labels": x[:, :-1]}

    return replace(llama(), loss=None, synthetic=synthetic_of(batch))


def mixtral() -> Workload:
    """Build a Mixtral without a layout; docs/examples/mixtral.py has one."""
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, num_local_experts=4,
    )  # fmt: skip
    return replace(llama(), module=MixtralForCausalLM(config), layout=None)


def t5() -> Workload:
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip

    def batch(x: Tensor) -> Any:
        return {"input_ids": x[:, :-1], "labels": x[:, :16].contiguous()}

    return Workload(module=T5ForConditionalGeneration(config), synthetic=synthetic_of(batch))
