"""How series look: a colour for each strategy, dashes for what is done to its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reports.analysis.scaling import Curve
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED

COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "brown", "olive")
"""Variables of the page's style: Okabe & Ito, Color Universal Design (2008), and two more."""
ON_PAPER: Mapping[str, str] = {
    "ink": "#1c2024",
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "brown": "#8c510a",
    "olive": "#7f7f17",
}
"""The values of these variables in the page's light style."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 4", "12 3", "6 2 1 2 1 2")


@dataclass(frozen=True, slots=True)
class Look:
    """Of one series."""

    colour: str
    dash: str
    """As SVG has it; empty for a full line."""


Looks = Mapping[str, Look]
"""By the exchange of a series: the same on the whole page, over every network."""


def looks(curves: Iterable[Curve]) -> Looks:
    """One device alone is drawn in ink. Beyond eight of either, colours and dashes repeat."""
    colours: dict[str, str] = {BASELINE_STRATEGY: "ink"}
    dashes: dict[tuple[str, str], str] = {(UNCOMPRESSED, DEFAULT_COLLECTIVE): ""}
    found: dict[str, Look] = {}
    for key in (curve.key for curve in curves):
        if key.strategy not in colours:
            colours[key.strategy] = COLOURS[(len(colours) - 1) % len(COLOURS)]
        exchange = (key.compression, key.collective)
        if exchange not in dashes:
            dashes[exchange] = _DASHES[len(dashes) % len(_DASHES)]
        found[key.exchange] = Look(colours[key.strategy], dashes[exchange])
    return found


def colours_over_studies(curves: Iterable[Curve]) -> Mapping[str, str]:
    """By the exchange of a curve: where a dash is a study, compressors and collectives have colours too."""
    exchanges = dict.fromkeys(curve.key.exchange for curve in curves)
    others = [exchange for exchange in exchanges if exchange != BASELINE_STRATEGY]
    colours = {exchange: COLOURS[place % len(COLOURS)] for place, exchange in enumerate(others)}
    return {BASELINE_STRATEGY: "ink", **colours}
