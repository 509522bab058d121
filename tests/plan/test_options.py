from __future__ import annotations

from pathlib import Path

import pytest

from harness.matrix import run_options
from harness.plan.options import DURATION, read_counts, read_duration_s, read_gpus, read_names
from harness.plan.request import make_requests
from harness.plan.study_file import BY_NAME, OPTIONS, StudyFile
from results.errors import GpuCountsError, UsageError


def test_every_field_of_a_study_but_the_patterns_is_an_option() -> None:
    assert [option.name for option in OPTIONS] + ["include", "exclude"] == list(StudyFile.__struct_fields__)


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.default.strip("(") == one.default != ""])
def test_a_default_that_the_help_states_is_the_one_that_is_taken(option) -> None:
    def taken(**given):
        options = StudyFile(gpus="1..2", **given)
        return make_requests(options, machine_has_cuda=False, source_folder=Path()), run_options(options)

    of_type = {bool: lambda text: text == "true", str: str, int: int, float: float}
    assert taken(**{option.name: of_type[option.kind.flag_type](option.default)}) == taken()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("single,ddp", ("single", "ddp")),
        (" single , ddp,", ("single", "ddp")),
        (["single", "ddp"], ("single", "ddp")),
        (["single,ddp", "single"], ("single", "ddp")),
        ("py:models.net:build", ("py:models.net:build",)),
        ("", ()),
    ],
)
def test_names_come_as_a_text_or_a_list(value, expected) -> None:
    assert read_names(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8, (8,)), ("8,16", (8, 16)), ([8, "16"], (8, 16)), ("8,8", (8,)), ("-3", (-3,)), ([16, 8], (16, 8))],
)
def test_counts_come_as_a_number_a_text_or_a_list(value, expected) -> None:
    assert read_counts(value, "--batch-size") == expected


@pytest.mark.parametrize("value", ["8,x", "", "8,", "1e3", "0x10", "8.0", "1_0", "9" * 5000])
def test_counts_that_are_no_whole_numbers_are_refused(value) -> None:
    with pytest.raises(UsageError, match=r"^--batch-size takes whole numbers joined by commas"):
        read_counts(value, "--batch-size")


def test_gpus_name_the_place_they_stand_in() -> None:
    assert read_gpus([1, "2..8"], "gpus") == (1, 2, 4, 8)
    with pytest.raises(GpuCountsError, match=r"^gpus '8\.\.1': a range goes up"):
        read_gpus("8..1", "gpus")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(20, 20.0), (1.5, 1.5), ("20", 20.0), ("90s", 90.0), ("1.5m", 90.0), ("2 h", 7200.0), ("1h30m", 5400.0)],
)
def test_a_duration_is_in_seconds_unless_it_says_otherwise(value, seconds) -> None:
    assert read_duration_s(value, "--budget") == seconds


@pytest.mark.parametrize("value", ["soon", "-5s", "5w", "", "30m1h"])
def test_a_duration_that_does_not_parse_is_refused(value) -> None:
    with pytest.raises(UsageError, match="--budget takes seconds or a time like"):
        read_duration_s(value, "--budget")


BATCHES = "takes auto, or whole numbers joined by commas, at least 1 and at most 1000000000"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, f"{BATCHES}, not 0"),
        ("batch_size", "8,-2", f"{BATCHES}, not -2"),
        ("batch_size", 10**12, f"{BATCHES}, not 1000000000000"),
        ("time", "120", "120 has no unit: write 120m for minutes or 120s for seconds"),
        ("time", 7200.0, "7200 has no unit: write 7200m for minutes or 7200s for seconds"),
        ("repeats", 0, "takes a whole number, at least 1 and at most 1000, not 0"),
        ("repeats", 10**6, "takes a whole number, at least 1 and at most 1000, not 1000000"),
        ("clip_norm", 0.0, "takes a number or none, more than 0 and at most 1000000000, not 0.0"),
        ("seed", -1, "takes whole numbers joined by commas, at least 0 and at most 4294967295, not -1"),
        (
            "precision",
            "fp32,bf17",
            "takes fp32, tf32, bf16, fp16 or float8, not 'bf17' (did you mean 'bf16'?)",
        ),
        ("target", float("nan"), "takes a number, at least 0 and at most 1, not nan"),
        ("budget", float("inf"), f"takes {DURATION.words}, at least 0 and at most 1000000000, not inf"),
        ("max_time", "0s", f"takes {DURATION.words}, more than 0 and at most 1000000000, not '0s'"),
        ("precision", "fp8", "takes fp32, tf32, bf16, fp16 or float8, not 'fp8' (did you mean 'float8'?)"),
        ("rerun", "all", "takes failed, not 'all'"),
        ("scaling", "weak,sideways", "takes weak, strong or both, not 'sideways'"),
        ("strategy", " , ", "is empty; pass a value or omit it"),
        ("dataset", " ", "is empty; pass a value or omit it"),
        ("gpus", 0, "'0': counts start at 1, not 0"),
    ],
)
def test_a_value_against_its_rule_is_refused_with_both(name, value, message) -> None:
    with pytest.raises(UsageError) as error:
        BY_NAME[name].check(value, "x")
    assert str(error.value) == f"x {message}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0),
        ("quads", 0),
        ("seed", 2**32 - 1),
        ("target", 1.0),
        ("clip_norm", 1e-9),
        ("repeats", 1000),
    ],
)
def test_a_value_at_the_edge_of_its_rule_passes(name, value) -> None:
    BY_NAME[name].check(value, "x")
