"""Whether a ratio of two cells is a difference that a reader should act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from results.statistics import Metric, p_equal, ratio_of_runs

Side = Literal["faster", "slower"]
"""Above 1 and below it: by step times, first over second, the second cell is that, and by rates the first."""
Runs = Sequence[float]
"""The figures of a cell's runs."""

SMALLEST_EFFECT = 0.02
"""Share by which two cells must differ to be called different: a choice should not depend on less (2 %)."""
FALSE_CLAIMS = 0.05
"""Maximum probability that equal cells lead to a claim, for any number of compared pairs."""


def side(ratio: Metric, smallest: float) -> Side | None:
    """The side of 1 on which a ratio's whole interval lies, if its value is also at least `smallest` from 1.

    None: no difference is shown, or the ratio has no interval.
    """
    if ratio.low is None or ratio.high is None:
        return None
    if ratio.low > 1 and ratio.value >= 1 + smallest:
        return "faster"
    return "slower" if ratio.high < 1 and ratio.value <= 1 / (1 + smallest) else None


def sides(pairs: Sequence[tuple[Runs, Runs]], smallest: float) -> list[Side | None]:
    """The side of 1 of each pair's ratio, first over second, for pairs that are judged together.

    In addition to `side`, Welch's t on logarithms must distinguish the pair, corrected for the number of
    pairs by Holm's method (1979): the k-th least probable of m pairs may have a p of `FALSE_CLAIMS` / (m - k
    + 1), as long as all before it pass.
    """
    probable = [p_equal(first, second) for first, second in pairs]
    left, passed = len(pairs), set()
    for place in sorted(range(len(pairs)), key=lambda place: probable[place]):
        if probable[place] > FALSE_CLAIMS / left:
            break
        passed.add(place)
        left -= 1
    return [
        side(ratio_of_runs(first, second, "x"), smallest) if place in passed else None
        for place, (first, second) in enumerate(pairs)
    ]


def effect_text(smallest: float) -> str:
    """`2 %`."""
    return f"{100 * smallest:.3g} %"


def claim_rule(smallest: float) -> str:
    """The page's definition of `faster` and `slower`."""
    return (
        "Faster and slower mean that the interval lies on one side of 1, that the value is at least "
        f"{effect_text(smallest)} from it (bench report --smallest-effect), and that Welch's t on the "
        "logarithms of the runs distinguishes the two at "
        f"{effect_text(FALSE_CLAIMS)} for all such comparisons together (Holm)"
    )
