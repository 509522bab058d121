"""Names that scripts, packages, submitted jobs and other revisions of bench use: none may go or change.

A name that is new is not compared: `surface.json` gains it by hand when it should be frozen.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from typing import Any

import click
import pytest

from harness.cli import INTERRUPTED, NOBODY_READS, bench
from harness.plan.study_file import BY_NAME
from harness.worker.turns import FORKS, PROTOCOL, VARIABLE
from results import errors

API = {
    "strategies.facts": ["StrategyFacts"],
    "strategies.promise": ["Promise", "everyone"],
    "strategies.closed_form.terms": ["*"],
    "strategies.training.parallel": ["ParallelModel", "Setting"],
    "strategies.collectives.link": ["Link"],
    "strategies.exchange.buckets": ["buckets_of"],
    "strategies.compression.facts": ["CompressorFacts"],
    "strategies.compression.promise": ["*"],
    "strategies.compression.base": ["Compressor"],
    "strategies.collectives.wire": ["Wire"],
    "strategies.collectives.facts": ["CollectiveFacts"],
    "strategies.collectives.route": ["Route"],
    "strategies.catalog": ["STRATEGIES", "COMPRESSIONS", "COLLECTIVES", "OPTIMIZERS"],
    "strategies": ["*"],
    "workloads": ["*"],
    "workloads.shape": ["Shape", "WorkloadFacts"],
    "workloads.workload": ["Workload"],
    "workloads.catalog": ["Member"],
    "results.parts": ["ModelParts"],
    "results.layout": ["ModelLayout"],
    "results.spec": ["Option"],
    "harness.launchers.launcher": ["Launcher", "LauncherCall", "JobLauncher"],
    "harness.launchers.campaign_call": ["CampaignCall"],
    "harness.launchers.job_call": ["JobCall"],
    "harness.launch.starter": ["Starter"],
    "reports": ["load"],
    "reports.fields": ["*"],
    "reports.table": ["table", "words", "figures"],
    "reports.analysis.study": ["StudyFigures"],
    "reports.page.section": ["Section", "Definition", "Paragraph", "Table"],
}
"""The interfaces of CONTRIBUTING.md and docs/library.md: modules and their names, `*` for all public ones."""
MODULES = (
    "harness.cli.__main__",
    "harness.worker.__main__",
    "harness.worker.check",
    "harness.worker.turns",
    "harness.matrix",
    "harness.launchers.program",
)
"""Modules that submitted jobs start, and revisions of bench that compare this one with theirs."""


def _api() -> dict[str, list[str]]:
    """Public members of each interface, by `module.name`; of functions and methods also the parameters."""
    found: dict[str, list[str]] = {}
    for path, names in API.items():
        module = importlib.import_module(path)
        exported = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == path
        ]
        for name in exported if names == ["*"] else names:
            found[f"{path}.{name}"] = _members(getattr(module, name))
    return found


def _members(value: Any) -> list[str]:
    if not inspect.isclass(value):
        return [f"({', '.join(inspect.signature(value).parameters)})"] if callable(value) else []
    members = set()
    for name in {
        *dir(value),
        *getattr(value, "__annotations__", ()),
        *getattr(value, "__struct_fields__", ()),
    }:
        if not name.startswith("_") and name not in dir(str):
            function = inspect.getattr_static(value, name, None)
            plain = inspect.isfunction(function)
            members.add(f"{name}({', '.join(inspect.signature(function).parameters)})" if plain else name)
    return sorted(members)


def _commands() -> dict[str, list[str]]:
    context = click.Context(bench)
    found = {"bench": [option for parameter in bench.params for option in parameter.opts]}
    for name in bench.list_commands(context):
        command = bench.get_command(context, name)
        assert command is not None
        for words, one in _below(name, command):
            found[words] = sorted(
                option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)
            )
    return found


def _below(words: str, command: click.Command) -> list[tuple[str, click.Command]]:
    """A command and its subcommands."""
    subcommands = command.commands if isinstance(command, click.Group) else {}
    return [
        (words, command),
        *(pair for name, one in subcommands.items() for pair in _below(f"{words} {name}", one)),
    ]


def _exit_codes() -> dict[str, list[str]]:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.BenchError)
    ]
    return {
        **{kind.__name__: [str(kind.exit_code)] for kind in kinds},
        "interrupted": [str(INTERRUPTED)],
        "nobody reads": [str(NOBODY_READS)],
    }


@pytest.mark.parametrize("kind", ["api", "commands", "exit codes", "study file", "turns"])
def test_what_others_name_is_there(frozen, kind) -> None:
    found: dict[str, dict[str, list[str]]] = {
        "api": _api(),
        "commands": _commands(),
        "exit codes": _exit_codes(),
        "study file": {"keys": sorted(BY_NAME)},
        "turns": {"protocol": [str(PROTOCOL)], "forks": [str(FORKS)], "variable": [VARIABLE]},
    }
    golden = frozen("surface.json", found)[kind]
    gone = {name: sorted({*members} - {*found[kind].get(name, ())}) for name, members in golden.items()}
    assert {name: members for name, members in gone.items() if members} == {}
    assert set(golden) <= set(found[kind])


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_others_start_is_there(module) -> None:
    assert find_spec(module) is not None
