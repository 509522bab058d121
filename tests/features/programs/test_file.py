"""The names, arguments, samples, hashes and logs of a program's file, and the refusal of bad ones."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from harness.features.programs import file as programs
from harness.features.programs.command import program_command
from harness.features.programs.file import LOGS, ProgramFile, choice, digest, read, refused, words, work
from results.errors import UsageError

LEAST = "script: train.py\nbatch: 4\nstrategies: {ddp: ''}\n"


def test_a_name_has_one_canonical_form(folder) -> None:
    file = read(folder / "p.yaml")
    rest = ["", "+long", "+compiled", "+compiled+long"]
    assert list(programs.names(file)) == [name + each for name in ("ddp", "fsdp", "tp2") for each in rest]
    asked = {"fsdp+eager+short": "fsdp", "tp2+long+compiled": "tp2+compiled+long", "ddp@abc123": "ddp"}
    assert {name: choice(file, name).name for name in asked} == asked


NAMES = {"fspd": "'fsdp'?", "ddp+compield": "'compiled'?", "ddp+short+long": "two values", "ddp+": "value"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_means_nothing_is_refused(folder, name) -> None:
    with pytest.raises(UsageError, match=re.escape(NAMES[name])):
        choice(read(folder / "p.yaml"), name)


def test_the_command_line_of_a_cell_has_the_values_of_its_variables(folder, cell) -> None:
    file = read(folder / "p.yaml")
    begin = ["--batch", "16", "--steps", "1000000"]
    assert words(file, "ddp", cell()) == [*begin, "--seq", "512"]
    tensor = cell("program:tp2+compiled+long:replica=2")
    assert words(file, "tp2+compiled+long", tensor) == [*begin, "--tp", "2", "--compile", "--seq", "1024"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-g {batch_size * replicas} -m {micro_batch}", ["-g", "64", "-m", "8"]),
        ("--name 'a b' \"x{gpus}y\" { accumulation }/{seed}", ["--name", "a b", "x4y", "2/0"]),
        ('--json \'{"a": {"b": 1}}\' {} {0}', ["--json", '{"a": {"b": 1}}', "{}", "{0}"]),
    ],
)
def test_arguments_are_words_of_a_shell_with_formulas_in_braces(folder, cell, arguments, expected) -> None:
    file = replace(read(folder / "p.yaml"), arguments=arguments, settings={})
    assert words(file, "ddp", cell(micro_batch=8, accumulation=2)) == expected


def test_samples_are_those_of_a_replica(folder, cell) -> None:
    file = read(folder / "p.yaml")
    assert work(file, "ddp", cell()) == (16, 512)
    assert work(file, "tp2+long", cell("program:tp2:replica=2")) == (16, 1024)
    with pytest.raises(UsageError, match="6 by the file"):
        work(replace(file, samples=6), "ddp", cell())


@pytest.mark.parametrize(
    ("strategy", "fields", "part"),
    [
        ("fsdp", {}, "None"),
        ("fsdp", {"gpus": 1}, "nothing to shard"),
        ("fsdp+compiled+long", {}, "does not compile shards"),
        ("ddp", {"micro_batch": 2}, "None"),  # {batch_size} is an argument
        ("ddp", {"accumulation": 2}, "{accumulation}"),
        ("ddp", {"seed": 1}, "{seed}"),
        ("ddp", {"strategy": "program:ddp@000000"}, "program:ddp@000000 is"),
        ("tp2", {"strategy": "program:tp2:replica=4"}, "program:tp2:replica=4 is"),
    ],
)
def test_a_cell_that_the_file_excludes_or_cannot_pass_on_is_refused(
    folder, cell, strategy, fields, part
) -> None:
    file = read(folder / "p.yaml")
    asked = {"strategy": choice(file, strategy).text, **fields}
    assert part in str(refused(file, strategy, cell(**asked)))
    assert "'pp'" in str(refused(file, "pp", cell(**asked)))


def test_a_cell_whose_formula_gives_no_number_of_samples_is_refused(folder, cell) -> None:
    file = replace(read(folder / "p.yaml"), samples="512 // (gpus - 4)")
    ddp = choice(file, "ddp").text
    assert "divides by zero" in str(refused(file, "ddp", cell(ddp)))
    assert refused(file, "ddp", cell(ddp, gpus=8)) is None


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("p.yaml", "--steps 1000000", "--steps 2000000", True),
        ("p.yaml", 'ddp: ""', "ddp: --bucket 4", True),
        ("p.yaml", "seq: 512", "seq: 256", True),
        ("p.yaml", 'OFFLINE: "1"', 'OFFLINE: "0"', True),
        ("train.py", "trains", "runs", True),
        ("configs/small.toml", "8", "9", True),
        ("p.yaml", "fsdp: --fsdp", "fsdp: --fsdp2", False),  # of another strategy
        ("p.yaml", "batch: 16", "batch: 32", False),  # a cell has its own
        ("p.yaml", "not compile shards", "not split", False),
    ],
)
def test_the_hash_covers_what_reaches_the_program(folder, name, old, new, changes) -> None:
    def reaches() -> tuple[str, str]:
        file = read(folder / "p.yaml")
        return digest(file, folder), choice(file, "ddp").text

    before, text = reaches(), (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    assert (reaches() != before) == changes


def test_a_module_is_hashed_if_it_lies_in_the_folder(folder) -> None:
    file = ProgramFile(module="tool.train", strategies={"ddp": ""})
    (folder / "tool").mkdir()
    absent = digest(file, folder)
    (folder / "tool" / "train.py").write_text("")
    assert digest(file, folder) != absent


def test_the_interpreter_is_found_from_the_folder_or_on_the_path(folder) -> None:
    (folder / "python").symlink_to(sys.executable)
    own, here, shell = [sys.executable], [str(folder / "python")], [shutil.which("sh"), "-c"]
    for given, expected in {None: own, "./python": here, ("sh", "-c"): shell}.items():
        file = ProgramFile(script="x.py", interpreter=given, strategies={})
        assert programs.interpreter(file, folder) == expected


TITAN = (
    "[rank0]:[titan] 2025-10-30 14:32:58,990 - root - INFO - \x1b[31mstep:  2  \x1b[32mloss:  6.10980  "
    "\x1b[38;2;180;60;0mgrad_norm:  4.6416  \x1b[38;2;54;234;195mmemory:  2.49GiB(3.14%)"
)
MEGATRON = (
    " [2025-04-13 23:41:12] iteration       10/    1000 | consumed samples:          160 | elapsed time per "
    "iteration (ms): 1147.6 | learning rate: 0.000000E+00 | global batch size:    16 |{} loss scale: 83.0 |"
)


@pytest.mark.parametrize(
    ("log", "line", "expected"),
    [
        ("torchtitan", TITAN, ("2", "6.10980")),
        ("torchtitan", re.sub(r"\x1b\[[\d;]*m", "", TITAN), ("2", "6.10980")),
        ("torchtitan", TITAN.replace("step:", "validate step:"), None),
        ("megatron", MEGATRON.format(" lm loss: 7.399415E+00 |"), ("10", "7.399415E+00")),
        ("megatron", MEGATRON.format(""), ("10", None)),  # all updates were left out
        ("megatron", " validation loss at iteration 10 | lm loss value: 7.1E+00 |", None),
        ("megatron", MEGATRON.format(" lm loss 7.5E+00 |"), ("10", "7.5E+00")),
    ],
)
def test_the_lines_of_known_programs_give_step_and_loss(log, line, expected) -> None:
    found = re.search(LOGS[log], line)
    assert (found and found.group("step", "loss")) == expected


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        (LEAST.replace("script: train.py", "script: torchrun train.py"), 1, ["torchrun"]),
        (LEAST + "interpreter: [sh, accelerate launch]", 4, ["accelerate"]),
        (LEAST + "interpreter: no/python", 4, ["interpreter", "no/python"]),
        (LEAST + "interpreter: sh -c python", 4, ["as a list"]),
        (LEAST + "module: train", None, ["either"]),
        (LEAST.replace("script: train.py", ""), None, ["script or a module"]),
        (LEAST + "arguments: -b {batchsize}", 4, ["arguments", "did you mean 'batch_size'"]),
        (LEAST + "arguments: -b {gpus +}", 4, ["gpus +"]),
        (LEAST + 'arguments: "-b \'a"', 4, ["quotation"]),
        (LEAST + "samples: batch * gpus", 4, ["samples", "'batch'"]),
        (LEAST.replace("batch: 4\n", ""), 2, ["{batch_size}", "batch: N"]),
        (LEAST + "steps: log", 4, ["torchtitan, megatron"]),
        (LEAST + "log: torchtian", 4, ["(?P<step>", "did you mean 'torchtitan'"]),
        (LEAST + "log: 'step (?P<step>\\d+'", 4, ["regular expression"]),
        (LEAST + "files: ['*.toml']", 4, ["files", "'*.toml'"]),
        (LEAST + "files: ['a**']", 4, ["files"]),
        (LEAST + "environment: {MASTER_PORT: '1'}", 4, ["MASTER_PORT"]),
        (LEAST.replace("ddp:", "d+p:"), 3, ["'d+p'"]),
        (LEAST.replace("{ddp: ''}", "{}"), 3, ["NAME: ARGUMENTS"]),
        (LEAST.replace("ddp: ''", "ddp: {gpus: 2}"), 3, ["ddp: gpus", "another name"]),
        (LEAST.replace("ddp: ''", "ddp: {tp: x}"), 3, ["ddp: tp", "whole number", "'x'"]),
        (LEAST.replace("ddp: ''", "ddp: {replica: 0}"), 3, ["replica", "at least 1"]),
        (LEAST.replace("ddp: ''", "ddp: {arguments: 2}"), 3, ["arguments", "quote it"]),
        (LEAST.replace("ddp: ''", "ddp: '', tp: {tp: 2}") + "arguments: '{tp}'", 4, ["'tp'", "strategy ddp"]),
        (LEAST + "settings: {a: {x: ''}, b: {x: ''}}", 4, ["'x'", "twice"]),
        (LEAST + "settings: {a: {x: {n: 1}}, b: {y: {n: 1}}}", 4, ["'n'", "twice"]),
        (LEAST + "settings: {seed: {x: ''}}", 4, ["seed"]),
        (LEAST + "impossible: [{strategy: ddp}]", 4, ["reason"]),
        (LEAST + "impossible: [{reason: never}]", 4, ["an axis"]),
        (LEAST + "impossible: [{strategy: dpp, reason: never}]", 4, ["did you mean 'ddp'"]),
        (LEAST + "impossible: [{gpus: two, reason: never}]", 4, ["whole number"]),
    ],
)
def test_a_bad_file_is_refused_by_line_and_key(folder, text, line, parts) -> None:
    path = folder / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}, line {line}: " if line else f"{path}: ")
    assert [part for part in parts if part not in said] == []
    assert "\n" not in said


def test_the_least_file_is_enough_and_a_missing_one_says_how_it_is_named(folder) -> None:
    (folder / "least.yaml").write_text(LEAST)
    assert read(folder / "least.yaml").default_batch == 4
    with pytest.raises(UsageError, match="program:FILE"):
        read(folder / "none.yaml")


def test_the_schema_has_every_key() -> None:
    printed = CliRunner().invoke(program_command, ["schema"]).output
    declared = json.loads(printed)["$defs"]["ProgramFile"]
    assert set(declared["properties"]) == set(ProgramFile.__struct_fields__)
    assert declared["required"] == ["strategies"]
