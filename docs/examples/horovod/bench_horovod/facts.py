"""`horovod` without torch, and without Horovod."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from results.cell import Cell
from results.engine import Engine
from results.parts import VALUE_BYTES, ModelParts
from results.spec import Option
from strategies.closed_form.moments import Footprint, step_moments
from strategies.closed_form.sizes import HALF_BYTES
from strategies.closed_form.terms import MIB, Term, term
from strategies.facts import StrategyFacts


class Horovod(StrategyFacts):
    """The facts of Horovod's optimizer; it needs the memory of `single` and a buffer for fused gradients."""

    name = "horovod"
    help = "Horovod's optimizer: replicas, gradients fused and averaged over its own connections"
    options = MappingProxyType(
        {
            "fusion_mb": Option(
                kind="float", default=128.0, minimum=0, help="MiB of gradients that are averaged at once"
            ),
            "cycle_ms": Option(
                kind="float", default=1.0, minimum=0.001, help="milliseconds in which gradients are gathered"
            ),
            "compression": Option(
                kind="str", default="none", choices=("none", "fp16"), help="data type of averaged gradients"
            ),
        }
    )
    engine = Engine(
        package="horovod",
        module="horovod.torch",
        release="0.28.1",
        install="bash docs/examples/horovod/build.sh",
    )
    model = "bench_horovod.model:HorovodModel"
    fixed_exchange = "Horovod averages gradients by its own collectives; its compression is an option of it"

    @property
    def averages_half(self) -> bool:
        return self.spec.word("compression") == "fp16"

    @property
    def differences(self) -> tuple[str, ...]:
        return ("averages gradients in fp16",) if self.averages_half else ()

    @property
    def of_process(self) -> str:
        return f"horovod {self.fusion_bytes} {self.spec.number('cycle_ms')}"

    @property
    def fusion_bytes(self) -> int:
        """The size of the buffer for fused gradients."""
        return int(self.spec.number("fusion_mb") * MIB)

    def sent(self, values: int) -> tuple[int, int]:
        """Return the bytes that average `values` gradients in a step, and the fewest operations for them."""
        payload = values * (HALF_BYTES if self.averages_half else VALUE_BYTES)
        return payload, max(1, ceil(payload / max(1, self.fusion_bytes)))

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        sizes, base = self.whole_model(cell, parts)
        return step_moments(sizes, replace(base, buckets=min(sizes.trained, self.fusion_bytes)))

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        payload, operations = self.sent(parts.trained.values)
        yield term(
            "gradients",
            "all-reduce",
            ("replicate", cell.gpus),
            payload=payload,
            operations=operations,
            overlap="last backward",
        )
