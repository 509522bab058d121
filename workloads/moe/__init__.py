"""A mixture of experts: its measures and closed forms. A Llama whose MLP is one of several experts for each
token: Jiang et al. 2024, arXiv:2401.04088 (Mixtral)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, Self, get_args

from results.errors import SpecError
from results.parts import VALUE_BYTES, Part, Saved, Weight
from results.spec import Option, Spec, Value
from workloads.activations import INDEX_BYTES
from workloads.llama import LlamaShape
from workloads.shape import WorkloadFacts

Routing = Literal["learned", "balanced", "skewed"]


@dataclass(frozen=True, kw_only=True)
class MoEShape(LlamaShape):
    """The measures of a mixture of experts; `hidden` is the width between the matrices of one expert."""

    experts: int
    chosen: int
    """The number of experts of a token."""
    renormalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    routing: Routing = "learned"
    """How a token's experts are chosen: `learned` by the largest scores of the router, `balanced` evenly by
    the position of the token, `skewed` with one expert that has `skew` times the mean. Their weights are the
    scores of the router in all three."""
    skew: int = 2
    aux: float = 0.0
    """The factor of the auxiliary loss that balances the experts: see `workloads.moe.model.slopes`."""
    capacity: float = 0.0
    """The rows of a sequence that an expert computes at most, in means of all experts; 0: all of them."""
    bias: float = 0.0
    """The step of the bias that balances the choices of experts: see `workloads.moe.model.Balance`."""

    @property
    def options(self) -> Mapping[str, Option]:
        routing = Option(
            kind="str",
            default=self.routing,
            choices=get_args(Routing),
            help="how tokens choose experts: learned, balanced (an upper bound of speed) or skewed",
        )
        skew = Option(
            kind="int",
            default=self.skew,
            minimum=2,
            help="with routing=skewed: the tokens of the busiest expert, in means of all experts",
        )
        aux = Option(
            kind="float",
            default=self.aux,
            minimum=0,
            help="factor of the auxiliary loss of each layer that balances the experts within a sequence",
        )
        capacity = Option(
            kind="float",
            default=self.capacity,
            minimum=0,
            help="most rows of a sequence that an expert computes, in means of all experts; it drops later "
            "ones; 0: none",
        )
        bias = Option(
            kind="float",
            default=self.bias,
            minimum=0,
            help="step of the bias of each expert that balances choices over all replicas, without a loss",
        )
        own = {"routing": routing, "skew": skew, "aux": aux, "capacity": capacity, "bias": bias}
        return MappingProxyType({**super().options, **own})

    @property
    def even_options(self) -> Mapping[str, Value]:
        return MappingProxyType(
            {"routing": "balanced", "skew": self.skew, "aux": self.aux, "bias": self.bias}
        )

    def of(self, spec: Spec) -> Self:
        """Return the shape with these options. Raises SpecError as a text's shape does, for a skew that is
        not used or that needs more tokens than there are, and for a balance of experts that no router
        chooses."""
        shape = super().of(spec)
        used = [name for name in ("aux", "bias") if getattr(shape, name)]
        if used and shape.routing != "learned":
            raise SpecError(
                f"workload {spec.name}: {used[0]} balances a router's choices: use routing=learned"
            )
        if shape.routing != "skewed":
            if shape.skew != self.skew:
                raise SpecError(f"workload {spec.name}: skew needs routing=skewed: leave skew out")
        elif shape.skew * shape.chosen > shape.experts:
            raise SpecError(
                f"workload {spec.name}: each token chooses {shape.chosen} of {shape.experts} experts, so "
                f"that one has at most {shape.experts // shape.chosen} times the mean, not {shape.skew}"
            )
        return shape

    def facts(self) -> WorkloadFacts:
        known = self.text_facts(
            family="moe",
            builder="workloads.moe.model:build_moe",
            parts=self.parts(),
            heads=(self.heads, self.kv_heads),
        )
        together = "bias moves after each step by the counts of all replicas" if self.bias else None
        return replace(known, undivided=self.undivided, together=together)

    @property
    def undivided(self) -> str | None:
        """Why a rank needs complete sequences, as a clause; None if it does not."""
        names = [name for name in ("aux", "capacity", "bias") if getattr(self, name)]
        verb = "are" if len(names) > 1 else "is"
        return f"{' and '.join(names)} {verb} defined over complete sequences" if names else None

    @property
    def places(self) -> int | None:
        """Most rows of a sequence that an expert computes: `capacity` k T / E, rounded up; None: all."""
        even = Fraction(self.seq * self.chosen, self.experts)
        return math.ceil(Fraction(str(self.capacity)) * even) if self.capacity else None

    def mlp(self) -> Part:
        """Return the second norm, the router and E experts: d E + 3 E d H parameters. Each token is computed
        by k of them: 2 T (d E + 3 k d H) FLOPs. With a `capacity` FLOPs and activations are those without a
        dropped token, which a step does not exceed.

        The router saves its E probabilities and, of k experts, their weights (twice and their sum, if these
        are renormalised); an auxiliary loss saves E slopes a sequence. Each token has three indices of eight
        bytes an expert: which it is, its place in the order of experts, and the way back. An expert saves its
        input, 4 H values and its result.
        """
        t, d, hidden, experts, chosen = self.seq, self.width, self.hidden, self.experts, self.chosen
        weights = 2 * chosen + 1 if self.renormalised else chosen
        kept = 3 * d + 1 + experts + weights + chosen * (2 * d + 4 * hidden)
        return Part(
            weights=(
                Weight(rows=d),
                Weight(rows=experts, columns=d),
                Weight(rows=experts * 2 * hidden, columns=d, experts=experts),
                Weight(rows=experts * d, columns=hidden, experts=experts),
            ),
            saved=Saved(
                whole=t * (VALUE_BYTES * kept + INDEX_BYTES * 3 * chosen)
                + (VALUE_BYTES * experts if self.aux else 0)
            ),
            products=Saved(whole=VALUE_BYTES * t * (experts + chosen * (2 * hidden + d))),
            dispatched=VALUE_BYTES * t * chosen * d,
            flops=2 * t * (d * experts + chosen * 3 * d * hidden),
        )
