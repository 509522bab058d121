"""Predictions of a cell in closed form: memory (`footprint`) and messages (`traffic`) of a step.

Memory of a rank: the maximum over a training step.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5, have the three stages of ZeRO; the counts here follow
the code of this package, with its buffers. P is the bytes of all parameters, k the optimizer's values for
each parameter (AdamW 2, SGD with momentum 1), A the activations of a micro-batch and p the ranks. If all
parameters are trained (frozen parameters have neither gradients, buckets nor state):

- single: P + k P, and the larger of A (backward begins) and P of gradients (backward ends);
- ddp, scratch-ddp: P of buckets in addition; scratch-ddp and `bucket_view` have their gradients in them;
- local-sgd: 2 P in addition: the parameters of the last average, and the buckets; 3 P with an outer step;
- zero1: as ddp, with the optimizer's state of the parameters that the fullest rank was dealt;
- fsdp, scratch-fsdp, hsdp: shards of 1/p, and the blocks that are gathered and averaged at the moment;
- tp: split layers over p, the rest whole; while it is split, P and a part of the largest split weight;
- pipeline: the stages of the fullest rank, and activations of the microbatches that are in flight on it.

Autograd's part is exact for fp32 on a CPU (`results.parts`). Under autocast all values are counted as fp32,
and the copies of the weights that autocast makes are added: an upper estimate. Not counted: the process, the
backend's buffers, temporaries of one operation.

Messages of a step: bytes and operations of each collective, for dense gradients. Not counted: buffers of
BatchNorm, agreements of ranks in a few bytes (overflows, a norm), and messages of the first step only.
Activations are counted as fp32: under autocast activations of `tp`'s forward pass and of a pipeline's edges
can be of half precision, and half of that.
"""

from __future__ import annotations

from results.cell import Cell
from results.parts import ModelParts
from strategies.catalog import STRATEGIES
from strategies.closed_form.moments import Footprint
from strategies.closed_form.terms import Term


def footprint(cell: Cell, parts: ModelParts) -> Footprint:
    """Return the moment of the largest memory, on the rank with most, of a cell whose model has these
    parts."""
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


def traffic(cell: Cell, parts: ModelParts) -> list[Term]:
    """Return all messages that the busiest rank of a cell sends in one step; none on one rank."""
    terms = STRATEGIES.facts(cell.strategy).terms(cell, parts)
    return [term for term in terms if term.payload_bytes]
