"""A cell's budget: its step time in parts, as the mean over its runs, and the time lost against a baseline.

The parts of a run, and their formulas, are in `results/run.py` and `results/derivation/accounts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal, get_args

from reports.analysis.figures import CellFigures, OfCell, copies_of_runs
from reports.analysis.scaling import CurvePoint
from reports.text import percent
from results.run import BudgetMethod, StepBudget
from results.statistics import DOUBT_ABOVE, Metric, differences, t_quantile

BudgetPart = Literal["input", "compute", "transfer", "wait", "imbalance", "bubble", "other"]
PARTS: tuple[BudgetPart, ...] = get_args(BudgetPart)
"""The parts in the order in which they are drawn."""
LOSS_NAMES: Mapping[BudgetPart, str] = {
    "input": "input",
    "compute": "slower computation",
    "transfer": "exposed transfer",
    "wait": "waiting for the slowest rank",
    "imbalance": "imbalance of experts",
    "bubble": "pipeline bubbles",
    "other": "other",
}
"""The words of drawing and text for the time that a step loses in each part."""
RESIDUAL_ABOVE = 0.05
"""Share of a step by which its parts may miss it before a cell carries a warning (5 %)."""
NO_BUDGET = "its runs have no budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellBudget(OfCell):
    """The step time of a cell in parts that add up to it."""

    method: BudgetMethod
    part_ns: Mapping[BudgetPart, float]
    """The time of each part; `bubble` is missing for a strategy without stages, and `imbalance` without
    experts."""
    run_part_ns: tuple[Mapping[BudgetPart, float], ...]
    """The time of each part in each run."""
    transfer_ns: Metric
    wait_ns: Metric
    copies_ns: float = 0.0
    """The time by which transfer may be more, and compute less: of copies in steps without exchange, where it
    is not negligible."""

    @property
    def step_ns(self) -> float:
        return self.figures.step_ns.value

    @property
    def exchanges(self) -> bool:
        """Whether its ranks exchange anything; where they do not, transfer and wait are 0 by definition."""
        return any(run.exchange_payload_bytes != 0 for run in self.figures.runs)

    def known_ns(self, part: BudgetPart) -> float | None:
        """The time of a part as it is shown; None if the cell has no stages, no experts or no exchange."""
        if part in ("transfer", "wait", "imbalance") and not self.exchanges:
            return None
        return self.part_ns.get(part)

    def share(self, part: BudgetPart) -> float | None:
        """The share of a part in the step time; None if the cell does not have the part."""
        ns = self.known_ns(part)
        return None if ns is None else ns / self.step_ns

    @property
    def warning(self) -> str | None:
        """A warning if `other` is a large share of the step."""
        other_ns = self.part_ns["other"]
        if abs(other_ns) <= RESIDUAL_ABOVE * self.step_ns:
            return None
        if self.method == "one rank":
            return f"{percent(other_ns / self.step_ns)} of the step lies outside of its phases"
        return change(other_ns, self.step_ns)


NO_RIVAL = 0.01
"""The smallest share of the largest part that makes another part a rival of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The time by which a step exceeds its ideal computation, by part.

    The ideal is the baseline's compute time for the work of one device here, C(n0) (W(n) / n) / (W(n0) / n0)
    with W the samples of a step: under weak scaling the baseline's compute time, under strong scaling n0 / n
    of it.
    """

    budget: CellBudget
    ideal_ns: float
    run_ideal_ns: tuple[float, ...]
    """The ideal by each run of the baseline."""

    @property
    def total_ns(self) -> float:
        return self.budget.step_ns - self.ideal_ns

    @property
    def share(self) -> float:
        """The share of the step time that is lost."""
        return self.total_ns / self.budget.step_ns

    @property
    def part_ns(self) -> Mapping[BudgetPart, float]:
        """The time of each part, of compute only above the ideal. They add up to the total."""
        parts = dict(self.budget.part_ns)
        parts["compute"] -= self.ideal_ns
        return parts

    @property
    def largest(self) -> BudgetPart:
        """The part that takes most of it."""
        parts = self.part_ns
        return max(parts, key=lambda part: parts[part])

    @property
    def rivals(self) -> tuple[BudgetPart, ...]:
        """The parts that the runs do not distinguish from the largest: each of them may be the largest.

        `other` is left out: it is the difference between the step and its parts, and is judged by its size. A
        part that stays below `NO_RIVAL` of the largest in all runs is left out too: two runs fail any test.
        """
        largest = self.largest
        least_ns = self.ends_ns(largest)[0]
        return tuple(
            part
            for part in self.part_ns
            if part not in (largest, "other")
            and self.ends_ns(part)[1] >= NO_RIVAL * least_ns
            and not self.leads(largest, part)
        )

    def leads(self, part: BudgetPart, rival: BudgetPart) -> bool:
        """Whether `part` takes more than `rival` in every run, and its lead is more than chance.

        Where one part is computation, each run is compared with each run of the baseline. More than chance
        means a one-sided Student's t at 95 % on the runs' leads, whose degrees of freedom are the smaller
        number of runs less one (a conservative Welch's test). One run on both sides leads by its value.
        """
        # Copies may count to transfer, and not to compute.
        doubt_ns = self.budget.copies_ns * ((part == "compute") + (rival == "transfer"))
        leads = [run[part] - run[rival] - doubt_ns for run in self.budget.run_part_ns]
        sign = (rival == "compute") - (part == "compute")
        ideals = [sign * ideal for ideal in self.run_ideal_ns] if sign else [0.0]
        if min(leads) + min(ideals) <= 0:
            return False
        samples = [values for values in (leads, ideals) if len(values) > 1]
        if not samples:
            return True
        freedom = min(len(values) for values in samples) - 1
        error = sum(variance(values) / len(values) for values in samples) ** 0.5
        return bool(fmean(leads) + fmean(ideals) > t_quantile(freedom, 0.90) * error)

    def ends_ns(self, part: BudgetPart) -> tuple[float, float]:
        """The smallest and the largest time of the part over the runs, compared with the ideal."""
        less = self.ideal_ns if part == "compute" else 0.0
        values = [run[part] - less for run in self.budget.run_part_ns]
        return min(values), max(values) + (self.budget.copies_ns if part == "transfer" else 0.0)

    def shown(self, part: BudgetPart) -> bool:
        """Whether the part's interval, or its value without an interval, is above zero."""
        figure = {"transfer": self.budget.transfer_ns, "wait": self.budget.wait_ns}.get(part)
        return (self.part_ns[part] if figure is None or figure.low is None else figure.low) > 0


def budget(figures: CellFigures) -> CellBudget | None:
    """The budget over the counted runs of a cell; None if one of them lacks it or has another method."""
    budgets = _budgets(figures)
    if why_no_budget(figures) is not None:
        return None
    run_parts: list[dict[BudgetPart, float]] = []
    for one, step_ns in zip(budgets, figures.run_step_ns, strict=True):
        own: dict[BudgetPart, float] = {
            "input": one.input_ns,
            "compute": one.compute_ns,
            "transfer": one.transfer_ns.value,
            "wait": one.wait_ns.value,
        }
        more: dict[BudgetPart, float | None] = {"imbalance": one.imbalance_ns, "bubble": one.bubble_ns}
        own |= {part: ns for part, ns in more.items() if ns is not None}
        run_parts.append({**own, "other": step_ns - sum(own.values())})
    parts = {part: fmean(run[part] for run in run_parts) for part in run_parts[0]}
    # The mean of the runs' residuals, corrected so that the parts add up to the step time that is shown.
    parts["other"] += figures.step_ns.value - sum(parts.values())
    copies_ns = _copies_ns(budgets[0].method, figures, parts["transfer"])
    return CellBudget(
        figures=figures,
        method=budgets[0].method,
        part_ns=parts,
        run_part_ns=tuple(run_parts),
        transfer_ns=_pooled([one.transfer_ns for one in budgets], copies_ns),
        copies_ns=copies_ns,
        wait_ns=_pooled([one.wait_ns for one in budgets]),
    )


def change(other_ns: float, step_ns: float) -> str:
    """A clause on the residual of several ranks, whose parts come from other steps than the timed ones."""
    share = other_ns / step_ns
    took = f"{percent(-share)} longer than" if share < 0 else f"{percent(share)} less time than"
    return f"the parts come from steps that took {took} the timed ones: the machine changed in between"


def why_no_budget(figures: CellFigures) -> str | None:
    budgets = _budgets(figures)
    if len(budgets) < len(figures.runs):
        absent = next(run.absent for run in figures.runs if run.budget is None)
        return absent.get("budget") or absent.get("quads") or NO_BUDGET
    methods = sorted({one.method for one in budgets})
    if len(methods) > 1:
        return f"its runs have budgets by different methods: {', '.join(methods)}"
    return None


def lost(budget: CellBudget, baseline: CellBudget) -> Lost:
    """Compare a step with the computation of a baseline of the same work."""
    work = budget.cell.global_batch / baseline.cell.global_batch
    per_device = work * baseline.cell.gpus / budget.cell.gpus
    return Lost(
        budget=budget,
        ideal_ns=baseline.part_ns["compute"] * per_device,
        run_ideal_ns=tuple(run["compute"] * per_device for run in baseline.run_part_ns),
    )


def loss_of(point: CurvePoint) -> Lost | None:
    """The loss of a point against the baseline of its efficiency or, if none is claimed, against its own
    computation; None without a budget."""
    own, claim = budget(point.figures), point.efficiency
    baseline = budget(claim.baseline) if claim.baseline and claim.metric else None
    return lost(own, baseline or own) if own else None


def _budgets(figures: CellFigures) -> list[StepBudget]:
    return [run.budget for run in figures.runs if run.budget is not None]


def _copies_ns(method: BudgetMethod, figures: CellFigures, transfer_ns: float) -> float:
    """The time of copies that may be transfer; 0 where it is negligible, and without off blocks."""
    copies_ns = copies_of_runs(figures.runs)
    if method != "on-off" or copies_ns <= DOUBT_ABOVE * (transfer_ns + copies_ns):
        return 0.0
    return copies_ns


def _pooled(metrics: list[Metric], more_ns: float = 0.0) -> Metric:
    """Pool the runs, and extend the interval by `more_ns`; a single run keeps the interval of its quads."""
    if len(metrics) == 1:
        return metrics[0]
    return differences([one.value for one in metrics], "ns").or_more(more_ns)
