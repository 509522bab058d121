"""The collectives that there are."""

from __future__ import annotations

from types import MappingProxyType

from results.spec import Catalog, Entry, Option

_CHUNK_MB = Option(kind="float", default=2.0, minimum=0.001, help="MiB that are sent at once")
_VIA = Option(
    kind="str",
    default="shards",
    choices=("shards", "leaders"),
    help="across nodes every rank moves its shard, or one rank a node moves all",
)

COLLECTIVES = Catalog(
    "collective",
    [
        Entry(name="default", help="the backend's own all-reduce"),
        Entry(
            name="ring",
            help="ours: reduce-scatter and all-gather around a ring of point-to-point sends",
            options=MappingProxyType({"chunk_mb": _CHUNK_MB}),
        ),
        Entry(
            name="tree",
            help="ours: up and down two binary trees, half of it each, in chunks that follow each other",
            options=MappingProxyType({"chunk_mb": _CHUNK_MB}),
        ),
        Entry(
            name="hierarchical",
            help="inside of the nodes, across them, inside again; compression across nodes alone",
            options=MappingProxyType({"via": _VIA}),
        ),
    ],
)
