"""Points of several plans are the same if these fields are equal."""

from __future__ import annotations

import msgspec

from reports.analysis.series import standing_skips


def test_a_point_that_a_later_plan_ran_is_no_skip_whatever_is_known_of_the_cluster(planted) -> None:
    """The GPU and the network of a request, which `auto` reads, are not settings of the training."""
    planted.skip("ddp", 2, "this machine has no GPU", batch=8)
    first = planted.plan()
    planted.series("weak", "ddp", [2], batch=8)
    second = planted.plan()
    asked = {"gpu_model": "H100-SXM5-80GB", "network_gbit_per_s": 400.0, "include": (), "precision": "fp32"}
    later = msgspec.structs.replace(second, request=msgspec.structs.replace(second.request, **asked))
    assert standing_skips([first, later]) == []
    other = msgspec.structs.replace(later.request, precision="bf16")
    assert len(standing_skips([first, msgspec.structs.replace(later, request=other)])) == 1
