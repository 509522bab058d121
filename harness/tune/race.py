"""The race of a tune: which settings run next, and how each stands, from the declared settings and the trials.

Trials are short at first. A wave of settings runs at the shortest budget; a Gaussian process over the choices
learns from the trials what the prediction got wrong, and selects the next wave. Then the fastest race by
rungs: each rung has a longer budget, so that what is fast only at first falls back, and interleaved blocks,
so that its settings are compared in pairs. A setting that is separated from the best of its rung is out.

The functions are pure, so that a tune that was killed goes on as if it had not been. A setting runs at each
budget in one rung only: its number of rungs before gives the budget.

Sources: successive halving, Jamieson & Talwalkar (AISTATS 2016); Gaussian processes, Rasmussen & Williams
(2006), ch. 2, 5.4; expected improvement, Jones, Schonlau & Welch (1998); randomized blocks, Montgomery,
Design and Analysis of Experiments, ch. 4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product

import numpy as np
from scipy.special import ndtr

from results.outcome import Outcome
from results.statistics import Floats, t_quantile

GROWTH = 3.0
"""The budget of a rung over that of the rung below."""
TOP = 2
"""The level of the longest rung; waves have level 0."""
FEWEST = 8
"""Settings of the first wave, and trials before the prediction drops any setting."""
FINALISTS = 3
BLOCKS = 2
EXPLORE = 0.55
"""Share of the device time that waves may take where it is limited."""
SIGMAS = 2.0
"""Standard errors above its prediction within which a setting that has not run may still be the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the space."""

    id: str
    choices: Mapping[str, str]
    """The value of each option that is searched; an option without a meaning here may be missing."""
    predicted_rate: float | None
    """Samples/s that planning predicts; None without a prediction."""
    complexity: int
    """The number of choices that differ from the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a setting that has ended for good."""

    setting: str
    rung: int
    block: int
    """Trials of one rung and block ran interleaved, so that they are compared in pairs."""
    rate: float | None
    """Samples/s of the global batch; None if it failed."""
    outcome: Outcome
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Runs to do next: `blocks` interleaved runs of each setting, each measured for `budget_s`."""

    number: int
    settings: tuple[str, ...]
    blocks: int
    budget_s: float


class State(StrEnum):
    WAITING = "waiting"
    RACING = "racing"
    OUT = "out"
    FAILED = "failed"
    DROPPED = "dropped"
    """It has not run, and the prediction as the trials corrected it leaves it no chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a setting stands. Rates are of the last rung that it ran in, in samples/s."""

    setting: str
    state: State
    why: str
    """The end of a sentence that begins with the setting, such as `ran out of memory`."""
    level: int | None
    """The level of the last rung that it ran in; None if it has not run."""
    rate: float | None
    """The geometric mean over the blocks of that rung."""
    against_best: tuple[float, float, float] | None
    """The rate over that of the best of the same rung, with the ends of its 95 % interval; None where one
    block cannot give an interval."""


def next_rung(
    settings: Sequence[Setting],
    trials: Sequence[Trial],
    *,
    default: str,
    device_s_left: float | None,
    shortest_s: float = 1.0,
) -> Rung | None:
    """Return the next runs, or None at the end of the race: then the best of `standings` go to the final.

    `default` is the id of the default setting, `device_s_left` what the race may still take (None: as much
    as it needs), `shortest_s` the budget of a run in a wave.
    """
    race = _Race(settings, trials, default)
    number = 1 + max((trial.rung for trial in trials), default=-1)
    if race.top == 0:
        wave = race.wave(device_s_left)
        if wave:
            return Rung(number=number, settings=wave, blocks=1, budget_s=shortest_s)
    level = race.top + 1
    racing = race.contenders(device_s_left)
    if level > TOP or len(racing) < 2 or (level > 1 and len(racing) <= FINALISTS):
        return None
    return Rung(number=number, settings=racing, blocks=BLOCKS, budget_s=shortest_s * GROWTH**level)


def standings(settings: Sequence[Setting], trials: Sequence[Trial], *, default: str) -> tuple[Standing, ...]:
    """Return how each setting stands: the best first, and those without a rate last."""
    race = _Race(settings, trials, default)
    place = {setting: index for index, setting in enumerate(race.ranked)}
    found = [race.standing(setting.id) for setting in settings]
    return tuple(sorted(found, key=lambda one: place.get(one.setting, len(place))))


class _Race:
    """What the trials say."""

    def __init__(self, settings: Sequence[Setting], trials: Sequence[Trial], default: str) -> None:
        self.settings = {setting.id: setting for setting in settings}
        self.default = default
        self.failed: dict[str, Outcome] = {}
        self.logs: dict[str, dict[int, dict[int, float]]] = defaultdict(dict)
        """Logarithms of rates by setting, rung and block."""
        self.costs: dict[int, list[float]] = defaultdict(list)
        """Device seconds of the runs of each level that ended well."""
        self.spent = sum(trial.device_s for trial in trials)
        self.rungs: dict[str, list[int]] = defaultdict(list)
        for trial in sorted(trials, key=lambda trial: (trial.rung, trial.block)):
            rungs = self.rungs[trial.setting]
            if trial.rung not in rungs:
                rungs.append(trial.rung)
            if trial.rate is None:
                self.failed.setdefault(trial.setting, trial.outcome)
            else:
                self.logs[trial.setting].setdefault(trial.rung, {})[trial.block] = math.log(trial.rate)
                self.costs[len(rungs) - 1].append(trial.device_s)
        self.top = max((len(rungs) - 1 for rungs in self.rungs.values()), default=0)
        alive = [setting for setting in self.logs if setting not in self.failed]
        order = {setting: index for index, setting in enumerate(self.settings)}
        self.ranked = sorted(alive, key=lambda one: (-len(self.rungs[one]), -self.log(one), order[one]))
        """Settings that ran without a failure, the best first: a longer rung counts for more than a rate."""

    def log(self, setting: str, rung: int | None = None) -> float:
        """The mean logarithm of a setting's rates in a rung, by default its last."""
        return float(np.mean(list(self.logs[setting][self.rungs[setting][-1] if rung is None else rung].values())))

    # Waves

    def wave(self, device_s_left: float | None) -> tuple[str, ...]:
        """The settings of the next wave; none if no other can be the best, or the time for waves is over."""
        if not self.rungs:
            return self._first_wave()
        if not self.logs and Outcome.OUT_OF_MEMORY not in self.failed.values():
            return ()  # Something other than the settings is at fault.
        most = max(FEWEST, len(self.settings) // 12)
        if device_s_left is not None:
            share = EXPLORE * (self.spent + device_s_left) - self.spent
            most = min(most, int(share / (self.spent / len(self.rungs))))
        waiting = [one for one in self.settings if one not in self.rungs and self._why_dropped(one) is None]
        return self.model.choose(waiting, most)

    def _first_wave(self) -> tuple[str, ...]:
        """The default, then settings that have most values that none before has, by prediction where equal."""
        chosen = [self.default]
        waiting = sorted(
            (one for one in self.settings.values() if one.id != self.default),
            key=lambda one: -(one.predicted_rate or 0.0),
        )
        seen = set(self.settings[self.default].choices.items())
        while waiting:
            best = max(waiting, key=lambda one: len(one.choices.items() - seen))
            if not best.choices.items() - seen and len(chosen) >= FEWEST:
                break
            waiting.remove(best)
            chosen.append(best.id)
            seen |= best.choices.items()
        return tuple(chosen)

    def _why_dropped(self, setting: str) -> str | None:
        """Why a setting that has not run has no chance; None if it may have one."""
        choices = self.settings[setting].choices
        for other, outcome in self.failed.items():
            if outcome is Outcome.OUT_OF_MEMORY and _smaller_batch(self.settings[other].choices, choices):
                return "has a larger micro-batch than a setting that ran out of memory"
        seen = {item for one in self.logs for item in self.settings[one].choices.items()}
        if len(self.rungs) < FEWEST or not self.ranked or choices.items() - seen:
            return None
        most, best = self.model.most(setting), max(self.log(one, self.rungs[one][0]) for one in self.ranked)
        if most >= best:
            return None
        return f"is at most {math.exp(most - best):.0%} of the best by the prediction as the trials corrected it"

    @cached_property
    def model(self) -> _Model:
        rates = {one: self.log(one, self.rungs[one][0]) for one in self.ranked}
        return _Model(list(self.settings.values()), rates, list(self.failed))

    # Rungs

    def contenders(self, device_s_left: float | None) -> tuple[str, ...]:
        """The settings that the next rung has, the best first."""
        racing = [one for one in self.ranked if len(self.rungs[one]) > self.top and not self.separated(one)]
        level = self.top + 1
        most = len(racing) if level > 1 else max(FEWEST, len(racing) // 4)
        if device_s_left is not None and level <= TOP:
            share = device_s_left / (TOP - self.top)
            most = min(most, int(share / (BLOCKS * self._cost(level))))
        return tuple(racing[:most])

    def _cost(self, level: int) -> float:
        """An upper estimate of the device seconds of a run: what does not grow with the budget is known only
        from two levels."""
        mean = {known: float(np.mean(costs)) for known, costs in self.costs.items()}
        below = mean[level - 1]
        growth = below - mean[level - 2] if level > 1 else below
        return below + max(growth, 0.0) * (GROWTH if level > 1 else GROWTH - 1)

    @cached_property
    def noise(self) -> tuple[float, int]:
        """The standard deviation of a run within its block, and its degrees of freedom, over all rungs."""
        squares, freedom = 0.0, 0
        for rung in {rung for rungs in self.rungs.values() for rung in rungs}:
            rows = [list(logs[rung].values()) for logs in self.logs.values() if len(logs.get(rung, ())) >= BLOCKS]
            if len(rows) > 1 and len({len(row) for row in rows}) == 1:
                table = np.array(rows)
                rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
                squares += float((rest**2).sum())
                freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
        return math.sqrt(squares / freedom) if freedom else math.nan, freedom

    def against_best(self, setting: str) -> tuple[float, float, float] | None:
        rung = self.rungs[setting][-1]
        best = max(self.log(one, rung) for one in self.ranked if rung in self.logs[one])
        noise, freedom = self.noise
        blocks = len(self.logs[setting][rung])
        if blocks < BLOCKS or not freedom:
            return None
        half = t_quantile(freedom) * noise * math.sqrt(2 / blocks)
        difference = self.log(setting, rung) - best
        return math.exp(difference), math.exp(difference - half), math.exp(difference + half)

    def separated(self, setting: str) -> bool:
        against = self.against_best(setting)
        return against is not None and against[2] < 1

    def standing(self, setting: str) -> Standing:
        level = len(self.rungs[setting]) - 1 if setting in self.rungs else None
        against = self.against_best(setting) if setting in self.ranked else None
        if setting in self.failed:
            state, why = State.FAILED, f"ended as {self.failed[setting].replace('_', ' ')}"
        elif level is None:
            dropped = self._why_dropped(setting)
            state, why = (State.DROPPED, dropped) if dropped else (State.WAITING, "has not run")
        elif self.separated(setting):
            state, why = State.OUT, "is slower than the best of its rung"
        elif level < self.top:
            state, why = State.OUT, "was not among the fastest of its rung, which went on"
        else:
            state, why = State.RACING, "is among the fastest so far"
        rate = math.exp(self.log(setting)) if setting in self.ranked else None
        return Standing(setting=setting, state=state, why=why, level=level, rate=rate, against_best=against)


def _smaller_batch(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two settings differ in the micro-batch (and what follows from it) alone, and `one` has the
    smaller."""
    rest = {"micro_batch", "accumulation"}
    if "micro_batch" not in one or "micro_batch" not in other:
        return False
    same = all(one.get(name) == other.get(name) for name in (one.keys() | other.keys()) - rest)
    return same and int(one["micro_batch"]) < int(other["micro_batch"])


class _Model:
    """The logarithms of all rates: the prediction, and a Gaussian process over the choices for its error."""

    def __init__(self, settings: Sequence[Setting], rates: Mapping[str, float], failed: Sequence[str]) -> None:
        """`rates` are the logarithms of what the trials measured."""
        self._index = {setting.id: index for index, setting in enumerate(settings)}
        likeness = _likeness(settings)
        ran = [self._index[one] for one in rates]
        known = [math.log(one.predicted_rate) for one in settings if one.predicted_rate]
        middle = float(np.mean(known)) if known else 0.0
        slope = np.array([math.log(one.predicted_rate or math.exp(middle)) - middle for one in settings])
        mean = slope + (float(np.mean([rates[settings[i].id] - slope[i] for i in ran])) if ran else 0.0)
        errors = np.array([rates[settings[i].id] - mean[i] for i in ran])
        additive, joint = likeness.mean(0), np.prod(0.3 + 0.7 * likeness, 0)
        best = (-math.inf, additive, 1.0)
        for size, part, noise in product((0.01, 0.04, 0.16, 0.64), (0.2, 0.5, 0.8), (0.03, 0.1)):
            kernel = size * (1 - part) * additive + size * part * joint + 0.3 * np.outer(slope, slope) + 0.1
            score = _log_likelihood(kernel[np.ix_(ran, ran)], errors, noise)
            best = max(best, (score, kernel, noise), key=lambda one: one[0])
        _, kernel, noise = best
        self._noise = noise**2
        inverse = np.linalg.inv(kernel[np.ix_(ran, ran)] + self._noise * np.eye(len(ran)))
        weights = inverse @ errors
        self._mean = mean + kernel[:, ran] @ weights
        self._covariance = kernel - kernel[:, ran] @ inverse @ kernel[ran]
        # The errors of leaving one trial out, in standard errors: what the model claims of itself is checked.
        left_out = weights / np.sqrt(np.diag(inverse))
        self._scale = max(1.0, float(np.sqrt(np.mean(left_out**2)))) if ran else 1.0
        self._best = max(rates.values(), default=-math.inf)
        misses = [self._index[one] for one in failed]
        close = np.prod(0.1 + 0.9 * likeness, 0)
        self._fits = (1 + close[:, ran].sum(1)) / (1 + close[:, ran].sum(1) + close[:, misses].sum(1))

    def most(self, setting: str) -> float:
        """The most that the logarithm of the setting's rate may be."""
        index = self._index[setting]
        return float(self._mean[index] + SIGMAS * self._scale * math.sqrt(max(self._covariance[index, index], 0)))

    def choose(self, waiting: Sequence[str], most: int) -> tuple[str, ...]:
        """The settings with the largest expected improvement, each as if those before it had run."""
        left, covariance, chosen = list(waiting), self._covariance.copy(), []
        while left and len(chosen) < most:
            at = [self._index[one] for one in left]
            spread = self._scale * np.sqrt(np.maximum(covariance[at, at], 1e-12))
            gain = self._mean[at] - self._best if math.isfinite(self._best) else np.zeros(len(at))
            z = gain / spread
            value = self._fits[at] * (gain * ndtr(z) + spread * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
            pick = int(np.argmax(value))
            column = covariance[:, at[pick]]
            covariance = covariance - np.outer(column, column) / (column[at[pick]] + self._noise)
            chosen.append(left.pop(pick))
        return tuple(chosen)


def _likeness(settings: Sequence[Setting]) -> Floats:
    """How alike two settings are in each option, 0 to 1: options x settings x settings.

    Values that are numbers are alike if they are neighbours in order.
    """
    layers = []
    for name in sorted({name for setting in settings for name in setting.choices}):
        values = [setting.choices.get(name) for setting in settings]
        given = {value for value in values if value is not None}
        same = np.array([[float(one == other) for other in values] for one in values])
        if len(given) > 2 and all(value.replace(".", "", 1).isdigit() for value in given):
            places = {value: place for place, value in enumerate(sorted(given, key=float))}
            at = np.array([places.get(value, math.inf) if value is not None else math.inf for value in values])
            has = np.isfinite(at)
            steps = np.abs(np.where(has, at, 0)[:, None] - np.where(has, at, 0)[None])
            same = np.where(has[:, None] & has[None], np.exp(-steps / 2), same)
        layers.append(same)
    return np.array(layers) if layers else np.ones((1, len(settings), len(settings)))


def _log_likelihood(kernel: Floats, errors: Floats, noise: float) -> float:
    """The logarithm of the marginal likelihood, without its constant."""
    lower = np.linalg.cholesky(kernel + noise**2 * np.eye(len(errors)))
    white = np.linalg.solve(lower, errors)
    return -0.5 * float(white @ white) - float(np.log(np.diag(lower)).sum())
