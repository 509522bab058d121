"""The nights of a history, in a study's page and in a site."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import msgspec
from feature_figures import figures_of_features

from harness.cli import run
from harness.features.gate.records.history import add_night
from harness.features.gate.section import history_section
from reports.page import render

FIGURES = dict(figures_of_features())["gate"]


def test_nights_of_the_studys_cells_are_drawn_with_their_change(small) -> None:
    study = FIGURES.shown(small.analysed(), "here")
    html = render.render_figures(study).partition('id="history"')[2].partition("</section>")[0]
    shown = unescape(html)
    assert "worse, +20.0 % from 2026-01-13 on (the night before was 2026-01-12" in shown
    assert "torch 2.12 to 2.13" in shown
    assert "worse, +50.0 % from 2026-01-13 on" in shown
    assert "Peak memory, first and last night of each series" in shown
    # The loss did not change.
    assert html.count("<svg") == 2
    (kept,) = study.added["nights"].values()
    others = [
        msgspec.structs.replace(night, subjects=(msgspec.structs.replace(night.subjects[0], key="other"),))
        for night in kept
    ]
    assert history_section(replace(study, added={"nights": {"here": others}})) is None


def test_the_nights_are_a_page_of_a_site(tmp_path, small) -> None:
    history = tmp_path / "nights"
    for night in FIGURES.twenty_nights(small.study.cell(small.study.cell_ids()[0]), "ddp on 2"):
        add_night(night, history)
    public = tmp_path / "public"
    run(["site", str(small.study.root.parent), "--output", str(public), "--history", str(history)])
    assert 'href="nights.html"' in (public / "index.html").read_text(encoding="utf-8")
    assert "20.0 %" in (public / "nights.html").read_text(encoding="utf-8")
