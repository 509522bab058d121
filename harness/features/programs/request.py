"""From the options of a study to a request for programs, and from a request to what ranks need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from harness.features.programs.facts import known
from harness.features.programs.file import Program, ProgramFile, Programs, choice, digest, names, read
from harness.plan.options import BATCH_AUTO, read_batches, read_names
from harness.plan.points import workloads_of
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.plan import Order, Pattern, Request
from results.spec import split
from workloads.datasets.facts import Own

Files = Mapping[str, ProgramFile]
"""Programs by the text of their workload."""


def translated(options: StudyFile, folder: Path) -> StudyFile:
    """Return the options with the canonical strategies and the batch of the programs that they name.

    Options without a program are returned as they are. Paths of files are relative to `folder`. Raises
    UsageError for a file that cannot be used, for programs together with models of bench, and for a strategy
    that no file has.
    """
    own = read_names(options.workload or "")
    asked = [*own, *_included(options)]
    paths = _paths(asked)
    if not paths:
        return options
    if len(paths) < len({*asked}):
        raise UsageError(f"a study has programs or models of bench, not {asked[0]} and others; make two")
    if not own:
        raise UsageError(f"--workload is missing: it names the program of include too, such as {asked[0]}")
    if options.baseline:
        raise UsageError("--baseline is for models of bench, not for programs: leave it out")
    files = {text: read(folder / path) for text, path in paths.items()}
    known.update(files)
    axis = {text: files[text] for text in own}
    every = list(chain.from_iterable(map(names, axis.values())))
    return replace(
        options,
        workload=list(axis),
        dataset=options.dataset or Own.name,
        strategy=_canonical(axis, read_names(options.strategy or every)),
        batch_size=_batch(options, axis),
        baseline=False,
        include=_patterns(options.include, files),
        exclude=_patterns(options.exclude, files),
    )


def program_hash(path: str, folder: Path) -> str:
    """The hash of what all strategies of a program run (`digest`); `folder` as of `translated`."""
    place = folder / path
    return digest(read(place), place.parent)


def order(request: Request) -> Order | None:
    """Return the programs that ranks need; None without any. Raises UsageError for an unusable file."""
    folder = Path(request.source_folder or ".").absolute()
    paths = {text: folder / path for text, path in _paths(workloads_of(request)).items()}
    programs = {text: Program(file=read(path), folder=str(path.parent)) for text, path in paths.items()}
    return Order.of("program", Programs(programs=programs)) if programs else None


def _included(options: StudyFile) -> list[str]:
    """The workloads that patterns name."""
    patterns = [*(options.include or ()), *(options.exclude or ())]
    return [one.workload for one in patterns if one.workload is not None]


def _paths(workloads: Iterable[str]) -> dict[str, str]:
    """The paths of the files of those workloads that are programs. Raises UsageError for one without."""
    found = {}
    for text in workloads:
        name, _, path = text.partition(":")
        if name == "program":
            if not path or split(text)[2]:
                raise UsageError(f"workload {text!r}: write program:FILE.yaml, without options")
            found[text] = path
    return found


def _canonical(files: Files, given: Iterable[str]) -> list[str]:
    """The strategies of cells by their names: in several files a name may have several numbers of ranks."""
    texts: dict[str, None] = {}
    for text in given:
        name = str(split(text)[1]) if text.startswith("program:") else text
        found, errors = [], []
        for file in files.values():
            try:
                found.append(choice(file, name).text)
            except UsageError as error:
                errors.append(error)
        if not found:
            raise UsageError(f"--strategy {text}: {errors[0]} ({', '.join(files)})")
        texts |= dict.fromkeys(found)
    return list(texts)


def _batch(options: StudyFile, files: Files) -> int | str | list[int | str]:
    """The batch sizes of the options, or the default of the files."""
    if options.batch_size is not None:
        if read_batches(options.batch_size, "--batch-size") == (BATCH_AUTO,):
            raise UsageError("--batch-size auto needs the memory of a model, which is unknown here: name one")
        return options.batch_size
    batches = {file.default_batch for file in files.values()}
    if len(batches) > 1:
        raise UsageError(f"the files of {', '.join(files)} have different batches: give --batch-size")
    return batches.pop()


def _patterns(given: list[Pattern] | None, files: Files) -> list[Pattern] | None:
    """The patterns of `include` or `exclude` with canonical strategies."""
    made = []
    for one in given or ():
        there = files if one.workload is None else {one.workload: files[one.workload]}
        for strategy in [None] if one.strategy is None else _canonical(there, [one.strategy]):
            made.append(replace(one, strategy=strategy))
    return given and made
