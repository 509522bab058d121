"""`tree` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.collectives.facts import CHUNK_MB, CollectiveFacts


class TreeFacts(CollectiveFacts):
    """Sends between CPU ranks."""

    name = "tree"
    help = "ours: up and down two binary trees, half of it each, in chunks that follow each other"
    options = MappingProxyType({"chunk_mb": CHUNK_MB})
    sends = True
    route = "strategies.collectives.tree.route:route"
    implements = frozenset(("all-reduce",))
    on_cuda = "--collective default with NCCL_ALGO=Tree"
