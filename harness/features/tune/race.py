"""The race of a tune: which settings run next, and how each stands, from the trials so far.

Short runs come first, in waves: a Gaussian process over the choices learns what the prediction got wrong, and
selects the next wave. Then the fastest climb: while one of the best three has not run at the longest budget,
the fastest of its level run at the next. So what is fast only at first falls back, and others follow. All is
a function of the trials, so that a killed tune continues. A setting runs at each budget in one rung only.

Sources: successive halving without a fixed width, Li et al. (MLSys 2020); Gaussian processes, Rasmussen &
Williams (2006), ch. 2, 5.4; expected improvement, Jones, Schonlau & Welch (1998); intervals of randomized
blocks, Montgomery, Design and Analysis of Experiments, ch. 4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import msgspec
import numpy as np
from scipy.special import ndtr

from harness.features.tune.records import TunedSetting, TunedTrial
from results.outcome import Outcome
from results.statistics import Floats, t_quantile

BLOCKS, GROWTH = (1, 1, 2), 3.0
"""Blocks of a rung of each level, and the factor from the budget of a level to the next."""
FEWEST = 8
"""Settings of a wave, and trials before the prediction drops a setting."""
FINALISTS, WIDTH = 3, 4
"""The best settings that must have run at the longest budget, and the most settings of a climbing rung."""
EXPLORE = 0.6
"""Share of the device time for waves before the fastest climb, where it is limited."""
SAFETY = 1.5
"""The error with which a prediction drops a setting, over the largest of its errors on the trials."""
_NOISE = 0.05**2
"""The variance of a logarithm of a short run's rate, with what its moment does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Runs to do next: `blocks` interleaved runs of each setting, each measured for `budget_s`."""

    number: int
    settings: tuple[str, ...]
    blocks: int
    budget_s: float


def next_rung(
    settings: Sequence[TunedSetting],
    trials: Sequence[TunedTrial],
    *,
    device_s_left: float = math.inf,
    shortest_s: float = 1.0,
) -> Rung | None:
    """Return the next runs, or None at the end of the race: then `finalists` go to the final.

    The first of `settings` is the default. `device_s_left` is what the race may still take, `shortest_s` the
    budget of the runs of a wave.
    """
    if device_s_left <= 0:
        return None
    level, chosen = _Race(settings, trials).following(device_s_left) if trials else (0, _first_wave(settings))
    number = 1 + max((trial.rung for trial in trials), default=-1)
    rung = Rung(number=number, settings=chosen, blocks=BLOCKS[level], budget_s=shortest_s * GROWTH**level)
    return rung if chosen else None


def standings(settings: Sequence[TunedSetting], trials: Sequence[TunedTrial]) -> tuple[TunedSetting, ...]:
    """Return how each setting stands: by level, then by rate, and last those without a rate."""
    race = _Race(settings, trials)
    ranked = sorted(race.ranked, key=lambda one: -race.level(one))
    return tuple(map(race.standing, dict.fromkeys([*ranked, *(one.id for one in settings)])))


def finalists(stand: Sequence[TunedSetting]) -> tuple[str, ...]:
    """The first three of `standings` that ran, without those that an interval separates from the best."""
    rated = [one for one in stand if one.rate is not None][:FINALISTS]
    return tuple(one.id for one in rated if one is rated[0] or one.state != "out")


def _first_wave(settings: Sequence[TunedSetting]) -> tuple[str, ...]:
    """The default, then what has most values that none before has, by prediction where these are equal."""
    by_rate = sorted(settings[1:], key=lambda one: -(one.predicted_rate or 0.0))
    chosen, seen = [settings[0]], set[tuple[str, str]]()
    while by_rate:
        seen |= chosen[-1].choices.items()
        best = max(by_rate, key=lambda one: len(one.choices.items() - seen))
        if not best.choices.items() - seen and len(chosen) >= FEWEST:
            break
        by_rate.remove(best)
        chosen.append(best)
    return tuple(one.id for one in chosen)


class _Race:
    """The trials so far, by setting, rung and block."""

    def __init__(self, settings: Sequence[TunedSetting], trials: Sequence[TunedTrial]) -> None:
        self._settings = {setting.id: setting for setting in settings}
        self._failed: dict[str, Outcome] = {}
        self._logs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        """The logarithms of rates of each setting that ran, by rung, in the order of blocks."""
        costs: dict[tuple[int, bool], list[float]] = defaultdict(list)
        for trial in sorted(trials, key=lambda trial: (trial.rung, trial.block)):
            logs = self._logs[trial.setting][trial.rung]
            costs[self.level(trial.setting), trial.rate is not None].append(trial.device_s)
            if trial.rate is None:
                self._failed.setdefault(trial.setting, trial.outcome)
            else:
                logs.append(math.log(trial.rate))
        self._spent_s = sum(trial.device_s for trial in trials)
        mean_s = {kind: sum(times) / len(times) for kind, times in costs.items()}
        self._cost_s = {level: cost_s for (level, ok), cost_s in mean_s.items() if ok}
        self._short_s = max((cost_s for (level, _), cost_s in mean_s.items() if level == 0), default=0.0)
        """Device seconds of a run of a wave, by the dearer of those that ended well and those that failed."""
        self._too_large = [one for one, why in self._failed.items() if why is Outcome.OUT_OF_MEMORY]
        alive = [one for one in self._settings if one in self._logs and one not in self._failed]
        self.ranked = sorted(alive, key=lambda one: -self._log(one))
        """The settings that ran without a failure by the rate of their longest run, which may be too high
        where that was short: they climb in this order."""

    def level(self, setting: str) -> int:
        return len(self._logs[setting]) - 1

    def _log(self, setting: str) -> float:
        return float(np.mean(list(self._logs[setting].values())[-1]))

    @cached_property
    def _model(self) -> _Model:
        rates = {one: self._log(one) for one in self.ranked}
        return _Model(list(self._settings.values()), rates, self._failed)

    def following(self, left: float) -> tuple[int, tuple[str, ...]]:
        """Return the level and the settings of the next rung; no settings at the end of the race.

        `left` is the device time that is left, in seconds.
        """
        others = len(self._failed) - len(self._too_large)
        if not self.ranked and (others >= FEWEST or not self._too_large):
            return 0, ()  # Something other than the settings is at fault.
        waiting = [one for one in self._settings if one not in self._logs and not self._hopeless(one)]
        early = EXPLORE * (left + self._spent_s) - self._spent_s
        top, low = len(BLOCKS) - 1, self.ranked[:FINALISTS] if len(self.ranked) > FINALISTS else []
        level = min(map(self.level, low), default=top)
        if level < top and not (waiting and early >= self._short_s):
            climbing = [one for one in self.ranked if self.level(one) == level]
            climbing = climbing[: int(min(WIDTH, left / self._cost(level + 1) / BLOCKS[level + 1]))]
            if climbing:
                return level + 1, tuple(climbing)
        affordable = (early if level < top else left) / self._short_s
        most = max(FEWEST, len(self._settings) // 12)
        return 0, self._model.choose(waiting, int(min(most, affordable)))

    def _cost(self, level: int) -> float:
        """Device seconds of a run, or an upper estimate: which part grows is known only from two levels."""
        if level in self._cost_s:
            return self._cost_s[level]
        below = self._cost_s[level - 1]
        return below + GROWTH * max(below - self._cost_s.get(level - 2, below / GROWTH), 0.0)

    @cached_property
    def _names(self) -> dict[str, set[str]]:
        """The choices that the settings of each strategy have."""
        found = defaultdict[str, set[str]](set)
        for one in self._settings.values():
            found[one.choices.get("strategy", "")].update(one.choices)
        return found

    def _values(self, setting: str) -> set[tuple[str, str]]:
        """The choices of a setting with their values; an option that it lacks is at its default."""
        choices = self._settings[setting].choices
        return {(name, choices.get(name, "")) for name in self._names[choices.get("strategy", "")]}

    @cached_property
    def _seen(self) -> set[tuple[str, str]]:
        return {value for one in self.ranked for value in self._values(one)}

    def _hopeless(self, setting: str) -> str | None:
        """Why a setting that has not run has no chance; None if it may have one."""
        choices = self._settings[setting].choices
        if any(_smaller_batch(self._settings[one].choices, choices) for one in self._too_large):
            return "has a larger micro-batch than a setting that ran out of memory"
        if len(self._logs) < FEWEST or self._values(setting) - self._seen:
            return None
        share = self._model.most(setting)
        return None if share >= 1 else f"reaches at most {share:.0%} of the best, by what the trials taught"

    @cached_property
    def _noise(self) -> tuple[float, int]:
        """The standard deviation of a run within its block, and its degrees of freedom, over all rungs."""
        tables: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
        for one in self.ranked:
            for rung, logs in self._logs[one].items():
                tables[rung, len(logs)].append(logs)
        squares, freedom = 0.0, 0
        for table in map(np.array, tables.values()):
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            squares += float((rest**2).sum())
            freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
        return math.sqrt(squares / max(freedom, 1)), freedom

    def _most_of_best(self, setting: str) -> float:
        """The upper end of the interval of its rate over the best of its last rung; infinite where one block
        gives no interval. The intervals of all settings of the rung hold together (Bonferroni), at 95 %."""
        rung, logs = list(self._logs[setting].items())[-1]
        noise, freedom = self._noise
        if len(logs) < 2 or not freedom:
            return math.inf
        beside = [float(np.mean(self._logs[one][rung])) for one in self.ranked if rung in self._logs[one]]
        quantile = t_quantile(freedom, 1 - 0.05 / max(len(beside) - 1, 1))
        return math.exp(self._log(setting) - max(beside) + quantile * noise * math.sqrt(2 / len(logs)))

    def standing(self, setting: str) -> TunedSetting:
        state, why, rate = "waiting", "has not run", None
        if setting in self._failed:
            state, why = "failed", f"ended as {self._failed[setting].replace('_', ' ')}"
        elif setting in self.ranked:
            ahead, rate = self.ranked[:FINALISTS], math.exp(self._log(setting))
            state, why = "racing", "is among the fastest so far"
            if self._most_of_best(setting) < 1:
                state, why = "out", "is slower than the best of its rung, by more than the noise"
            elif setting not in ahead and self.level(ahead[-1]) > self.level(setting):
                state, why = "out", f"is slower than {FINALISTS} that ran longer"
        elif hopeless := self._hopeless(setting):
            state, why = "dropped", hopeless
        return msgspec.structs.replace(self._settings[setting], state=state, why=why, rate=rate)


def _smaller_batch(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two settings differ in only the micro-batch, and `one` has the smaller."""
    names = {name for name, _ in one.items() ^ other.items()}
    return names == {"micro_batch"} and int(one["micro_batch"]) < int(other["micro_batch"])


class _Model:
    """The logarithms of all rates: the prediction, and a Gaussian process over the choices for its error."""

    def __init__(
        self, settings: Sequence[TunedSetting], rates: Mapping[str, float], failed: Mapping[str, Outcome]
    ) -> None:
        """`rates` are the logarithms of what the trials measured."""
        self._index = {setting.id: index for index, setting in enumerate(settings)}
        ran, misses = [self._index[one] for one in rates], [self._index[one] for one in failed]
        logs = np.array(list(rates.values()))
        self._best = float(logs.max(initial=-math.inf)) if ran else 0.0
        likeness = _likeness(settings)
        slope = np.array([math.log(one.predicted_rate or math.nan) for one in settings])
        slope = np.nan_to_num(slope - (np.nanmean(slope) if np.isfinite(slope).any() else 0.0))
        mean = slope + (float(np.mean(logs - slope[ran])) if ran else 0.0)
        errors, fit, seen = logs - mean[ran], -math.inf, np.ix_(ran, ran)
        parts = (likeness.mean(0), np.prod(0.3 + 0.7 * likeness, 0), np.outer(slope, slope))
        for size, share in product((0.01, 0.04, 0.16, 0.64), (0.2, 0.5, 0.8)):
            shares = (size * (1 - share), size * share, 0.3)
            matrix = np.sum([w * part[seen] for w, part in zip(shares, parts, strict=True)], 0)
            matrix += 0.1 + _NOISE * np.eye(len(ran))
            likelihood = -errors @ np.linalg.solve(matrix, errors) - np.linalg.slogdet(matrix)[1]
            if likelihood > fit:
                fit, best, inverse = likelihood, shares, np.linalg.inv(matrix)
        prior = np.sum([w * part for w, part in zip(best, parts, strict=True)], 0) + 0.1
        weights = inverse @ errors
        self._mean = mean + prior[:, ran] @ weights
        self._covariance = prior - prior[:, ran] @ inverse @ prior[ran]
        # What the model errs by where each trial is left out, in standard errors of its own.
        left_out = np.abs(weights) / np.sqrt(np.diag(inverse))
        self._largest = max(1.0, float(left_out.max(initial=0.0)))
        self._scale = max(1.0, float(np.sqrt(np.mean(left_out**2)))) if ran else 1.0
        close = np.prod(0.1 + 0.9 * likeness, 0)
        self._fits = 1 - close[:, misses].sum(1) / (1 + close[:, [*ran, *misses]].sum(1))

    def most(self, setting: str) -> float:
        """The most that a setting's rate may be, over the best rate."""
        at = self._index[setting]
        spread = SAFETY * self._largest * math.sqrt(max(self._covariance[at, at], 0.0))
        return math.exp(self._mean[at] + spread - self._best)

    def choose(self, waiting: Sequence[str], most: int) -> tuple[str, ...]:
        """The settings with the largest expected improvement, each as if those before it had run."""
        left, covariance = list(waiting), self._covariance
        chosen: list[str] = []
        while left and len(chosen) < most:
            at = [self._index[one] for one in left]
            spread = self._scale * np.sqrt(np.maximum(covariance[at, at], 1e-12))
            z = (self._mean[at] - self._best) / spread
            value = self._fits[at] * spread * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
            pick = int(np.argmax(value))
            column = covariance[:, at[pick]]
            covariance = covariance - np.outer(column, column) / (column[at[pick]] + _NOISE)
            chosen.append(left.pop(pick))
        return tuple(chosen)


def _likeness(settings: Sequence[TunedSetting]) -> Floats:
    """How alike two settings are in each option, 0 to 1: options x settings x settings. Numbers are alike if
    they are near each other in order; others only if they are equal."""
    layers = [np.ones((len(settings), len(settings)))]
    for name in sorted({name for setting in settings for name in setting.choices}):
        values = [setting.choices.get(name, "") for setting in settings]
        given = set(values) - {""}
        numbers = len(given) > 2 and all(value.replace(".", "", 1).isdigit() for value in given)
        step = 0.5 if numbers else 99.0
        place = {value: step * at for at, value in enumerate(sorted(given, key=float if numbers else str))}
        places = np.array([place.get(value, -99.0) for value in values])
        layers.append(np.exp(-np.abs(places[:, None] - places)))
    return np.array(layers[1:] or layers)
