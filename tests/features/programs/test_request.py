"""From the options of a study to programs: canonical names, refusals, and the values for ranks."""

from __future__ import annotations

import re

import msgspec
import pytest
from builders import a_request

from harness.features.programs.facts import PROGRAM_WORKLOAD, known
from harness.features.programs.file import Programs, read
from harness.features.programs.request import order, translated
from harness.plan.expand import expand
from harness.plan.study_file import StudyFile
from results.errors import SpecError, UsageError
from results.parts import Unknown
from results.plan import Pattern, Request, read_values
from strategies.catalog import STRATEGIES

OTHER = "script: train.py\nbatch: 4\nstrategies: {ddp: --batch 4, tp2: {arguments: --tp, replica: 4}}\n"


@pytest.fixture(autouse=True)
def nothing_known():
    known.clear()
    yield
    known.clear()


def asked(folder, **options) -> StudyFile:
    return translated(StudyFile(**{"workload": "program:p.yaml", "gpus": "1..4", **options}), folder)


def named(texts) -> list[str]:
    """The names of strategies, without `program:` and the revisions of their lines."""
    return [re.sub("program:|@[0-9a-f]{6}", "", text) for text in texts]


def test_without_strategies_all_are_planned_with_all_settings(folder) -> None:
    made = asked(folder)
    strategies = named(made.strategy)
    assert (len(strategies), strategies[1], strategies[-1]) == (12, "ddp+long", "tp2+compiled+long:replica=2")
    assert (made.workload, made.batch_size, made.gpus) == (["program:p.yaml"], 16, "1..4")


def test_strategies_get_canonical_texts(folder) -> None:
    given = ["fsdp+long+compiled", "ddp+eager", "ddp", "program:tp2:replica=2"]
    made = asked(folder, strategy=given).strategy
    assert named(made) == ["fsdp+compiled+long", "ddp", "tp2:replica=2"]
    assert asked(folder, strategy=made).strategy == made


def test_options_of_benchs_own_workloads_stay_as_they_are(folder) -> None:
    for options in (StudyFile(gpus=1), StudyFile(workload="gpt-nano", strategy="ddp", gpus=1)):
        assert translated(options, folder) is options


def test_two_programs_with_one_strategy_of_different_replicas(folder) -> None:
    (folder / "q.yaml").write_text(OTHER)
    both = "program:p.yaml,program:q.yaml"
    made = asked(folder, workload=both, strategy="tp2,fsdp", batch_size=4)
    assert named(made.strategy) == ["tp2:replica=2", "tp2:replica=4", "fsdp"]
    with pytest.raises(UsageError, match="--batch-size"):
        asked(folder, workload=both)


def test_a_pattern_may_name_a_program_that_no_axis_has(folder) -> None:
    (folder / "q.yaml").write_text(OTHER)
    one = Pattern(workload="program:q.yaml", strategy="tp2", gpus=8, batch_size=4)
    out = [Pattern(strategy="tp2"), Pattern(gpus=4)]
    made = asked(folder, strategy="ddp,tp2", include=[one], exclude=out)
    assert (made.workload, named(made.strategy)) == (["program:p.yaml"], ["ddp", "tp2:replica=2"])
    assert named(each.strategy for each in made.include) == ["tp2:replica=4"]
    assert named(str(each.strategy) for each in made.exclude) == ["tp2:replica=2", "tp2:replica=4", "None"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"workload": "program:p.yaml,gpt-nano"}, ["program:p.yaml", "make two"]),
        ({"strategy": "ddp,fspd"}, ["fspd", "did you mean 'fsdp'", "p.yaml"]),
        ({"strategy": "single"}, ["single", "ddp, fsdp, tp2"]),
        ({"workload": "program:none.yaml"}, ["none.yaml"]),
        ({"workload": "program"}, ["program:FILE.yaml"]),
        ({"workload": "program:p.yaml:a=1"}, ["without options"]),
        ({"batch_size": "auto"}, ["memory"]),
        ({"baseline": True}, ["--baseline"]),
        ({"workload": None, "include": [Pattern(workload="program:p.yaml")]}, ["--workload"]),
    ],
)
def test_what_programs_cannot_have_is_refused(folder, options, parts) -> None:
    with pytest.raises(UsageError) as caught:
        asked(folder, **options)
    assert [part for part in parts if part not in str(caught.value)] == []


DECIDED = {"precision": "bf16", "optimizer": "adamw", "clip_norm": 1.0, "compile": True, "dataset": "digits"}
DECIDED |= {"activation_checkpointing": "selective", "memory_format": "channels_last"}


def test_a_program_refuses_what_bench_cannot_set_in_it(cell) -> None:
    facts = STRATEGIES.facts("program:ddp")
    assert facts.refusal(cell(env=("NCCL_ALGO=Ring",))) is None
    assert "gpt-nano" in str(facts.refusal(cell(workload="gpt-nano")))
    for field, given in DECIDED.items():
        assert f"--{field.replace('_', '-')}" in str(facts.refusal(cell(**{field: given})))


def test_rules_of_the_file_refuse_once_a_request_is_made(folder, cell) -> None:
    [text] = asked(folder, strategy="fsdp").strategy
    strategy = STRATEGIES.facts(text)
    assert "nothing to shard" in str(strategy.refusal(cell(text, gpus=1)))
    assert strategy.refusal(cell(text)) is None
    known.clear()
    assert strategy.refusal(cell(text, gpus=1)) is None


def test_a_replica_spans_its_ranks() -> None:
    facts = STRATEGIES.facts("program:tp2:replica=2")
    layout = facts.groups(8, None)
    assert (layout.replicas, layout.model_parallel, layout.replica(5)) == (4, 2, 2)
    with pytest.raises(SpecError):
        facts.groups(3, None)


def test_nothing_of_the_model_is_known_or_promised() -> None:
    facts = PROGRAM_WORKLOAD.shape.facts()
    fields = ("unit", "units_per_sample", "parts", "heads", "batch_norm", "minimum_batch", "datasets")
    assert {type(getattr(facts, name)) for name in (*fields, "memory_formats")} == {Unknown}
    assert STRATEGIES.facts("program:ddp").promise.unproven == "bench did not train it"


def test_ranks_get_the_files_with_their_folders(folder) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "q.yaml").write_text(OTHER.replace("train.py", "../train.py"))
    texts = ("program:p.yaml", "program:inner/q.yaml")
    request = Request(workloads=texts, gpus=(1,), strategies=("program:ddp",), source_folder=str(folder))
    made = read_values(order(request).values, Programs).programs
    assert [made[text].folder for text in texts] == [str(folder), str(inner)]
    assert made[texts[0]].file == read(folder / "p.yaml")
    assert order(msgspec.structs.replace(request, workloads=("gpt-nano",))) is None


def test_a_strategy_of_one_file_is_no_point_of_another_with_another_line(folder) -> None:
    (folder / "q.yaml").write_text(OTHER)
    both = asked(folder, workload="program:p.yaml,program:q.yaml", strategy="ddp", gpus=4, batch_size=4)
    plan = expand(a_request(both, source_folder=folder), study="s", created_at="2026-01-02T03:04:05.000Z")
    # Each file has its own line of ddp.
    assert len(set(both.strategy)) == 2
    assert sorted(cell.workload for cell in plan.cells) == ["program:p.yaml", "program:q.yaml"]
    assert not plan.skips
