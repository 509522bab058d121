"""`local-sgd` without torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from results.spec import Option
from strategies.closed_form.terms import Term, runs, term
from strategies.facts import StrategyFacts
from strategies.promise import Promise


class LocalSgd(StrategyFacts):
    """It needs the memory of `single` and 2 P bytes (P: all parameters), for the last average and the
    buckets."""

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
            )
        }
    )
    model = "strategies.local_sgd.model:LocalSgdModel"
    bucket_copies = 2

    @property
    def promise(self) -> Promise:
        after = self.spec.integer("warmup")
        return Promise(of="parameters", every=self.spec.count, after=after, mean_buffers=True)

    @property
    def differences(self) -> tuple[str, ...]:
        return (f"averages every {self.spec.count} step{'s' if self.spec.count > 1 else ''}",)

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
