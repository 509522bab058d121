"""A plan in words, before anything runs: what, how long, and by which commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.launch.conduct import conduct_of
from harness.plan.auto import AUTO, Choice, StrategyCandidate
from harness.plan.estimate import Estimate
from harness.plan.expand import auto_choices
from harness.plan.points import unchecked
from harness.plan.schedule import PlannedLaunch
from harness.plan.study_file import SETTINGS
from harness.plan.surroundings import MIB, SHARE, Machine, Measured
from harness.terminal.console import Console
from harness.terminal.group_text import group_lines
from reports.analysis.series import told_settings, value_text
from reports.text import count, devices, devices_word, duration, listed
from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell
from results.environment import CodeVersion
from results.grouping import grouped
from results.launch import Launch
from results.notation import NO_LINK, link_text
from results.outcome import Evidence
from results.plan import Plan, Point, Request, Skip
from results.spec import split
from results.store import Study

_LAUNCH_ID = "LAUNCH_ID"
"""Stands in printed commands for a name that is only given when a launch starts."""
_IMPOSSIBLE = frozenset(("groups", "batch", "strategy", "network", "workload", "split"))
"""Rules of skips that hold on every machine."""
_DEFAULTS = {"compression": UNCOMPRESSED, "collective": DEFAULT_COLLECTIVE, "link": NO_LINK}
"""Axes by their default; a table has a column for such an axis only if it has other values."""
CHOICE_COLUMNS = (
    *("candidate", "parameters", "gradients", "optimizer", "gathered", "buckets", "activations", "MiB"),
    *("sent MiB", "compute s", "update s", "bubble s", "exposed s", "ms a sample", "measured"),
    *("fullest when", "verdict"),
)
"""Columns of a table of candidates: memory by its parts at the fullest moment, and seconds of a step."""
CHOICE_NUMERIC = tuple(
    name not in ("candidate", "measured", "fullest when", "verdict") for name in CHOICE_COLUMNS
)


def plan_summary(study: Study, plan: Plan, launches: Sequence[PlannedLaunch], costs: Estimate) -> list[str]:
    """Lines that state the study, its size, the launches that are left, and their cost."""
    lines = plan_header(study, plan, launches)
    if plan.order is not None:
        return [*lines, *conduct_of(plan).summary()]
    if launches:
        launch = "launch" if len(launches) == 1 else "launches"
        lines.append(
            f"about {duration(costs.seconds * 1e9)} in {len(launches)} {launch}, "
            f"{costs.device_hours:.2f} device-hours, if every run takes its whole measuring budget"
        )
        lines += [f"  {note}" for note in costs.notes]
    return lines


def plan_header(study: Study, plan: Plan, launches: Sequence[PlannedLaunch]) -> list[str]:
    """Lines that state the study, its size, the runs that are left, and skipped and unchecked points."""
    request = plan.request
    left = sum(len(launch.cells) for launch in launches)
    total = sum(plan.wanted(cell.id) for cell in plan.cells)
    sizes = ", ".join(str(size) for size in request.gpus)
    seeds = list(dict.fromkeys(cell.seed for cell in plan.cells))
    settings = [_all_of(plan, "dataset") + " data", *told_settings([plan])]
    if seeds not in ([], [0]):
        settings.append(f"seed={','.join(map(str, seeds))}")
    if (own := conduct_of(plan).header(study, left)) is not None:
        return own
    if plan.round is not None and plan.round.number > 1:
        return [f"round {plan.round.number} of {plan.study}: {left} of {count(total, 'run')} to do"]
    at = "" if plan.round is None else f"in round {plan.round.number} "
    repeats = f"x {count(request.repeats, 'repeat')}" if plan.round is None else "at most, by rounds"
    lines = [
        f"study {plan.study} in {study.root}",
        f"{_axes(request)} on {devices(2, request.device).replace('2', sizes, 1)}, "
        f"{' and '.join(request.scalings)} scaling, {_all_of(plan, 'precision')}, {', '.join(settings)}",
        f"{count(len(plan.cells), 'cell')} {repeats}; "
        f"{count(len(plan.skips), 'point')} skipped; {left} of {count(total, 'run')} {at}to do",
    ]
    lines += [f"  {line}" for line in _skip_lines(plan)]
    unknown = Counter(reason for cell in plan.cells if (reason := unchecked(cell)) is not None)
    lines += [f"  {one.words}" for one in request.batches or ()]
    lines += [f"  not checked {number} x: {reason}" for reason, number in unknown.items()]
    return [*lines, *_choice_lines(weighed_choices(study, plan))]


def weighed_choices(study: Study, plan: Plan) -> list[tuple[Point, Choice]]:
    """Weigh the strategies for each point of `auto`, by what its study has measured."""
    if AUTO not in plan.request.every_strategy:
        return []
    return auto_choices(plan, Measured.of_study(study, study.results()))


def _choice_lines(weighed: Sequence[tuple[Point, Choice]]) -> list[str]:
    """The strategy that `auto` chose for each point, and then the assumptions of all these choices.

    A point is named by its workload and size, and by whatever else the points differ in.
    """
    every = [
        {"batch": point.batch_size, "scaling": point.scaling, "link": point.link} for point, _ in weighed
    ]
    vary = [word for word in ("batch", "scaling", "link") if len({told[word] for told in every}) > 1]
    lines = []
    for (point, choice), told in zip(weighed, every, strict=True):
        if choice.chosen is not None:
            words = [f"{point.workload} on {point.gpus}", *(f"{word} {told[word]}" for word in vary)]
            lines.append(f"  auto for {', '.join(words)}: {choice.chosen.strategy}, {choice.reason}")
    notes = dict.fromkeys(note for _, choice in weighed for note in choice.around.notes)
    return [*lines, *(f"  {note}" for note in notes)]


def plan_tables(
    console: Console,
    study: Study,
    plan: Plan,
    launches: Sequence[PlannedLaunch],
    costs: Estimate,
    *,
    line: Callable[[Launch, Path], str],
) -> None:
    """Everything of a plan on stdout: cells, skips, launches with their commands, the estimate.

    `line` says how a launch whose file is at a path is started.
    """
    for text in plan_summary(study, plan, launches, costs):
        console.result(text)
    workers = devices_word({plan.request.device})
    axes = [*_told_axes(plan.cells), *_varied(plan.cells)]
    console.result("\ncells")
    console.table(
        ["cell", "workload", *axes, workers, "micro-batch", "accumulation", "global batch"],
        [
            [
                *(cell.id, cell.workload, *(value_text(getattr(cell, axis)) for axis in axes)),
                *map(str, (cell.gpus, cell.micro_batch, cell.accumulation, cell.global_batch)),
            ]
            for cell in plan.cells
        ],
        numeric=[False] * (2 + len(axes)) + [True] * 4,
    )
    if plan.skips and _lists_skips(plan):
        axes = _told_axes(plan.skips)
        console.result("\nskipped")
        console.table(
            ["workload", *axes, workers, "batch", "scaling", "reason"],
            [
                [
                    *(skip.workload, *(getattr(skip, axis) for axis in axes)),
                    *(str(skip.gpus), str(skip.batch_size), skip.scaling, skip.reason),
                ]
                for skip in plan.skips
            ],
            numeric=[False] * (1 + len(axes)) + [True, True, False, False],
        )
    for point, choice in weighed_choices(study, plan):
        console.result(
            f"\nauto for {point.workload} on {point.gpus}, batch {point.batch_size}, {point.scaling} scaling"
            + (f", link {point.link}" if point.link != NO_LINK else "")
        )
        for text in choice.around.lines():
            console.result(f"  {text}")
        if choice.chosen is not None:
            console.result(f"  {_step_parts(choice.chosen)}")
        console.table(CHOICE_COLUMNS, choice_rows(choice), numeric=CHOICE_NUMERIC)
    if groups := list(group_lines(plan)):
        console.result("\ngroups of ranks")
        for text in groups:
            console.result(text)
    console.result(f"\nlaunches ({_LAUNCH_ID} is named when a launch starts)")
    for launch, time in zip(launches, costs.launches, strict=True):
        takes = "" if plan.order is not None else f", about {duration(time.longest_s * 1e9)}"
        place = f"{count(launch.placement.nodes, 'node')} x {launch.placement.gpus_per_node}"
        if launch.link_mbit_per_s is not None:
            place += f" over {link_text(launch.link_mbit_per_s)}"
        console.result(f"repeat {launch.repeat}, {place}: {count(len(launch.cells), 'cell')}{takes}")
        console.result(f"  {_command(study, launch, line)}")


def choice_rows(choice: Choice) -> list[list[str]]:
    """Rows of CHOICE_COLUMNS: all candidates, the simplest first, and then the refused strategies, a row for
    each name and rule."""
    rows = []
    for one in choice.candidates:
        memory, times = one.memory, one.times
        sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.buckets)
        seconds = (times.compute, times.update, times.bubble, times.exposed)
        rows.append(
            [
                one.strategy,
                *(f"{size / MIB:,.0f}" for size in (*sizes, memory.activations, memory.total)),
                f"{one.sent / MIB:,.1f}",
                *(f"{value:.3g}" for value in seconds),
                f"{1e3 * one.sample_s:.3g}",
                " and ".join(times.measured) or "nothing",
                memory.moment,
                _verdict(one, chosen=one is choice.chosen),
            ]
        )
    # Refusals of one strategy by one rule differ in numbers.
    refused = grouped(((split(name)[0], why.rule), (name, why.text)) for name, why in choice.refused)
    for [(strategy, why), *others] in refused.values():
        more = f" and {len(others)} more" if others else ""
        alike = "" if all(other == why for _, other in others) else ", and the like"
        rows.append([strategy + more, *[""] * (len(CHOICE_COLUMNS) - 2), why + alike])
    return rows


def _step_parts(candidate: StrategyCandidate) -> str:
    """Say which parts the predicted step of a candidate has, with the exchange along each dimension."""
    times = candidate.times
    parts = {"computation": times.compute, "update": times.update, "bubble": times.bubble}
    told = [f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds]
    told += [
        f"{dimension} exchange {seconds:.3g} s ({exposed:.3g} exposed)"
        for dimension, (seconds, exposed) in times.exchange.items()
    ]
    return f"a step of {candidate.strategy} takes {times.step:.3g} s: {', '.join(told)}"


def _verdict(candidate: StrategyCandidate, *, chosen: bool) -> str:
    around, host = candidate.around, f"{candidate.host_bytes / MIB:,.0f} MiB of its host"
    if candidate.memory.total > around.room:
        return f"does not fit into {around.room / MIB:,.0f}"
    if not candidate.fits_host:
        return f"does not fit into {SHARE * (around.devices.host_bytes or 0) / MIB:,.0f}: {host}"
    verdict = "chosen" if chosen else "fits"
    return f"{verdict}, with {host}" if candidate.host_bytes else verdict


def _lists_skips(plan: Plan) -> bool:
    return Console.loudness > 0 or not plan.cells


def _skip_lines(plan: Plan) -> list[str]:
    """One line on the points that are left out; a line for each reason with `-v`, and if no point is left.

    Combinations that no machine could run are only counted, unless all have one reason.
    """
    if _lists_skips(plan):
        return [f"skipped {number} x{sizes}: {reason}" for reason, sizes, number in _reasons(plan.skips)]
    impossible = [skip for skip in plan.skips if skip.rule in _IMPOSSIBLE]
    why = {skip.reason for skip in impossible}
    told = [f"{len(impossible)} impossible{f' ({why.pop()})' if len(why) == 1 else ''}"] if impossible else []
    others = [skip for skip in plan.skips if skip.rule not in _IMPOSSIBLE]
    told += [f"{number} x{sizes} {reason}" for reason, sizes, number in _reasons(others)]
    return [f"skipped: {'; '.join(told)}; -v lists them"] if told else []


def _reasons(skips: Sequence[Skip]) -> list[tuple[str, str, int]]:
    """Each reason, the sizes where they are what differs (` (4 to 16)`), and how many points it left out."""
    groups: dict[str, list[Skip]] = {}
    for skip in skips:
        by_rule = {"machine": "machine", "memory": f"memory: {skip.workload}, {skip.strategy}"}
        groups.setdefault(by_rule.get(skip.rule or "", skip.reason), []).append(skip)
    told = []
    for group in groups.values():
        least, most = (end(group, key=lambda skip: skip.gpus) for end in (min, max))
        sizes = "" if least.reason == most.reason else f" ({least.gpus} to {most.gpus})"
        told.append((least.reason, sizes, len(group)))
    return sorted(told, key=lambda reason: -reason[2])


def _axes(request: Request) -> str:
    """The axes of the matrix and their values; an axis with only its default value is left out."""
    travel = {"compression": request.compressions, "collective": request.collectives, "link": request.links}
    axes = {"": request.workloads, " x ": request.strategies} | {
        f" x {name} ": values for name, values in travel.items() if values != (_DEFAULTS[name],)
    }
    return "".join(f"{lead}{', '.join(values)}" for lead, values in axes.items())


def _all_of(plan: Plan, field: str) -> str:
    """The values of a setting in all cells, as words: `fp32 and bf16`."""
    found = dict.fromkeys(str(getattr(cell, field)) for cell in plan.cells)
    return listed(list(found) or [getattr(plan.request, field)])


def _told_axes(rows: Sequence[Cell] | Sequence[Skip]) -> list[str]:
    """The strategy, and the axes of the exchange that are not at their default in every row."""
    told = [axis for axis, default in _DEFAULTS.items() if any(getattr(row, axis) != default for row in rows)]
    return ["strategy", *told]


def _varied(cells: Sequence[Cell]) -> list[str]:
    """The settings in which cells of one workload differ, except settings that have a column anyway."""
    found: dict[tuple[str, str], set[object]] = {}
    for cell in cells:
        for name in SETTINGS:
            found.setdefault((name, cell.workload), set()).add(getattr(cell, name))
    varied = {name for (name, _), values in found.items() if len(values) > 1}
    return [name for name in SETTINGS if name in varied and name != "accumulation"]


def _command(study: Study, planned: PlannedLaunch, line: Callable[[Launch, Path], str]) -> str:
    launch = Launch(
        launch_id=_LAUNCH_ID,
        placement=planned.placement,
        device=planned.device,
        backend=planned.backend,
        evidence=Evidence.MEASURED,
        slots=(),
        code=CodeVersion(code_hash=""),
        threads=Machine.here().threads(planned.device),
        link_mbit_per_s=planned.link_mbit_per_s,
        env=planned.env,
        python=planned.python,
    )
    return line(launch, (study.launch_folder(_LAUNCH_ID) / "launch.json").resolve())
