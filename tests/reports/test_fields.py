"""Numbers in tables: the shown text, and the number by which the page's script sorts."""

from __future__ import annotations

import re

import pytest

from reports import fields
from reports.fields import NONE, Field
from reports.page.section import Table
from reports.page.sections.table import table_section
from results.statistics import Metric

STEP = Metric(value=12.3e6, unit="ns", low=12.1e6, high=12.6e6, samples=3, interval="range")


@pytest.mark.parametrize(
    ("field", "text", "value", "unit"),
    [
        (fields.whole(1234), "1,234", 1234, ""),
        (fields.number(1.23456, digits=4), "1.235", 1.23456, ""),
        (fields.duration(125.4e9), "2 min 05 s", 125.4e9, "ns"),
        (fields.size(97.5 * 2**20), "97.5 MiB", 97.5 * 2**20, "bytes"),
        (fields.si(4.1234e9, "FLOP"), "4.12 GFLOP", 4.1234e9, "FLOP"),
        (fields.percent(0.9412), "94.1 %", 0.9412, "ratio"),
        (fields.figure(STEP), "12.3 ms", 12.3e6, "ns"),
        (fields.figure(STEP, ends=True), "12.3 ms (12.1 to 12.6)", 12.3e6, "ns"),
        (fields.interval(STEP), "12.1 to 12.6, range of 3", None, ""),
        (fields.shown(float("inf"), "{:.2g}".format), "inf", None, ""),
    ],
)
def test_a_field_is_a_number_in_its_unit_and_its_text(field, text, value, unit) -> None:
    assert field == Field(text, value, unit)


def test_what_is_not_known_is_one_field() -> None:
    forms = (fields.whole, fields.number, fields.duration, fields.size, fields.percent, fields.figure)
    assert {form(None) for form in (*forms, fields.interval)} == {NONE}
    assert fields.si(None, "B/s") == NONE


def test_the_page_sorts_by_the_value_and_not_by_what_is_printed_of_it(small) -> None:
    figures = small.analysed()
    section = table_section(figures)
    [table] = [block.data for block in section.blocks if isinstance(block, Table)]
    place = table.titles.index("step time, ms")
    values = [row[place].value for row in table.rows if row[place].value is not None]
    assert 12.5e6 in values
    html = small.page()
    # Of the whole page: each value stands beside its text, unrounded.
    for row in table.rows:
        if row[place].value is not None:
            assert re.search(rf'data-value="{row[place].value}"><span>{row[place].text}</span>', html)
