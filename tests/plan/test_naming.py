from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import a_request, request_of

from harness.plan.request import default_name, study_name
from harness.plan.study_file import StudyFile
from results.errors import UsageError


def test_the_name_tells_workloads_and_counts() -> None:
    request = request_of(workload="resnet18-32px,gpt-nano", gpus="1..2")
    assert re.fullmatch(r"gpt-nano\+resnet18-32px-g1-2-[0-9a-f]{6}", default_name(request))


def test_one_count_stands_alone() -> None:
    assert re.fullmatch(r"mlp-g4-[0-9a-f]{6}", default_name(request_of(workload="mlp", gpus=4)))


def test_the_same_call_has_the_same_name_in_every_process() -> None:
    assert default_name(request_of(workload="mlp", gpus="1..2")) == "mlp-g1-2-5d523e"


@pytest.mark.parametrize(
    "change", [{"precision": "bf16"}, {"batch_size": 8}, {"seed": 1}, {"budget": 5}, {"strategy": "ddp"}]
)
def test_another_request_has_another_name(change) -> None:
    base = {"workload": "mlp", "gpus": 2}
    assert default_name(request_of(**base)) != default_name(request_of(**base, **change))


def test_more_repeats_go_on_in_the_same_study() -> None:
    base = {"workload": "mlp", "gpus": 2}
    assert default_name(request_of(**base, repeats=2)) == default_name(request_of(**base, repeats=6))


def test_a_study_keeps_its_name_when_its_sources_move() -> None:
    options = StudyFile(workload="py:mine:build", gpus=1)
    here = a_request(options, source_folder=Path("here"))
    there = a_request(options, source_folder=Path("there"))
    assert here.source_folder != there.source_folder
    assert default_name(here) == default_name(there)


def test_a_long_list_of_workloads_stays_a_short_folder_name() -> None:
    names = ",".join(f"py:package.module{i}:build" for i in range(40))
    name = default_name(request_of(workload=names, gpus="1..256"))
    assert len(name) < 100
    assert study_name(request_of(workload=names, gpus="1..256"), name=name) == name


def test_a_given_name_is_taken() -> None:
    assert study_name(request_of(gpus=1), name="nightly_2") == "nightly_2"


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", ".hidden", "-flag", "a b", "a" * 101, "stra\u00dfe", "a\n"]
)
def test_a_name_that_is_no_plain_folder_is_refused(name) -> None:
    with pytest.raises(UsageError, match=r"^--name .* is not a plain folder name"):
        study_name(request_of(gpus=1), name=name)
