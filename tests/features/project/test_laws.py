"""Laws by hand, the rule that chooses among them, and bands learnt from the errors of others."""

from __future__ import annotations

import math
from statistics import median

import pytest

from harness.features.project.bands import Family, Residual, Residuals, band, covered, shipped
from harness.features.project.laws import CONSTANT, LAWS, Steps, chosen_law, refused


def steps(ns: dict[int, float], *, slope: float = 0.0, noise: float = 0.0) -> Steps:
    return Steps(gpus=tuple(ns), ns=tuple(ns.values()), pool_slope=slope, noise=noise)


def test_each_law_continues_the_series_that_it_describes() -> None:
    ring = steps({2: 1.0 + 0.5 / 2, 4: 1.0 + 0.5 * 3 / 4})
    assert LAWS["ring"](ring, 8) == pytest.approx(1.0 + 0.5 * 7 / 8)
    log = steps({2: 1.1, 4: 1.2, 8: 1.3})
    assert LAWS["log"](log, 32) == pytest.approx(1.5)
    assert LAWS[CONSTANT](log, 32) == 1.3
    # d = 2 of log2 n = 1, 2, 3; the own slope is 0.1 and the pool's 0.4: (2 * 0.1 + 4 * 0.4) / 6 = 0.3.
    own = steps({2: 2**0.1, 4: 2**0.2, 8: 2**0.3}, slope=0.4)
    assert LAWS["pooled slope"](own, 16) == pytest.approx(2**0.3 * 2**0.3)


@pytest.mark.parametrize("law", LAWS)
def test_every_law_goes_through_the_largest_size_and_never_gets_faster(law) -> None:
    falling = steps({2: 1.2, 4: 1.1, 8: 1.0}, slope=0.02)
    assert LAWS[law](falling, 8) == pytest.approx(1.0)
    assert LAWS[law](falling, 64) >= 1.0


def test_two_sizes_are_continued_by_constant_efficiency_which_is_not_tested() -> None:
    assert chosen_law(steps({8: 1.0, 16: 1.05})) == (CONSTANT, None)


def test_a_steady_slope_is_chosen_and_beats_constant_efficiency_on_earlier_sizes() -> None:
    law, skill = chosen_law(steps({n: 1 + 0.05 * math.log2(n) for n in (1, 2, 4, 8, 16)}))
    assert law == "log"
    assert (skill or 0) > 0.5


def test_the_simplest_law_is_chosen_where_the_noise_hides_the_difference() -> None:
    ns = {n: 1 + 0.02 * math.log2(n) for n in (1, 2, 4, 8)}
    assert chosen_law(steps(ns))[0] == "log"
    assert chosen_law(steps(ns, noise=0.05))[0] == CONSTANT


@pytest.mark.parametrize(
    ("ns", "gpus", "per_node", "why"),
    [
        ({8: 1.0}, 16, 8, "one size"),
        ({4: 1.0, 8: 1.0}, 16, 8, "node boundary"),
        ({4: 1.0, 8: 1.0, 16: 1.0}, 32, 8, None),
        # An efficiency of 0.89 at a doubling, and of 0.91.
        ({8: 1.0, 16: 1 / 0.89}, 32, 8, "irregular"),
        ({8: 1.0, 16: 1 / 0.91}, 32, 8, None),
        # 1.2 times as long at four times the size is 0.91 a doubling.
        ({8: 1.0, 32: 1.2}, 64, 8, None),
        ({8: 1 / 0.89, 16: 1.0}, 32, 8, "irregular"),
        ({8: 1.0, 16: 1.0}, 128, 8, None),
        ({8: 1.0, 16: 1.0}, 256, 8, "too far"),
    ],
)
def test_what_no_law_answers(ns, gpus, per_node, why) -> None:
    assert refused(steps(ns), gpus, per_node) == why


def residuals(*families: list[float]) -> Residuals:
    """Families whose errors of constant efficiency at one doubling of an even curve are given."""
    return Residuals(
        families=tuple(
            Family(
                source=str(number),
                address="",
                slope=0.1 * number,
                residuals=tuple(
                    Residual(gpus=(8, 16), roughness=0.0, law=CONSTANT, errors={CONSTANT: error})
                    for error in errors
                ),
            )
            for number, errors in enumerate(families)
        )
    )


def test_the_ends_of_a_band_are_quantiles_of_the_errors_of_its_law_each_family_weighs_the_same() -> None:
    # Ten errors of 0 in one family weigh as much as one error of 0.2 in another: the upper end is 0.2.
    assert band(CONSTANT, 1, 0.0, residuals([0.0] * 10, [0.2])) == (1.0, pytest.approx(math.exp(0.2)))
    assert band(CONSTANT, 1, 0.0, residuals([0.2], [0.2]))[0] == 1.0


def test_a_band_widens_with_each_doubling_and_with_the_unevenness_of_the_curve() -> None:
    uneven = ((1, 0.01), (1, 0.02), (2, 0.02), (3, 0.02)), ((1, 0.01), (1, 0.08))
    for rising in uneven:
        widths = [high - low for low, high in (band(CONSTANT, *one) for one in rising)]
        assert widths == sorted(set(widths))
    low, high = band(CONSTANT, 1, 0.02)
    assert high - 1 > 1 - low, "mostly towards slower"


def test_the_shipped_bands_hold_what_the_docs_say() -> None:
    families = shipped().families
    assert all(family.source and family.address for family in families)
    hits = [hit for those in covered().values() for hit, _ in those]
    assert len(hits) >= 38
    assert sum(hits) / len(hits) >= 0.75
    for times, widest in ((2, 0.20), (4, 0.50)):
        widths = [width for (_, far), those in covered().items() if far == times for _, width in those]
        assert median(widths) <= widest, times


def test_the_chosen_law_is_nowhere_worse_than_constant_efficiency_by_more_than_0_2_points() -> None:
    for family in shipped().families:
        for times in {round(2**one.doublings) for one in family.residuals}:
            those = [one for one in family.residuals if round(2**one.doublings) == times]
            own, constant = (
                median(abs(math.expm1(-one.errors[law or one.law])) for one in those)
                for law in (None, CONSTANT)
            )
            assert own <= constant + 0.002, (family.source, times)
