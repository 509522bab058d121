"""Mixtral and Qwen3-MoE of `transformers` with random weights, whose experts `ep` deals among ranks.

`pip install transformers`, then, in this folder:
bench matrix --workload py:mixtral:build --gpus 2 --strategy fsdp,fsdp:ep=2
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from results.layout import ModelLayout
from workloads import Workload

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 97, "max_position_embeddings": 64, "use_cache": False, "num_experts_per_tok": 2},
}


class Matrices(nn.Module):
    """The matrices of all experts, or those that `deal` leaves; `ep` sends their rows here."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down = experts.gate_up_proj, experts.down_proj
        self.count, self.act = experts.num_experts, experts.act_fn

    def deal(self, first: int, count: int) -> None:
        self.count = count

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        results = []
        for own, gate_up, down in zip(rows.split(counts.tolist()), self.gate_up, self.down, strict=True):
            gate, up = F.linear(own, gate_up).chunk(2, dim=-1)
            results.append(F.linear(self.act(gate) * up, down))
        return torch.cat(results)


class Experts(nn.Module):
    """Takes the place of the experts of a layer: it sorts the tokens by their experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.matrices = experts.num_experts, Matrices(experts)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        place = order // chosen.shape[1]
        results = self.matrices(tokens[place], counts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, place, results.to(tokens.dtype))


def of(model: nn.Module) -> Workload:
    blocks = [f"model.layers.{place}" for place in range(len(model.model.layers))]
    for block in blocks:
        mlp = model.get_submodule(block).mlp
        mlp.experts = Experts(mlp.experts)

    def synthetic(generator, samples):
        tokens = torch.randint(SIZES["vocab_size"], (samples, 33), generator=generator)
        return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]

    return Workload(
        module=model,
        loss=lambda found, targets: F.cross_entropy(found.logits.flatten(0, 1), targets.flatten()),
        synthetic=synthetic,
        layout=ModelLayout(
            blocks=tuple(blocks), experts=tuple(f"{block}.mlp.experts.matrices" for block in blocks)
        ),
    )


def build() -> Workload:
    return of(MixtralForCausalLM(MixtralConfig(intermediate_size=64, num_local_experts=4, **SIZES)))


def qwen() -> Workload:
    sizes = {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 8, **SIZES}
    return of(Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **sizes)))
