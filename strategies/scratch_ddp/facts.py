"""`scratch-ddp` without torch."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.compression.catalog import COMPRESSIONS
from strategies.ddp.facts import BUCKET_MB, UNUSED, BucketedFacts


class ScratchDdp(BucketedFacts):
    """It needs the memory of `single` and P bytes of buckets (P: all parameters), which contain the
    gradients."""

    name = "scratch-ddp"
    help = "ours on raw collectives: the step of torch's DDP, gradients as views of the buckets"
    options = MappingProxyType(
        {
            "bucket_mb": BUCKET_MB,
            "first_bucket_mb": Option(
                kind="float", default=1.0, minimum=0.001, help="MiB of the bucket that is full first"
            ),
            "find_unused": UNUSED,
        }
    )
    model = "strategies.scratch_ddp.model:ScratchDdpModel"

    @property
    def first_bucket_mb(self) -> float:
        return self.spec.number("first_bucket_mb")

    @property
    def in_buckets(self) -> bool:
        return True

    def refusal(self, cell: Cell) -> str | None:
        if self.spec.flag("find_unused") and COMPRESSIONS.facts(cell.compression).keeps_residual:
            return (
                f"scratch-ddp:find_unused=true needs --compression none, fp16 or bf16, not "
                f"{cell.compression}: it drops the sum of a parameter that no replica used, and with it the "
                f"residual of that parameter"
            )
        return None
