"""`ring` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.collectives.facts import CHUNK_MB, CollectiveFacts


class RingFacts(CollectiveFacts):
    """Sends between CPU ranks."""

    name = "ring"
    help = "ours: reduce-scatter and all-gather around a ring of point-to-point sends"
    options = MappingProxyType({"chunk_mb": CHUNK_MB})
    sends = True
    route = "strategies.collectives.ring.route:route"
    implements = frozenset(("all-reduce", "all-gather"))
    on_cuda = "--collective default with NCCL_ALGO=Ring"
