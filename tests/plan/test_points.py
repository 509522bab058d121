"""Points that are excluded must be there."""

from __future__ import annotations

import re

import pytest
from builders import a_request

from harness.plan.points import points
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.plan import Pattern


def test_an_exclude_that_no_point_has_is_refused_with_what_there_is() -> None:
    options = StudyFile(workload="mlp", gpus="1,2", device="cpu", exclude=[Pattern(workload="resnet101")])
    request = a_request(options)
    with pytest.raises(UsageError, match=r"exclude\[0\]: no point .* workload resnet101; it has mlp"):
        list(points(request))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Pattern(collective="tree"), "no point of the matrix has collective tree; it has default, ring"),
        (Pattern(link="100mbit"), "link 100mbit; it has none, 1gbit"),
    ],
)
def test_collectives_and_links_can_be_excluded_where_they_are(pattern, message) -> None:
    options = StudyFile(gpus=2, device="cpu", collective="default,ring", link="none,1gbit", exclude=[pattern])
    request = a_request(options)
    with pytest.raises(UsageError, match=re.escape(message)):
        list(points(request))


def test_the_points_of_a_series_stand_together_one_axis_inside_the_other() -> None:
    options = StudyFile(
        workload="mlp",
        gpus="2,4",
        strategy="ddp",
        batch_size=8,
        device="cpu",
        compression="none,bf16",
        collective="default,ring",
        link="none,1gbit",
        exclude=[Pattern(collective="ring", link="1gbit"), Pattern(compression="bf16", gpus=4)],
    )
    request = a_request(options)
    found = [
        (point.compression, point.collective, point.link, point.gpus, excluding is None)
        for point, excluding in points(request)
    ]
    assert found == [
        ("none", "default", "none", 2, True),
        ("none", "default", "none", 4, True),
        ("none", "default", "1gbit", 2, True),
        ("none", "default", "1gbit", 4, True),
        ("none", "ring", "none", 2, True),
        ("none", "ring", "none", 4, True),
        ("none", "ring", "1gbit", 2, False),
        ("none", "ring", "1gbit", 4, False),
        ("bf16", "default", "none", 2, True),
        ("bf16", "default", "none", 4, False),
        ("bf16", "default", "1gbit", 2, True),
        ("bf16", "default", "1gbit", 4, False),
        ("bf16", "ring", "none", 2, True),
        ("bf16", "ring", "none", 4, False),
        ("bf16", "ring", "1gbit", 2, False),
        ("bf16", "ring", "1gbit", 4, False),
    ]


def test_an_included_point_is_plain_unless_it_says_otherwise() -> None:
    base = {"workload": "mlp", "strategy": "ddp", "gpus": 3, "batch_size": 8}
    include = [Pattern(**base), Pattern(**base, collective="ring", link="1gbit", compression="bf16")]
    options = StudyFile(workload="mlp", gpus=2, strategy="ddp", batch_size=8, device="cpu", include=include)
    request = a_request(options)
    found = [point for point, _ in points(request) if point.gpus == 3]
    assert [(point.compression, point.collective, point.link) for point in found] == [
        ("none", "default", "none"),
        ("bf16", "ring", "1gbit"),
    ]
