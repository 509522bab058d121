"""A mixture of experts from scratch: a Llama whose MLP is, for each token, k of E experts.

Jiang et al. 2024, arXiv:2401.04088. No token is dropped. Modules are named as in Hugging Face's Mixtral; the
matrices of all experts of a layer are one parameter, expert after expert along its first dimension, so that
shards are equal for any number of experts.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from results.errors import UsageError
from workloads.choices import Choice
from workloads.gpt.model import language_model
from workloads.llama.model import Llama, LlamaBlock, layout_of
from workloads.moe import MoEShape
from workloads.workload import Workload


def build_moe(shape: MoEShape) -> Workload:
    """Build the language model with its cross-entropy, for samples of `shape.seq` tokens."""
    return language_model(Llama(shape, MoEBlock), shape, layout_of(shape))


def forced_experts(shape: MoEShape, positions: Tensor) -> Tensor:
    """Return the experts (tokens, k) of tokens at `positions` (tokens,) of a sample, by `balanced` or
    `skewed` routing.

    Experts take turns. With `skewed`, expert 0 has `skew * k / E` of the tokens, spread evenly, and the
    others take turns at the rest.
    """
    numbers = torch.arange(shape.chosen, device=positions.device)
    begun = positions[:, None] * shape.chosen + numbers
    if shape.routing == "balanced":
        return begun % shape.experts
    chosen = 1 + begun % (shape.experts - 1)
    busy = shape.skew * shape.chosen
    takes = (positions + 1) * busy // shape.experts > positions * busy // shape.experts
    chosen[:, 0] = torch.where(takes, 0, chosen[:, 0])
    return chosen


class Experts(nn.Module):
    """E gated MLPs with SiLU (Shazeer, arXiv:2002.05202), whose matrices lie one after another."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.count = shape.experts
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts * 2 * shape.hidden, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts * shape.width, shape.hidden))
        # As the MLPs of the other models: less for what adds to the residual stream.
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (tokens, width) of expert 0, of expert 1 and so on; counts (E,) of each expert's rows."""
        # Without values there are no numbers of rows; any division of them costs as many FLOPs.
        without = counts.is_meta or isinstance(counts, FakeTensor)
        if rows.is_cuda and _autocasts_to_bf16() and not without:
            products = partial(grouped_products, ends=counts.cumsum(0, dtype=torch.int32))
        else:
            products = partial(
                looped_products, sizes=_even(len(rows), self.count) if without else counts.tolist()
            )
        gate, up = products(rows, self._each(self.gate_up_proj)).chunk(2, dim=-1)
        return products(F.silu(gate) * up, self._each(self.down_proj))

    def _each(self, weight: Tensor) -> Tensor:
        return weight.view(self.count, -1, weight.shape[1])


def looped_products(rows: Tensor, weight: Tensor, *, sizes: list[int]) -> Tensor:
    """Multiply rows (tokens, width) of expert after expert by the experts' matrices (E, out, width)."""
    each = zip(torch.split(rows, sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(own, one) for own, one in each])


def grouped_products(rows: Tensor, weight: Tensor, *, ends: Tensor) -> Tensor:
    """Multiply in bf16 as `looped_products`, in one kernel and without numbers of rows on the host.

    The rows of expert e end before `ends[e]`. Autocast does not know this product.
    """
    return F.grouped_mm(rows.bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends)


def _autocasts_to_bf16() -> bool:
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16


def _even(rows: int, experts: int) -> list[int]:
    each, rest = divmod(rows, experts)
    return [each + (expert < rest) for expert in range(experts)]


class SparseMLP(nn.Module):
    """The router and the experts of one layer."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.choice = Choice(shape.chosen)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self._route(tokens, len(x), positions)
        order = chosen.flatten().argsort(stable=True)
        experts = torch.arange(self.shape.experts, device=x.device)
        counts = (chosen.reshape(-1, 1) == experts).sum(0)
        results = self.experts(tokens[order // self.shape.chosen], counts)
        # A token's results stand side by side, so that their sum has one order.
        own = results[order.argsort()].view(*chosen.shape, -1)
        y: Tensor = (own * weights[..., None].to(own.dtype)).sum(1).view(x.shape)
        return y

    def _route(self, tokens: Tensor, samples: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of tokens (n * seq, width), (n * seq, k) each."""
        logits = self.gate(tokens)
        if self.shape.routing == "learned":
            chosen = self.choice(logits)
        else:
            length = len(tokens) // samples
            if length != (self.shape.seq if positions is None else len(positions)):
                raise UsageError(
                    f"routing={self.shape.routing} chooses experts by the position of a token, and {length} "
                    f"tokens came without their positions: use routing=learned, or a strategy that gives them"
                )
            if positions is None:
                positions = torch.arange(length, device=tokens.device)
            chosen = forced_experts(self.shape, positions).repeat(samples, 1)
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
        if self.shape.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen


class MoEBlock(LlamaBlock):
    """Attention and experts, each added to its input."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape, SparseMLP)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x), positions)
        return y
