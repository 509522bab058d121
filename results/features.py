"""The registry of features. The core asks here by name, and imports a place when it uses it.

A feature is a folder of `harness/features/`, which is named in the table there and whose package declares a
`Feature`. Other packages add commands, kinds, sections and launchers by entry points. A place is
`module:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from results.errors import UsageError
from results.extensions import extensions
from results.registry import load

T = TypeVar("T")
TABLE = "harness.features"
Hook = Literal[
    "find_batches", "fit_batches", "grow", "measure_noise", "nights", "order", "preflight", "read", "status"
]
"""Functions of features that the core calls where they are there; `hook` says how.

- `fit_batches(request, earlier, limit) -> request`: `--batch-size auto` with the batches that earlier plans
  have found, or with predicted ones.
- `find_batches(study, request, execute, *, limit, order, console) -> request or exit code`: the same by short
  runs, each of which `execute(study, plan)` makes; it returns an exit code if the command is to end with it.
- `grow(study, plans, odds, rounds) -> plans, exit code or None`: run plans by rounds until the size to buy is
  certain (`--until`). `rounds` is a `harness.matrix.Rounds`; the plans of the last round are returned.
- `measure_noise(budget, baselines) -> exit code`: `bench doctor --noise`.
- `nights(folder, console) -> Section or None`: the changes between the nights in a folder.
- `order(request) -> Order or None`: the work of the ranks on cells that bench does not measure as it measures
  its own workloads.
- `preflight(nodes, slow_below, options) -> exit code`: `bench doctor --nodes`.
- `read(options, folder) -> options`: the options of a study with the names that only a feature's workloads
  know in their canonical form; `folder` is the one that paths are relative to.
- `status(folder) -> sentence or None`: what a folder without a study holds.
"""


CommandGroup = Literal["study", "decide", "train", "team", "machine"]
"""Headings of `bench --help`, in their order."""


class Command(NamedTuple):
    place: str
    """Its click command."""
    help: str
    """Its line in `bench --help`."""
    group: CommandGroup
    """Its heading there."""
    meant_by: tuple[str, ...] = ()
    """Words of other tools: the error for an unknown command of such a word names this one."""
    removes: bool = False
    """Whether it removes or ends something: no error names it for a misspelt command."""
    passes: str = ""
    """How its call passes the option {} on to `bench matrix`; empty if it passes none on."""


class PageSection(NamedTuple):
    """A section of a study's page."""

    place: str
    """A function from `StudyFigures` to a `Section`, or to None if it has no content."""
    after: str
    """The section of the core that it follows; empty: it is only on pages of kinds that name it."""


class Given(NamedTuple):
    """An option of commands that write pages. It names a file or a folder for a section."""

    metavar: str
    help: str
    commands: tuple[str, ...] = ("report",)
    default: str = ""
    """The place of a function without parameters to the value where the option is left out, or to None."""


class LauncherPlace(NamedTuple):
    place: str
    """Its class, derived from `harness.launchers.launcher.Launcher`."""
    help: str
    """Words that follow its name in --help, such as `submits jobs`."""
    jobs: Mapping[str, str] = MappingProxyType({})
    """The fields of its scheduler's `JobVariables`; empty without a scheduler or recorded job numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of study. The plans of a study have one kind; those without an order measure steps."""

    name: str
    """Its name in the orders of plans and launches."""
    cells: str
    """Words for its cells, such as `trained`."""
    work: str = ""
    """The place of what a rank does with a run: a function of a `Run` and the `values` of the order."""
    conduct: str = "harness.launch.conduct:Conduct"
    """The place of a class derived from `harness.launch.conduct.Conduct`."""
    sections: tuple[str, ...] = ()
    """Anchors of the sections of its page, in their order; empty: the sections of a measured study."""
    shows: str = ""
    """The name of figures without which its page is the page of a measured study; empty: it needs none."""
    phases: Mapping[str, str] = field(default_factory=dict)
    """The phases of its runs in words, by the event of a rank's log that begins each; not shown for kinds of
    other packages."""
    has_steps: bool = True
    """Whether a good run needs step times; otherwise a cell with a good run is complete without figures."""
    proves: bool = True
    """Whether its runs can be proven; otherwise answers rest on unproven cells, and say so."""
    losses: str = ""
    """The place of a function of a study and the runs of a cell, oldest first, to its final losses: the mean
    over the last fifth of the first N steps by N; None: not finite, or not recorded. Cells that differ in
    their seed alone are then one subject of `bench compare`. Empty: no losses."""
    file: str = ""
    """The file in a study's folder by which a study without plans is known to be of this kind; not looked for
    with kinds of other packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Everything that one feature adds, by name."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()
    sections: Mapping[str, PageSection] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    """Places of functions from a `harness.reporting.reading.Reading` to what a section of the feature shows;
    `StudyFigures.added` has the results by name."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """Options of commands without their dashes; `Reading.given` has the values of `bench report` by name."""
    launchers: Mapping[str, LauncherPlace] = field(default_factory=dict)
    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Places of what it adds to catalogs, by the noun of the catalog (`workload`, `strategy`) and by name."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Trackers of `bench export --to` by name: each place has a function that takes the figures of a study,
    its folder and `redact`, and returns a sentence for the terminal."""
    inner: tuple[str, ...] = ()
    """Folders in a study's folder that hold studies of short runs, which may be older than its plan."""
    hooks: Mapping[Hook, str] = field(default_factory=dict)


MEASURED = Kind(name="measured", cells="measured")
"""The kind of plans without an order."""


@cache
def features() -> Mapping[str, Feature]:
    """The features of this installation, by name, in the order of the table."""
    names: Iterable[str] = import_module(TABLE).FEATURES
    return {name: import_module(f"{TABLE}.{name}").FEATURE for name in names}


def joined(part: Callable[[Feature], Mapping[str, T]]) -> dict[str, T]:
    """One part of the declarations of all features, such as their commands, by name."""
    return {name: one for each in features().values() for name, one in part(each).items()}


def kind_named(name: str) -> Kind:
    """The kind of this name. Raises UsageError if neither a feature nor a package has it."""
    for kind in own_kinds():
        if kind.name == name:
            return kind
    added = extensions("kind", {kind.name for kind in own_kinds()})
    if name not in added:
        raise UsageError(
            f"the study is {name!r}, a kind that this installation lacks: install the package that adds it"
        )
    found = added[name].load()
    if not (isinstance(found, Kind) and found.name == name):
        raise added[name].wrong(found, f"a results.features.Kind whose name is {name!r}")
    return found


def kind_of_file(root: Path) -> Kind:
    """The kind of a study without plans, by the files in its folder."""
    found = (kind for kind in own_kinds() if kind.file and (root / kind.file).exists())
    return next(found, MEASURED)


def own_kinds() -> tuple[Kind, ...]:
    """The kinds of bench itself."""
    return (MEASURED, *(kind for each in features().values() for kind in each.kinds))


def home_of_kind(name: str) -> str | None:
    """The folder of the feature that has a kind, in the tree of bench; None if no feature has it."""
    homes = (feature for feature, one in features().items() if any(kind.name == name for kind in one.kinds))
    return next((f"harness/features/{feature}" for feature in homes), None)


def inner_folders() -> frozenset[str]:
    """The folders inside the folder of a study that hold studies of short runs."""
    return frozenset(name for each in features().values() for name in each.inner)


def hook(name: Hook) -> Callable[..., Any] | None:
    """The function that a feature declares for this hook; None if no feature does."""
    places = [each.hooks[name] for each in features().values() if name in each.hooks]
    return load(places[0]) if places else None


def placed(own: Mapping[str, T], added: Mapping[str, tuple[T, str]]) -> dict[str, T]:
    """Put each added value behind the name that it follows; if that is not there, at the end."""
    order: dict[str, T] = {}
    left = dict(added)
    for name, value in own.items():
        order[name] = value
        for behind in [one for one, (_, after) in left.items() if after == name]:
            order[behind] = left.pop(behind)[0]
    return order | {name: value for name, (value, _) in left.items()}
