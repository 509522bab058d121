"""Points that are excluded must be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.plan.points import points
from harness.plan.request import make_request
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.plan import Pattern


def test_an_exclude_that_no_point_has_is_refused_with_what_there_is() -> None:
    options = StudyFile(workload="mlp", gpus="1,2", device="cpu", exclude=[Pattern(workload="resnet101")])
    request = make_request(options, machine_has_cuda=False, source_folder=Path())
    with pytest.raises(UsageError, match=r"exclude\[0\]: no point .* workload resnet101; it has mlp"):
        list(points(request))
