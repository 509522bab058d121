"""Settings of which several values are given: a request, and so a plan, for each combination."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.plan.naming import default_name, study_name
from harness.plan.request import make_request, make_requests
from harness.plan.study_file import SETTINGS, StudyFile
from results.errors import UsageError
from results.plan import Request


def requests(**given: object) -> tuple[Request, ...]:
    options = StudyFile(workload="mlp", gpus=1, device="cpu", **given)  # type: ignore[arg-type]
    return make_requests(options, machine_has_cuda=False, source_folder=Path())


def test_every_combination_is_a_request_and_the_last_setting_changes_first() -> None:
    found = requests(precision="fp32,bf16", accumulation=[1, "2"], seed=7)
    made = [(one.precision, one.accumulation, one.seed) for one in found]
    assert made == [("fp32", 1, 7), ("fp32", 2, 7), ("bf16", 1, 7), ("bf16", 2, 7)]


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("dataset", "synthetic,digits", ["synthetic", "digits"]),
        ("precision", ["fp32", "bf16"], ["fp32", "bf16"]),
        ("accumulation", "1,4", [1, 4]),
        ("optimizer", "sgd:lr=0.1,adamw,sgd", ["sgd", "adamw"]),
        ("memory_format", "contiguous, channels_last", ["contiguous", "channels_last"]),
        ("seed", [3, 1], [3, 1]),
    ],
)
def test_each_setting_takes_a_text_with_commas_or_a_list(
    name: str, value: object, made: list[object]
) -> None:
    assert name in SETTINGS
    assert [getattr(one, name) for one in requests(**{name: value})] == made


def test_one_value_is_the_request_that_it_always_was() -> None:
    options = StudyFile(workload="mlp", gpus=1, device="cpu", precision="bf16", accumulation="2")
    [one] = make_requests(options, machine_has_cuda=False, source_folder=Path())
    assert one == make_request(options, machine_has_cuda=False, source_folder=Path())
    assert (one.precision, one.accumulation) == ("bf16", 2)


def test_the_name_of_a_study_of_several_settings_is_of_all_of_them() -> None:
    both, first = requests(precision="fp32,bf16"), requests(precision="fp32")
    assert default_name(*first) != default_name(*both) != default_name(*requests(precision="bf16,fp16"))
    assert study_name(*both, name="mine") == "mine"


def test_a_value_that_no_setting_has_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="--precision takes fp32, tf32, bf16 or fp16, not 'fp8'"):
        requests(precision="fp32,fp8")
