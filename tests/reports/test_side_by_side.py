"""Several studies side by side: only equal work is compared, and differences are named."""

from __future__ import annotations

import re

import pytest

from reports.analysis.side_by_side import NO_ENVIRONMENT, side_by_side
from reports.analysis.study import StudyFigures
from reports.page.render import render_figures, render_studies
from reports.page.sections.comparison import comparison_table
from results.cell import StepPolicy
from results.outcome import Evidence


@pytest.fixture(scope="module")
def plant(tmp_path_factory, new_study):
    """Plant a study of ddp with these step times; `fields` are of the cells, other keywords of the timing."""

    def made(name: str, step_ms: list[float], *, gpus=(2,), fields=None, **timing) -> StudyFigures:
        study = new_study(tmp_path_factory.mktemp("plant") / "study")
        study.points("ddp", dict.fromkeys(gpus, step_ms), **(fields or {}), **timing)
        study.skip("ddp", 1, "ddp needs at least 2", batch=8)
        return study.analysed(name=name)

    return made


def test_a_ratio_by_hand(plant) -> None:
    comparison = side_by_side([plant("old", [10.0, 11.0, 12.0]), plant("new", [5.0, 5.5, 6.0])])
    (shared,) = comparison.cells
    first, second = shared
    assert (first.study, first.ratio, first.absent, first.change) == ("old", None, None, None)
    # 11 / 5.5; the nearest runs give 10 / 6, the farthest 12 / 5.
    assert second.ratio.value == pytest.approx(2.0)
    assert (second.ratio.low, second.ratio.high) == pytest.approx((10 / 6, 12 / 5))
    assert (second.ratio.interval, second.ratio.samples) == ("range", 3)
    assert second.change == "faster"
    assert comparison.findings == (
        "new against old, 1 shared cell: faster in 1 (2.00 times as fast); under equal conditions.",
    )


@pytest.mark.parametrize(
    ("step_ms", "change", "words"),
    [
        ([20.0, 22.0, 24.0], "slower", "slower in 1 (0.500 times as fast)"),
        ([10.5, 11.0, 11.5], "no difference shown", "no difference shown in 1"),
    ],
)
def test_slower_and_no_difference(plant, step_ms, change, words) -> None:
    comparison = side_by_side([plant("old", [10.0, 11.0, 12.0]), plant("new", step_ms)])
    assert comparison.cells[0][1].change == change
    assert words in comparison.findings[0]


def test_what_changed_is_first_and_the_largest_change_leads(plant) -> None:
    before = plant("before", [10.0, 10.1, 10.2], gpus=(2, 4))
    slower = plant("after", [15.0, 15.1, 15.2], gpus=(2,))
    faster = plant("later", [9.0, 9.1, 9.2], gpus=(2, 4))
    page = render_studies([before, slower, faster])
    found = re.findall(r'<p class="figure">([^<]*)</p>', page[: page.index("Cells that do the same work")])
    # Step times: 15.1 / 10.1 is 49.5 % more, 9.1 / 10.1 is 9.9 % less.
    assert found == ["3 of 3 cells changed", "49.5 % slower", "9.9 % faster", "9.9 % faster"]
    assert re.findall(r"in after: ([^<]*)", page)[0].startswith("0.669 times as fast (")


def test_two_runs_are_not_judged_but_shown(plant) -> None:
    comparison = side_by_side([plant("old", [10.0, 11.0]), plant("new", [5.0, 5.5])])
    entry = comparison.cells[0][1]
    assert entry.ratio is not None
    assert entry.change is None
    assert "not judged in 1 (a verdict needs 3 runs of each)" in comparison.findings[0]
    assert comparison_table(comparison).texts[1][9].endswith("not judged")


def test_conditions_that_differ_are_named_beside_the_ratio(plant, new_environment) -> None:
    new = plant("new", [5.0, 5.5, 6.0], environment=new_environment(torch="2.14.0", threads=2))
    comparison = side_by_side([plant("old", [10.0, 11.0, 12.0]), new])
    entry = comparison.cells[0][1]
    assert entry.differs == {"threads": ("1", "2"), "torch": ("2.13.0", "2.14.0")}
    assert entry.change == "faster"
    assert comparison.findings[0].endswith(
        "; they differ in threads (1 in old, 2 in new), torch (2.13.0 in old, 2.14.0 in new)."
    )
    assert "torch: 2.13.0 there, 2.14.0 here" in comparison_table(comparison).texts[1][10]


@pytest.fixture
def differs(plant):
    """The finding and the table's cell of a study compared with `old`, whose 3 runs were not disturbed."""

    def made(*, first: bool = False, other: bool = False, **timing) -> tuple[str, str]:
        old = plant("old", [10.0, 11.0, 12.0], foreign_cpu_cores=1.0 if first else 0.0)
        new = plant("new", [5.0, 6.0], foreign_cpu_cores=1.0 if other else 0.0, **timing)
        comparison = side_by_side([old, new])
        return comparison.findings[0].partition("); ")[2], comparison_table(comparison).texts[1][10]

    return made


def test_disturbed_runs_of_either_side_are_no_equal_conditions(differs, new_environment) -> None:
    assert differs() == ("under equal conditions.", "nothing")
    assert differs(other=True) == (
        "0 of 3 runs disturbed in old, 2 of 2 runs disturbed in new.",
        "0 of 3 runs disturbed there, 2 of 2 runs disturbed here",
    )
    assert differs(first=True) == (
        "3 of 3 runs disturbed in old, 0 of 2 runs disturbed in new.",
        "3 of 3 runs disturbed there, 0 of 2 runs disturbed here",
    )
    assert differs(other=True, environment=new_environment(torch="2.14.0")) == (
        "they differ in torch (2.13.0 in old, 2.14.0 in new); 0 of 3 runs disturbed in old, 2 of 2 runs "
        "disturbed in new.",
        "torch: 2.13.0 there, 2.14.0 here, 0 of 3 runs disturbed there, 2 of 2 runs disturbed here",
    )


def test_disturbed_runs_add_up_over_the_shared_cells(plant) -> None:
    old = plant("old", [10.0, 11.0, 12.0], gpus=(2, 4))
    new = plant("new", [5.0, 6.0], gpus=(2, 4), foreign_cpu_cores=1.0)
    assert (
        side_by_side([old, new])
        .findings[0]
        .endswith("; 0 of 6 runs disturbed in old, 4 of 4 runs disturbed in new.")
    )


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ([10.0], [5.0], "2.00 x (1 run each), not judged"),
        # 10 / 5 and 12 / 5.
        ([10.0, 12.0], [5.0], "2.20 x (2.00 to 2.40, range of 2 and 1 runs), not judged"),
        ([10.0, 12.0], [5.0, 5.0], "2.20 x (2.00 to 2.40, range of 2), not judged"),
        ([10.0, 11.0, 12.0], [5.0, 5.0, 5.0], "2.20 x (2.00 to 2.40, range of 3), faster"),
    ],
)
def test_the_interval_says_how_many_runs_of_each(plant, there, here, words) -> None:
    comparison = side_by_side([plant("old", there), plant("new", here)])
    assert comparison_table(comparison).texts[1][9] == words


def test_emulated_and_measured_are_not_divided(plant) -> None:
    new = plant("new", [5.0, 5.5, 6.0], evidence=Evidence.EMULATED)
    entry = side_by_side([plant("old", [10.0, 11.0, 12.0]), new]).cells[0][1]
    assert (entry.ratio, entry.absent) == (None, "emulated here, measured there")


def test_without_an_environment_nothing_is_divided(plant, tmp_path, new_study) -> None:
    study = new_study(tmp_path / "bare")
    study.points("ddp", {2: [5.0, 5.5, 6.0]})
    bare = study.analysed(name="bare", environment=None)
    entry = side_by_side([plant("old", [10.0]), bare]).cells[0][1]
    assert (entry.ratio, entry.absent, entry.differs) == (None, NO_ENVIRONMENT, {})


def test_work_that_differs_is_not_compared_and_says_in_what(plant) -> None:
    other = plant("new", [5.0], gpus=(2, 4), fields={"precision": "bf16", "seed": 1})
    comparison = side_by_side([plant("old", [10.0], gpus=(2, 4, 8)), other])
    assert comparison.cells == ()
    assert comparison.findings == ("No cell of one study does the same work as a cell of another.",)
    assert comparison.unlike == (
        "gpt-nano, ddp on 2, 4: precision fp32 in old, bf16 in new; seed 0 in old, 1 in new",
    )


def test_how_long_is_measured_is_no_part_of_the_work(plant) -> None:
    longer = plant("new", [5.0], fields={"steps": StepPolicy(budget_s=60.0)})
    comparison = side_by_side([plant("old", [10.0]), longer])
    assert len(comparison.cells) == 1
    assert comparison.unlike == ()


def test_the_first_study_that_has_a_cell_is_what_the_others_are_compared_with(plant) -> None:
    studies = [
        plant("a", [10.0, 10.0, 10.0], gpus=(2,)),
        plant("b", [20.0, 20.0, 20.0], gpus=(2, 4)),
        plant("c", [40.0, 40.0, 40.0], gpus=(2, 4, 8)),
    ]
    comparison = side_by_side(studies)
    told = [
        (
            shared[0].figures.cell.gpus,
            [(entry.study, entry.ratio.value if entry.ratio else None) for entry in shared],
        )
        for shared in comparison.cells
    ]
    assert told == [(2, [("a", None), ("b", 0.5), ("c", 0.25)]), (4, [("b", None), ("c", 0.5)])]
    assert comparison.findings == (
        "b against a, 1 shared cell: slower in 1 (0.500 times as fast); under equal conditions.",
        "c against a, 1 shared cell: slower in 1 (0.250 times as fast); under equal conditions.",
        "c against b, 1 shared cell: slower in 1 (0.500 times as fast); under equal conditions.",
        "Cells that no other study has: 1 of c.",
    )


def test_efficiencies_are_those_of_each_study(plant) -> None:
    comparison = side_by_side([plant("a", [10.0], gpus=(2, 4)), plant("b", [20.0], gpus=(4, 8))])
    (four,) = comparison.cells
    first, second = four
    assert (first.efficiency.metric.value, first.efficiency.is_baseline) == (1.0, False)
    assert second.efficiency.is_baseline
    rows = comparison_table(comparison).texts
    assert [row[4:9:4] for row in rows] == [("a", "100.0 %"), ("b", "baseline")]


@pytest.fixture(scope="module")
def pair(plant) -> list[StudyFigures]:
    hostile = 'id="headline" href="#headline"'
    old = plant("old & <b>", [10.0, 11.0, 12.0], exposed_ms=1.0)
    return [old, plant("new", [20.0], gpus=(2, 4), warnings=[hostile])]


@pytest.fixture(scope="module")
def page(pair) -> str:
    """Two studies on one page, both with drawings."""
    return render_studies(pair)


def test_a_study_has_all_its_sections_on_the_page_of_several_in_their_order(pair, page) -> None:
    own = render_figures(pair[1])
    sections = [one for one in re.findall(r'<section id="([^"]+)"', own) if one != "method"]
    there = re.findall(r'<section id="([^"]+)"', page)
    assert [one for one in there if one.startswith("study-2-")] == [f"study-2-{one}" for one in sections]


def test_ids_are_unique_and_every_inner_link_leads_somewhere(page) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    links = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {link for pair in links for link in pair if link} - set(ids) == set()
    described = re.findall(r'aria-(?:labelledby|describedby|controls)="([^"]+)"', page)
    assert {name for names in described for name in names.split()} - set(ids) == set()
    assert described


def test_the_comparison_is_first_the_method_last_and_each_study_under_its_name(page) -> None:
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert (sections[0], sections[-1], sections.count("method")) == ("comparison", "method", 1)
    assert re.findall(r"<h1>(.*?)</h1>", page) == [
        "old &amp; &lt;b&gt;, new", "old &amp; &lt;b&gt;", "new"
    ]  # fmt: skip


def test_the_navigation_is_grouped_by_study(page) -> None:
    navigation = page[page.index("<nav") : page.index("</nav>")]
    general, first, second = navigation.split("<ul>")[1:]
    assert re.findall(r'href="#([^"]+)"', general) == ["comparison", "method"]
    for number, group in ((1, first), (2, second)):
        anchors = re.findall(r'href="#([^"]+)"', group)
        assert anchors[0] == f"study-{number}"
        assert len(anchors) > 5
        assert all(anchor.startswith(f"study-{number}-") for anchor in anchors[1:])


def test_links_to_definitions_are_shared(page) -> None:
    assert page.count('id="method-step-time"') == 1
    assert 'href="#method-step-time"' in page
    assert "study-1-method" not in page
    assert page.count('id="method-against-first"') == 1
    assert page.count("<script>") == 1


def test_a_text_that_looks_like_an_id_stays_a_text(page) -> None:
    assert "id=&#34;headline&#34; href=&#34;#headline&#34;" in page
