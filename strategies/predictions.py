"""Memory of a rank in closed form: what its training step holds when it holds most.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5, have the three stages of ZeRO; here is counted what the
code of this package does, buffers included. With P the bytes of all parameters, k the optimizer's values a
parameter (AdamW 2, SGD with momentum 1), A the activations of a micro-batch and p ranks, where everything is
trained (frozen parameters have neither gradients, buckets nor state):

- single: P + k P, and the larger of A (backward begins) and P of gradients (backward ends);
- ddp, scratch-ddp: P of buckets beside; scratch-ddp and `bucket_view` have their gradients in them;
- local-sgd: 2 P beside: the parameters of the last average, and the buckets;
- zero1: as ddp, with the optimizer's state of the parameters that the fullest rank was dealt;
- fsdp, scratch-fsdp, hsdp: shards of 1/p, and what is gathered and averaged at the moment, block by block;
- tp: split layers over p, the rest whole; while it is split, P and a part of the largest split weight;
- pipeline: the stages of the fullest rank, and activations of the microbatches that are in flight on it.

Autograd's part is exact for fp32 on a CPU (`results.parts`). Under autocast everything is counted as if in
fp32, and the copies of the weights that autocast makes are added: an upper estimate. What is not counted:
the process, the backend's buffers, temporaries of one operation.
"""

from __future__ import annotations

from results.cell import Cell
from results.parts import ModelParts
from strategies.catalog import STRATEGIES
from strategies.closed_form.moments import Footprint


def footprint(cell: Cell, parts: ModelParts) -> Footprint:
    """The fullest moment of the fullest rank of a cell whose model has these parts."""
    moments = STRATEGIES.facts(cell.strategy).moments(cell, parts)
    return max(moments, key=lambda moment: moment.total)


def least_bytes(cell: Cell, parts: ModelParts, *, dense: bool) -> int:
    """Return a lower bound in bytes of the memory of the fullest rank: the larger of a newly built model and
    an update, which needs parameters, gradients and optimizer state at once. It has no activations.

    Without `dense` the bound counts parameters only. A sparse embedding, and a parameter that no batch uses,
    have neither a gradient nor state of their size.
    """
    moments = list(STRATEGIES.facts(cell.strategy).moments(cell, parts))
    built = (moment for moment in moments if moment.moment == "model built")
    if not dense:
        return max((moment.parameters - moment.estimated for moment in built), default=0)
    sure = (moment.certain for moment in moments if moment.moment in ("model built", "update"))
    return max(sure, default=0)


def updated_bytes(cell: Cell, parts: ModelParts) -> int:
    """Bytes of the parameters that the busiest rank updates."""
    return STRATEGIES.facts(cell.strategy).updated_bytes(cell, parts)
