from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.plan.request import StudyFile, make_request, merge, read_study_file
from results.errors import UsageError
from results.plan import Pattern, Request

WHAT_IT_IS = "a study file holds `option: value` lines, such as gpus: 1..8"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "study.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    """The message, without the path that it opens with."""
    path = written(folder, text)
    with pytest.raises(UsageError) as error:
        read_study_file(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def requested(folder: Path, text: str) -> Request:
    return make_request(read_study_file(written(folder, text)), machine_has_cuda=False, source_folder=folder)


def test_every_option_can_stand_in_a_study_file(tmp_path: Path) -> None:
    text = """
    name: nightly
    workload: [resnet18, gpt-nano]
    gpus: 1..4
    strategy: single,ddp:bucket_mb=50
    compression: none,topk:0.010
    collective: [default, ring]
    link: [none]
    batch_size: [8, 16]
    global_batch_size: 64
    scaling: [weak, strong]
    repeats: 5
    dataset: synthetic
    device: cpu
    backend: gloo
    precision: bf16
    accumulation: 2
    optimizer: adamw:lr=1e-3
    clip_norm: 1
    activation_checkpointing: false
    selective_checkpointing: true
    memory_limit_mb: 4096
    compile: yes
    memory_format: contiguous
    seed: 7
    gpus_per_node: 2
    node_size: 1
    budget: 30s
    target: 0.05
    warmup_steps: 20
    block_steps: 4
    quads: 3
    launcher: slurm
    site: cluster.yaml
    partition: gpu
    account: me
    qos: normal
    cpus_per_gpu: 8
    time: 2h
    jobs_per_cell: true
    feed: wait
    max_gpu_hours: 100
    report_job: true
    apply: false
    kind: job
    hang_after: 5m
    retries: 1
    prune: false
    isolation: cell
    oversubscribe: false
    max_time: 2h
    rerun: failed
    trace: [0, 3]
    tensorboard: true
    out: runs/nightly
    include: [{workload: mlp, strategy: ddp, gpus: 8, batch_size: 4}]
    exclude: [{gpus: 4, scaling: strong}]
    """
    options = read_study_file(written(tmp_path, text))
    assert [key for key in StudyFile.__struct_fields__ if getattr(options, key) is None] == []
    request = make_request(options, machine_has_cuda=False, source_folder=tmp_path)
    assert request.workloads == ("resnet18", "gpt-nano")
    assert request.gpus == (1, 2, 4)
    assert request.strategies == ("single", "ddp:bucket_mb=50.0")
    assert request.compressions == ("none", "topk:0.01")
    assert (request.collectives, request.links, request.node_size) == (("default", "ring"), ("none",), 1)
    assert request.batch_sizes == (8, 16)
    assert request.global_batch_sizes == (64,)
    assert request.scalings == ("weak", "strong")
    assert (request.repeats, request.accumulation, request.seed, request.gpus_per_node) == (5, 2, 7, 2)
    assert (request.precision, request.clip_norm, request.compile) == ("bf16", 1.0, True)
    assert (request.steps.warmup_max_steps, request.steps.block_steps) == (20, 4)
    assert (request.steps.budget_s, request.steps.target, request.steps.quads) == (30.0, 0.05, 3)
    assert (request.activation_checkpointing, request.memory_limit_mb) == ("selective", 4096)
    assert request.exclude == (Pattern(gpus=4, scaling="strong"),)


@pytest.mark.parametrize("gpus", ["1..4", "[1, 2, 4]", "1,2,4", "[1, '2..4']"])
@pytest.mark.parametrize("batch", ["8,16", "[8, 16]", "['8', 16]"])
@pytest.mark.parametrize("strategy", ["single,ddp", "[single, ddp]"])
def test_a_list_reads_the_same_in_every_form(tmp_path: Path, gpus: str, batch: str, strategy: str) -> None:
    text = f"gpus: {gpus}\nbatch_size: {batch}\nstrategy: {strategy}\n"
    request = requested(tmp_path, text)
    assert request.gpus == (1, 2, 4)
    assert request.batch_sizes == (8, 16)
    assert request.strategies == ("single", "ddp")


def test_a_scalar_is_a_list_of_one(tmp_path: Path) -> None:
    request = requested(tmp_path, "gpus: 2\nbatch_size: 8\nworkload: mlp\nscaling: strong\n")
    assert (request.gpus, request.batch_sizes, request.workloads) == ((2,), (8,), ("mlp",))
    assert request.scalings == ("strong",)


def test_flags_win_over_the_file_and_leave_the_rest() -> None:
    file = StudyFile(gpus="1..8", repeats=5, compile=True)
    flags = StudyFile(gpus="1..2", compile=False)
    assert merge(file, flags) == StudyFile(gpus="1..2", repeats=5, compile=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: {a: 1}", ": $.gpus: Expected `int | str | array | null`, got `object`"),
        ("gpus: [true]", ": $.gpus[0]: Expected `int | str`, got `bool`"),
        ("gpus: 8..1", ": $.gpus '8..1': a range goes up, and 1 is less than 8; write 1..8"),
        ("batch_size: 0", ": $.batch_size is at least 1, not 0"),
        ("repeats: 0", ": $.repeats is at least 1, not 0"),
        ("repeats: many", ": $.repeats: Expected `int | null`, got `str`"),
        ("workload: [mlp, 5]", ": $.workload[1]: Expected `str`, got `int`"),
        ("name: 2026-01-31", ": $.name: Expected `str | null`, got `date`"),
        ("link: 100", ": $.link: Expected `str | array | null`, got `int`"),
        ("node_size: 0", ": $.node_size is at least 1, not 0"),
        ("compile: 1", ": $.compile: Expected `bool | null`, got `int`"),
        ("target: .nan", ": $.target is a finite number, not nan"),
        (
            "precision: fp8",
            ": $.precision: Invalid enum value 'fp8'; it is one of fp32, tf32, bf16, fp16",
        ),
        (
            "exclude: [{scaling: up}]",
            ": $.exclude[0].scaling: Invalid enum value 'up'; it is one of weak, strong",
        ),
        (
            "exclude: [{gpu: 2}]",
            ": $.exclude[0].gpu is not an option (did you mean 'gpus'?); there are: "
            "workload, strategy, compression, collective, link, gpus, batch_size, scaling",
        ),
        ("- gpus", f": {WHAT_IT_IS} (Expected `object`, got `array`)"),
        ("", f": {WHAT_IT_IS} (Expected `object`, got `null`)"),
        ("gpus: 1\n# more\ngpus: 2", ", line 3: gpus is given twice; keep one"),
        ("exclude:\n- gpus: 1\n  gpus: 2", ", line 3: gpus is given twice; keep one"),
        ("gpus: 1\nworkload: [mlp", ", line 2: not readable as YAML: did not find expected ',' or ']'"),
        (
            "gpus: 1\nname: a: b",
            ", line 2: not readable as YAML: mapping values are not allowed in this context",
        ),
        (
            "name: !made-up a",
            ", line 1: not readable as YAML: could not determine a constructor for the tag '!made-up'",
        ),
        ("gpus: 1\n\x00", ", line 2: not readable as YAML: control characters are not allowed"),
        ("name: 2026-13-45", " holds a value that cannot be read: month must be in 1..12; quote it"),
        (b"name: \xff", " is not UTF-8 text (byte 6); name a YAML file"),
        ("[" * 100_000, ", line 1: nested deeper than any option is; see bench matrix --help"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert refusal(tmp_path, text) == message


def test_an_unknown_key_names_the_nearest_and_all(tmp_path: Path) -> None:
    message = refusal(tmp_path, "batchsize: 8")
    assert message.startswith(
        ": $.batchsize is not an option (did you mean 'batch_size'?); there are: name, "
    )
    assert message.endswith("out, include, exclude")


@pytest.mark.parametrize(
    "text",
    [
        "gpus: !!python/object/apply:os.system ['true']",
        "? [1, 2]\n: 3",
        "gpus: &a [*a]",
        "include: &a [*a]",
        "&a gpus: *b",
        f"seed: {'9' * 5000}",
        "seed: 1e400",
        "%YAML 9.9\n---\ngpus: 1",
        "gpus: 1\n---\ngpus: 2",
        "gpus: !!binary '@@'",
        "max_time: " + ":".join(["59"] * 400) + ".5",
    ],
)
def test_a_hostile_file_is_refused_like_any_other(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="gpus:[]{}-,&*!?|>'\"#% \n\t1.0eE~<", max_size=40))
def test_no_text_makes_the_reader_fail_otherwise(tmp_path: Path, text: str) -> None:
    try:
        assert isinstance(read_study_file(written(tmp_path, text)), StudyFile)
    except UsageError as error:
        lines = str(error).splitlines()
        if len(lines) != 1:
            pytest.fail(f"more than a line: {lines}")


def test_a_missing_file_and_a_folder_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no study file .*none\.yaml; check the name"):
        read_study_file(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"^cannot read .*: Is a directory; name a YAML file"):
        read_study_file(tmp_path)


@pytest.mark.parametrize("text", ["gpus: 1:30", "gpus: 010", "gpus: [8, 0x10]", "repeats: 1:00"])
def test_numbers_that_yaml_reads_otherwise_than_people_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"workload: mlp\n{text}\n")
    with pytest.raises(UsageError, match=r"line 2: .* is another number to YAML than to you"):
        read_study_file(path)
