from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from builders import a_request
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cli.matrix import matrix_command as command
from harness.launchers.reference import reference
from harness.plan.options import (
    BATCHES,
    COUNTS,
    DURATION,
    GPUS,
    JOB_TIME,
    LIMITS,
    NAMES,
    VARIABLES,
    PlanOption,
)
from harness.plan.study_file import BY_NAME, OPTIONS, STUDY_FILE, StudyFile, by_heading, check_values
from results.errors import UsageError
from results.plan import Request
from results.value_types import bounds

WHAT_IT_IS = "a study file holds `option: value` lines, such as gpus: 1..8"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "study.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    """The message, without the path that it opens with."""
    path = written(folder, text)
    with pytest.raises(UsageError) as error:
        STUDY_FILE.read(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def requested(folder: Path, text: str) -> Request:
    return a_request(STUDY_FILE.read(written(folder, text)), source_folder=folder)


def test_help_and_the_page_of_options_list_each_option_under_its_heading() -> None:
    shown = CliRunner().invoke(command, ["--help-all"]).output
    for text, title in ((shown, "{}:\n"), (reference(), "## {}\n")):
        at = [text.index(title.format(heading)) for heading in by_heading()]
        for options, begin, end in zip(by_heading().values(), at, [*at[1:], len(text)], strict=True):
            assert [one.flag for one in options if f"{one.flag}" not in text[begin:end]] == []
        assert at == sorted(at)
    assert shown.index("--dry-run") < shown.index("What is run:\n") < shown.index("--tensorboard")


@pytest.mark.parametrize("gpus", ["1..4", "[1, 2, 4]", "1,2,4", "[1, '2..4']"])
@pytest.mark.parametrize("batch", ["8,16", "[8, 16]", "['8', 16]"])
@pytest.mark.parametrize("strategy", ["single,ddp", "[single, ddp]"])
def test_a_list_reads_the_same_in_every_form(tmp_path, gpus, batch, strategy) -> None:
    text = f"gpus: {gpus}\nbatch_size: {batch}\nstrategy: {strategy}\n"
    request = requested(tmp_path, text)
    assert request.gpus == (1, 2, 4)
    assert request.batch_sizes == (8, 16)
    assert request.strategies == ("single", "ddp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gpus: {a: 1}",
            ", line 1: gpus takes counts and ranges such as 1..8, joined by commas, not a mapping",
        ),
        ("gpus: [true]", ", line 1: gpus[0] takes a whole number or a text, not true"),
        ("gpus: 8..1", ", line 1: gpus '8..1': a range goes up, and 1 is less than 8; write 1..8"),
        ("repeats: 0", ", line 1: repeats takes a whole number, at least 1 and at most 1000, not 0"),
        ("repeats: many", ", line 1: repeats takes a whole number, at least 1 and at most 1000, not 'many'"),
        (
            "repeats: '5'",
            ", line 1: repeats takes a whole number, at least 1 and at most 1000, not '5'; write 5",
        ),
        ("target: 1e-2", ", line 1: target takes a number, at least 0 and at most 1, not '1e-2'; write 0.01"),
        ("target: .nan", ", line 1: target takes a number, at least 0 and at most 1, not nan"),
        ("workload: [mlp, 5]", ", line 1: workload[1] takes a text, not 5; quote it: '5'"),
        ("workload:\n- mlp\n- no", ", line 3: workload[1] takes a text, not no; quote it: 'no'"),
        ("link: 1.50", ", line 1: link takes names joined by commas, or a list, not 1.50; quote it: '1.50'"),
        ("compile: 1", ", line 1: compile takes true or false, not 1"),
        ("compile: 'on'", ", line 1: compile takes true or false, not 'on'"),
        ("tensorboard: 'true'", ", line 1: tensorboard takes true or false, not 'true'; write true"),
        (
            "gpus: 1\nprecision: fp8",
            ", line 2: precision takes fp32, tf32, bf16, fp16 or float8, not 'fp8' (did you mean 'float8'?)",
        ),
        ("exclude: [{scaling: up}]", ", line 1: exclude[0].scaling takes weak or strong, not 'up'"),
        ("exclude:\n- gpus: 0", ", line 2: exclude[0].gpus takes a whole number, at least 1, not 0"),
        (
            "include: [{batch_size: -1}]",
            ", line 1: include[0].batch_size takes a whole number, at least 1, not -1",
        ),
        ("exclude: 8", ", line 1: exclude takes a list, not 8"),
        ("exclude: [8]", ", line 1: exclude[0] takes `key: value` lines, not 8"),
        (
            "exclude:\n- link: none\n  gpu: 2",
            ", line 3: exclude[0].gpu is not an option (did you mean 'gpus'?); there are: "
            "workload, strategy, compression, collective, link, gpus, batch_size, scaling",
        ),
        # What YAML takes for a mapping.
        (
            "gpus: 2\ncompression: topk: 0.01",
            ", line 2: not readable as YAML: mapping values are not allowed here; quote it: 'topk:0.01'",
        ),
        (
            "compression: [topk: 0.01]",
            ", line 1: compression[0] takes a text, not a mapping; quote it: 'topk:0.01'",
        ),
        (
            "strategy:\n- single\n- ddp: bucket_mb=50",
            ", line 3: strategy[1] takes a text, not a mapping; quote it: 'ddp:bucket_mb=50'",
        ),
        ("- gpus", f": {WHAT_IT_IS}, not a list"),
        ("", f": {WHAT_IT_IS}, not nothing"),
        ("gpus: 1\n# more\ngpus: 2", ", line 3: gpus is given twice; keep one"),
        ("exclude:\n- gpus: 1\n  gpus: 2", ", line 3: gpus is given twice; keep one"),
        ("gpus: 1\nno: 2", ", line 2: a key must be a text; quote it: 'no'"),
        ("? [1, 2]\n: 3", ", line 1: a key must be a text"),
        (
            "gpus: 1\nworkload: [mlp",
            ", line 2: not readable as YAML: expected ',' or ']', but got '<stream end>'",
        ),
        ("name: !made-up a", ", line 1: the tag !made-up has no use here; leave it out, and quote strings"),
        ("gpus: 1\n\x00", ", line 2: not readable as YAML: special characters are not allowed"),
        ("gpus: 1\n---\ngpus: 2", ", line 2: not readable as YAML: but found another document"),
        (f"seed: {'9' * 5000}", " has a number of too many digits; shorten it, or quote a text"),
        (b"name: \xff", " is not UTF-8 text (byte 6); name a YAML file"),
        ("[" * 100_000, ", line 1: nested deeper than any option is"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, message) -> None:
    assert refusal(tmp_path, text) == message


def test_an_unknown_key_names_the_nearest_and_all(tmp_path) -> None:
    message = refusal(tmp_path, "batchsize: 8")
    assert message.startswith(
        ", line 1: batchsize is not an option (did you mean 'batch_size'?); there are: workload, "
    )
    assert message.endswith("tensorboard, include, exclude")


@pytest.mark.parametrize(
    "text",
    [
        "gpus: !!python/object/apply:os.system ['true']",
        "gpus: &a [*a]",
        "include: &a [*a]",
        "&a gpus: *b",
        "seed: 1e400",
        "%YAML 9.9\n---\ngpus: 1",
        "gpus: !!int x",
        "gpus: !!bool x",
        "gpus: !!timestamp x",
        "name: =",
        "gpus: !!binary '@@'",
        "max_time: " + ":".join(["59"] * 400) + ".5",
    ],
)
def test_a_hostile_file_is_refused_like_any_other(tmp_path, text) -> None:
    assert refusal(tmp_path, text)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="gpus:[]{}-,&*!?|>'\"#% \n\t1.0eE~<", max_size=40))
def test_no_text_makes_the_reader_fail_otherwise(tmp_path, text) -> None:
    try:
        assert isinstance(STUDY_FILE.read(written(tmp_path, text)), StudyFile)
    except UsageError as error:
        lines = str(error).splitlines()
        if len(lines) != 1:
            pytest.fail(f"more than a line: {lines}")


def test_a_missing_file_and_a_folder_say_what_to_do(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml"):
        STUDY_FILE.read(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"^cannot read .*: Is a directory; name a YAML file"):
        STUDY_FILE.read(tmp_path)


@pytest.mark.parametrize("value", ["1:30", "010", "0x10", "0b1", "1:30.5", "-1:00"])
@pytest.mark.parametrize("line", ["gpus: {}", "name: {}", "gpus: [8, {}]"])
def test_numbers_that_yaml_reads_otherwise_than_people_are_refused(line, value, tmp_path) -> None:
    message = refusal(tmp_path, f"workload: mlp\n{line.format(value)}\n")
    assert message.startswith(f", line 2: YAML reads {value} as another number")
    assert message.endswith(f"write a decimal number, or quote it: '{value}'")


def test_a_date_is_a_text_and_what_is_quoted_is_no_number(tmp_path) -> None:
    read = STUDY_FILE.read(written(tmp_path, "name: 2026-01-31\npartition: '010'\nqos: 'no'\n"))
    assert (read.name, read.partition, read.qos) == ("2026-01-31", "010", "no")


def test_points_may_share_keys_by_yaml_anchors(tmp_path) -> None:
    text = (
        "gpus: 1\ninclude:\n"
        "- &p {workload: mlp, strategy: ddp, gpus: 2, batch_size: 8}\n"
        "- {<<: *p, gpus: 4}\n"
    )
    read = STUDY_FILE.read(written(tmp_path, text))
    assert read.include is not None
    assert [(pattern.workload, pattern.gpus) for pattern in read.include] == [("mlp", 2), ("mlp", 4)]
    assert refusal(tmp_path, text.replace("gpus: 4", "gpus: x")).startswith(", line 4: include[1].gpus takes")


# One declaration, four faces


def values(option: PlanOption) -> st.SearchStrategy[Any]:
    """Values that may be given for an option, in each of its forms, made only from its declaration."""
    limits, kind = bounds(option.type), option.kind
    least = int(limits.get("minimum", limits.get("exclusiveMinimum", 0)))
    number = st.integers(least + ("exclusiveMinimum" in limits), int(limits.get("maximum", 1000)))
    if kind.flag_type is bool:
        return st.booleans()
    if kind.bare:
        return st.booleans() | st.sampled_from(["true", "false,true", [False, True], ["false", True]])
    if kind is LIMITS:
        return number.map(float) | st.sampled_from(["none", "0.5,none", [1.0, "none"]])
    if kind.choices:
        chosen = st.sampled_from(kind.choices)
        return chosen | st.lists(chosen, min_size=1) if kind.metavar else chosen
    if kind is GPUS:
        return st.integers(1, 4096) | st.sampled_from(["1..8", "8..64:8", [1, "2..4"]])
    if kind in (COUNTS, BATCHES):
        counts = number | st.lists(number | number.map(str), min_size=1)
        return counts | st.just("auto") if kind is BATCHES else counts
    if kind in (DURATION, JOB_TIME):
        texts = number.map(lambda seconds: f"{seconds // 60}m{seconds % 60}s")
        return texts | number.map(float) if kind is DURATION else texts
    if kind.flag_type is int:
        return number
    if kind.flag_type is float:
        return number.map(float) | st.floats(least, int(limits["maximum"]), exclude_min=True)
    # Texts that YAML would take for something else, and what flags and lists split at left out.
    text = st.text("abcNO019:=._-/ ~#'\"{[&*!|>%@", min_size=1).filter(str.strip)
    listed = {NAMES: text, VARIABLES: st.builds("{}={}".format, st.sampled_from(["A", "B"]), text)}
    return listed[kind] | st.lists(listed[kind], min_size=1) if kind in listed else text


STUDIES = st.fixed_dictionaries({}, optional={option.name: values(option) for option in OPTIONS}).map(
    lambda given: StudyFile(**given)
)
SCHEMA = jsonschema.Draft202012Validator(STUDY_FILE.schema())
OFTEN = settings(max_examples=50, suppress_health_check=list(HealthCheck))


@OFTEN
@given(study=STUDIES)
def test_a_study_survives_its_file_and_keeps_the_schema(tmp_path, study) -> None:
    data = msgspec.to_builtins(study)
    text = yaml.safe_dump(data)
    assert STUDY_FILE.read(written(tmp_path, text)) == study
    SCHEMA.validate(data)


@OFTEN
@given(study=STUDIES)
def test_a_study_survives_the_command_line(study) -> None:
    data = msgspec.to_builtins(study)
    arguments = []
    for name, value in data.items():
        flag = BY_NAME[name].flag
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif name == "env" and isinstance(value, list):
            arguments += [f"{flag}={text}" for text in value]
        else:
            arguments.append(f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}")
    context = command.make_context("matrix", arguments)
    flags = StudyFile(**{name: context.params[name] for name in BY_NAME})
    check_values(flags, str)
    for option in OPTIONS:
        given, flag_value = getattr(study, option.name), getattr(flags, option.name)
        assert (given is None) == (flag_value is None)
        if given is not None:
            assert option.kind.items(flag_value, "x") == option.kind.items(given, "x")


@pytest.mark.parametrize(
    "data",
    [
        {"batchsize": 8},
        {"repeats": 0},
        {"repeats": "5"},
        {"repeats": 1001},
        {"clip_norm": 0},
        {"compile": 1},
        {"precision": "fp8"},
        {"workload": [5]},
        {"exclude": [{"gpus": 0}]},
        {"hang_after": 9},
        {"time": 120},
        {"time": "120"},
    ],
)
def test_the_schema_and_the_reader_refuse_the_same(data, tmp_path) -> None:
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(data)
    assert refusal(tmp_path, yaml.safe_dump(data))
