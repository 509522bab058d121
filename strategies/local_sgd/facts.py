"""`local-sgd` without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from results.spec import Option
from strategies.closed_form.moments import Footprint
from strategies.closed_form.sizes import Sizes
from strategies.closed_form.terms import Term, runs, term
from strategies.facts import StrategyFacts
from strategies.promise import OuterStep, Promise

_OUTER_OPTIONS = ("outer_lr", "outer_momentum")


class LocalSgd(StrategyFacts):
    """It needs the memory of `single` and 2 P bytes (P: all parameters), for the last average and the
    buckets; with an outer step P more, for its momentum."""

    name = "local-sgd"
    unprojected = "most of its steps exchange nothing, and the laws are of steps that all do"
    help = "ranks train independently, and average their parameters every N steps"
    positional = Option(kind="int", minimum=1, help="the steps from one average to the next", example="8")
    options = MappingProxyType(
        {
            "warmup": Option(
                kind="int",
                default=0,
                minimum=0,
                help="first steps, which average gradients, uncompressed",
            ),
            "outer": Option(
                kind="str",
                default="none",
                choices=("none", "nesterov"),
                help="how an average ends: in the mean, or in a step from the last average (DiLoCo)",
            ),
            "outer_lr": Option(
                kind="float", default=0.7, minimum=0.001, help="learning rate of the outer step"
            ),
            "outer_momentum": Option(
                kind="float", default=0.9, minimum=0.001, maximum=0.999, help="momentum of the outer step"
            ),
        }
    )
    model = "strategies.local_sgd.model:LocalSgdModel"
    bucket_copies = 2

    def refusal(self, cell: Cell) -> str | None:
        for key in _OUTER_OPTIONS if self.outer is None else ():
            if self.spec.options[key] != self.options[key].default:
                return f"{self.spec.text} takes no outer step: add outer=nesterov, or leave {key} out"
        return None

    @property
    def outer(self) -> OuterStep | None:
        """The step by which an average ends; None: it ends in the mean."""
        if self.spec.word("outer") == "none":
            return None
        lr, momentum = (self.spec.number(key) for key in _OUTER_OPTIONS)
        return OuterStep(lr=lr, momentum=momentum)

    @property
    def promise(self) -> Promise:
        after = self.spec.integer("warmup")
        return Promise(
            of="parameters", every=self.spec.count, after=after, mean_buffers=True, outer=self.outer
        )

    @property
    def differences(self) -> tuple[str, ...]:
        averages = f"averages every {self.spec.count} step{'s' if self.spec.count > 1 else ''}"
        if self.outer is None:
            return (averages,)
        step = f"lr {self.outer.lr:g}, momentum {self.outer.momentum:g}"
        return (averages, f"takes an outer step at each average ({step})")

    def whole_model(self, cell: Cell, parts: ModelParts) -> tuple[Sizes, Footprint]:
        sizes, base = super().whole_model(cell, parts)
        momentum = 0 if self.outer is None else sizes.trained
        return sizes, replace(base, buckets=base.buckets + momentum)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        trained = parts.trained
        buckets = runs([weight.values for part in trained.parts for weight in part.weights])
        yield term(
            "parameters",
            "all-reduce",
            ("replicate", cell.gpus),
            payload=VALUE_BYTES * trained.values / self.spec.count,
            operations=buckets / self.spec.count,
        )
