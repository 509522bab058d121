"""A mixture of experts from scratch: a Llama whose MLP is, for each token, k of E experts.

Jiang et al. 2024, arXiv:2401.04088. No token is dropped without a `capacity`. Modules are named as in Hugging
Face's Mixtral; the matrices of all experts of a layer are one parameter, expert after expert along its first
dimension, so that shards are equal for any number of experts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from results.errors import UsageError
from workloads.choices import Choice
from workloads.gpt.model import language_model
from workloads.llama.model import Llama, LlamaBlock, layout_of
from workloads.moe import MoEShape
from workloads.rows import RowCount, add_once
from workloads.workload import Workload


def build_moe(shape: MoEShape) -> Workload:
    """Build the language model with its cross-entropy, for samples of `shape.seq` tokens."""
    layout = layout_of(shape)
    layers = tuple(f"{block}.mlp.experts" for block in layout.blocks)
    return language_model(Llama(shape, MoEBlock), shape, msgspec.structs.replace(layout, experts=layers))


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


def slopes(shape: MoEShape, counts: Tensor) -> Tensor:
    """Return the gradient (n, E) of the auxiliary loss by each probability of a token of n sequences, whose
    tokens have chosen the experts counts (n, E) times.

    Of a sequence of T tokens, of which each chooses k of E experts, the loss is `aux` E sum_e f_e p_e with
    the share f_e of the choices that are expert e, counts_e / (k T), and the mean p_e of its probability
    before the choice: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, where the group of tokens is a
    batch; for each sequence by itself DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20. It is `aux` for
    equal shares. Sequences are averaged, and the losses of layers are added up. f has no gradient.
    """
    choices = shape.seq * shape.chosen
    return counts * (shape.aux * shape.experts / (choices * shape.seq * len(counts)))


class _WithLoss(torch.autograd.Function):
    """Returns probabilities (n * T, E), and adds the slopes (n, E) of a loss to their gradient."""

    @staticmethod
    def forward(context: Any, scores: Tensor, slopes: Tensor) -> Tensor:
        context.save_for_backward(slopes)
        return scores.view_as(scores)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [own] = context.saved_tensors
        return (gradient.view(len(own), -1, own.shape[1]) + own[:, None]).view_as(gradient), None


class Experts(nn.Module):
    """E gated MLPs with SiLU (Shazeer, arXiv:2002.05202), whose matrices lie one after another."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.count = shape.experts
        self.rows = RowCount(shape.experts, flops=6 * shape.width * shape.hidden)
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts * 2 * shape.hidden, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts * shape.width, shape.hidden))
        # As the MLPs of the other models: less for what adds to the residual stream.
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (tokens, width) of expert 0, of expert 1 and so on; counts (E,) of each expert's rows."""
        self.rows.add(counts)
        # Any division of the rows costs as many FLOPs.
        without = _without_values(counts)
        if rows.is_cuda and _autocasts_to_bf16() and not without:
            products = partial(grouped_products, ends=counts.cumsum(0, dtype=torch.int32))
        else:
            products = partial(
                looped_products, sizes=_even(len(rows), self.count) if without else counts.tolist()
            )
        gate, up = products(rows, self._each(self.gate_up_proj)).chunk(2, dim=-1)
        return products(F.silu(gate) * up, self._each(self.down_proj))

    def deal(self, first: int, count: int) -> None:
        """Compute only `count` experts from `first` on; the parameters have the matrices of these."""
        self.count, self.rows = count, RowCount(count, first=first, flops=self.rows.flops)

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


def _without_values(counts: Tensor) -> bool:
    """Return whether counts are known only when a forward pass really runs."""
    return counts.is_meta or isinstance(counts, FakeTensor)


def _even(rows: int, experts: int) -> list[int]:
    each, rest = divmod(rows, experts)
    return [each + (expert < rest) for expert in range(experts)]


class Balance(nn.Module):
    """The bias of each expert in the choice of a token's experts, not in their weights: it rises by `speed`
    after a step of all replicas in which the expert was chosen less often than the mean, and falls after one
    in which it was chosen more often.

    Wang et al. 2024, arXiv:2408.15664; DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2. A Trainer settles
    it: see `strategies.training.tallies`.
    """

    bias: Tensor
    tally: Tensor

    def __init__(self, experts: int, speed: float) -> None:
        super().__init__()
        self.speed = speed
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("tally", torch.zeros(experts, dtype=torch.int64))

    def forward(self, scores: Tensor) -> Tensor:
        """Add the bias to scores (tokens, E)."""
        return scores + self.bias

    def count(self, chosen: Tensor) -> None:
        """Count how often each expert was chosen (E,) in a forward pass that trains."""
        if self.training and torch.is_grad_enabled():
            add_once(self.tally, chosen)

    def settle(self, total: Tensor) -> None:
        """Move the bias by the choices (E,) of a step."""
        self.bias += self.speed * torch.sign(total.sum() - total * len(total))
        self.tally.zero_()


class SparseMLP(nn.Module):
    """The router and the experts of one layer."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.loss_factor: Tensor | float = 1.0
        """The factor of the loss of a forward pass, set by a Trainer: see `strategies.training.loss`."""
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.choice = Choice(shape.chosen)
        self.experts = Experts(shape)
        self.balance = Balance(shape.experts, shape.bias) if shape.bias else None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self._route(tokens, len(x), positions)
        order, counts = self._placed(chosen.view(len(x), -1))
        results = self.experts(tokens[order // self.shape.chosen], counts)
        # A token's results stand side by side, so that their sum has one order; a dropped one is zero.
        own = results.new_zeros(chosen.numel(), results.shape[1]).index_put((order,), results)
        own = own.view(*chosen.shape, -1)
        y: Tensor = (own * weights[..., None].to(own.dtype)).sum(1).view(x.shape)
        return y

    def _placed(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return which choices (n, seq * k) of n sequences are computed, expert after expert, and the number
        (E,) of each expert's.

        With a capacity an expert computes the first tokens of a sequence, and counts the others as dropped:
        Lepikhin et al. 2020, arXiv:2006.16668, section 2.2, where the group of tokens is another.
        """
        order, counts = chosen.flatten().argsort(stable=True), self._counts(chosen)
        if self.balance is not None:
            self.balance.count(counts.sum(0))
        most = self.shape.places
        if most is None or _without_values(counts):
            return order, counts.sum(0)
        # The choices of one expert and one sequence follow each other.
        begins = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view(-1, len(chosen))
        begin = begins[chosen.flatten()[order], order // chosen.shape[1]]
        kept = counts.clamp(max=most).sum(0)
        self.experts.rows.drop(counts.sum() - kept.sum())
        return order[torch.arange(len(order), device=order.device) - begin < most], kept

    def _counts(self, chosen: Tensor) -> Tensor:
        """Count how often each group (n, choices) has chosen each expert, (n, E)."""
        experts = torch.arange(self.shape.experts, device=chosen.device)
        return (chosen[..., None] == experts).sum(1)

    def _route(self, tokens: Tensor, samples: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of tokens (n * seq, width), (n * seq, k) each."""
        logits = self.gate(tokens)
        scores = logits.softmax(-1, dtype=torch.float32)
        # Both have one order, and rounding moves small differences of scores more.
        rated = logits if self.balance is None else self.balance(scores.detach())
        chosen = self._choose(rated, samples, positions)
        if self.shape.aux:
            own = slopes(self.shape, self._counts(chosen.view(samples, -1))) * self.loss_factor
            scores = _WithLoss.apply(scores, own)  # type: ignore[no-untyped-call]
        weights = scores.gather(1, chosen)
        if self.shape.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _choose(self, scores: Tensor, samples: int, positions: Tensor | None) -> Tensor:
        """Return the experts (n * seq, k) of tokens with scores (n * seq, E)."""
        shape, length = self.shape, len(scores) // samples
        if shape.undivided is not None and length != shape.seq:
            raise UsageError(
                f"{shape.undivided}, and {length} of {shape.seq} tokens came: use a strategy that does not "
                f"divide sequences"
            )
        if shape.routing == "learned":
            chosen: Tensor = self.choice(scores)
            return chosen
        if length != (shape.seq if positions is None else len(positions)):
            raise UsageError(
                f"routing={shape.routing} chooses experts by the position of a token, and {length} tokens "
                f"came without their positions: use routing=learned, or a strategy that gives them"
            )
        if positions is None:
            positions = torch.arange(length, device=scores.device)
        return forced_experts(shape, positions).repeat(samples, 1)


class MoEBlock(LlamaBlock):
    """Attention and experts, each added to its input."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape, SparseMLP)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x), positions)
        return y
