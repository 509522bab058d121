"""A compressor from another package: every element above a share of its bucket's largest is sent.

`bench matrix --compression threshold:0.3` sends what is at least 0.3 times as large as the largest magnitude,
and adds the residual to the next gradient (Strom 2015, with a threshold that follows the gradient). Planning
imports this file, and must not import torch: the compressor is made inside of `of`, on a rank.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Option, Spec
from strategies.compression.facts import FEEDBACK, CompressorFacts

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.compression.base import Compressor
    from strategies.exchange.buckets import Bucket


class ThresholdFacts(CompressorFacts):
    """Ranks choose different indices, and different numbers of them."""

    name = "threshold"
    help = "elements of at least a share of their bucket's largest magnitude, with their indices"
    positional = Option(
        kind="float", minimum=1e-6, maximum=1.0, help="the share of the largest", example="0.3"
    )
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "threshold_compressor:Threshold"
    need = "all-gather"


class Threshold:
    """What `compressor` names: only its `of` is called."""

    @staticmethod
    def of(spec: Spec, *, seed: int, rank: int) -> Compressor:
        import torch

        from strategies.compression.base import Compressor

        class Made(Compressor):
            def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
                values = bucket.values
                assert values.numel() < 2**31, "indices are int32"
                magnitudes = values.abs()
                # NaN is not less than anything: what is not finite is sent, and zeros never are.
                chosen = (magnitudes < spec.ratio * magnitudes.max()).logical_not_() & (values != 0)
                indices = chosen.nonzero()[:, 0]
                exact = values.index_select(0, indices)
                sent = exact.float()
                if residual is not None:
                    error = exact.sub(sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    residual.copy_(values).index_copy_(0, indices, error.to(residual.dtype))
                # All ranks send equally much: shorter ones add zeros at index 0.
                most = torch.tensor([max(1, len(indices))], dtype=torch.float64, device=values.device)
                wire.largest(most)
                mine = torch.zeros(2, int(most.item()), dtype=torch.int32, device=values.device)
                mine[0, : len(indices)] = sent.view(torch.int32)
                mine[1, : len(indices)] = indices
                pairs = wire.all_gather(mine.flatten())
                values.zero_()
                for theirs, where in pairs.view(wire.size, 2, -1):
                    values.index_add_(0, where, theirs.view(torch.float32).to(values.dtype))

        return Made(feedback=spec.flag("feedback"))
