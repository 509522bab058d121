"""The report in a real browser: no console error, sorting, filtering, paper, phone, dark, without scripts."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from generated_study import Trouble, large_study

from reports.page.render import render_figures, render_studies
from results import files
from results.outcome import Evidence

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PATIENCE_S = 300
A4_LANDSCAPE = (1032, 703)
"""Pixels (96 an inch) inside of the margins of 12 mm."""
HOSTILE = "=cmd|'calc'!A1 <script>alert(1)</script> javascript:alert(2) \""
FULL = "document.querySelector('#table table')"


class Browser:
    """One tab of Chromium over its debugging pipe: JSON on file descriptors 3 and 4, ended by zero bytes."""

    def __init__(self, program: str, folder: Path) -> None:
        asked, self._ask = os.pipe()
        self._answers, answered = os.pipe()

        def connect() -> None:
            # Out of the way first: one of the four may be 3 or 4 itself.
            high = [os.dup(asked), os.dup(answered)]
            for wanted, fd in zip((3, 4), high, strict=True):
                os.dup2(fd, wanted)

        self.folder = folder
        self.complaints: list[str] = []
        self._rest = b""
        self._numbers = count(1)
        self._session: str | None = None
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}/profile"],
            preexec_fn=connect,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(asked)
        os.close(answered)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return the browser's answer; complaints that it sends meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == number:
                assert "error" not in got, got
                return got["result"]

    def open(
        self, page: Path, *, width: int = 1280, dark: bool = False, scripts: bool = True, anchor: str = ""
    ) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.complaints.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.resize(width)
        self.call("Page.navigate", url=f"{page.as_uri()}{anchor}")
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        # Not `mobile`: that would lay a page that is too wide out on a wider canvas, and hide the fault.
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def read(self, expression: str) -> Any:
        """The value of a script's expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **more,
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ask)
        os.close(self._answers)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        got = json.loads(line)
        if got.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(line.decode())
        return got


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on the path (chromium, chromium-browser, google-chrome); install one")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def kept() -> dict[str, str]:
    """Pages by name: planting and rendering a study takes longer than most of the tests."""
    return {}


@pytest.fixture
def page(request, kept, tmp_path) -> Path:
    """The small study with an emulated size and a hostile name, as a file of the test's own."""
    if not kept:
        kept["page"] = _page(request.getfixturevalue("small"))
    path = tmp_path / "report.html"
    path.write_text(kept["page"], encoding="utf-8")
    return path


def _page(small) -> str:
    small.points("ddp", {16: 40.0}, evidence=Evidence.EMULATED, exposed_ms=10.0, warnings=["on battery"])
    small.points("ddp", {2: 1300.0}, workload=HOSTILE)
    return small.page()


def column(browser: Browser, title: str, table: str = FULL) -> list[str]:
    """Read the cells of the shown rows under a heading, from the top."""
    return browser.read(
        f"""(() => {{
          const table = {table};
          const heads = [...table.tHead.rows[0].cells];
          const place = heads.findIndex((head) => head.dataset.title === {json.dumps(title)});
          const rows = [...table.tBodies[0].rows].filter((row) => row.offsetHeight > 0);
          return rows.map((row) => row.cells[place].textContent.replace(/\\s+/g, " ").trim());
        }})()"""
    )


def click(browser: Browser, title: str) -> str | None:
    """Click the heading of the full table and return its stated order."""
    return browser.read(
        f"""(() => {{
          const heads = [...{FULL}.tHead.rows[0].cells];
          const head = heads.find((one) => one.dataset.title === {json.dumps(title)});
          head.querySelector("button").click();
          return head.ariaSort;
        }})()"""
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_opens_without_a_complaint(chromium, page, dark) -> None:
    chromium.open(page, dark=dark)
    assert chromium.complaints == []
    assert chromium.read("document.querySelectorAll('section').length") > 8
    paper = chromium.read("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 27)" if dark else "rgb(253, 253, 252)")


@pytest.mark.parametrize("foreign", ["<script>alert(1)</script>", "<img src='https://example.org/x.png'>"])
def test_a_page_that_breaks_its_policy_is_noticed(chromium, page, foreign) -> None:
    # So that the test above is known to be able to fail.
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{foreign}</body>"), encoding="utf-8")
    chromium.open(page)
    assert any("Content Security Policy" in complaint for complaint in chromium.complaints)


def test_a_click_on_a_heading_sorts_by_the_number_and_not_by_its_text(chromium, page) -> None:
    chromium.open(page)
    before = column(chromium, "step time, ms")
    assert "1,300" in before
    assert click(chromium, "step time, ms") == "ascending"
    # Weak: 10, 12.5, 16, 40 (emulated); strong: 40, 25; the hostile one 1300; the one without figures last.
    sizes = ["10.0", "12.5", "16.0", "25.0", "40.0", "40.0", "1,300", ""]
    assert column(chromium, "step time, ms") == sizes
    assert click(chromium, "step time, ms") == "descending"
    assert column(chromium, "step time, ms") == [*reversed(sizes[:-1]), ""]
    assert click(chromium, "step time, ms") is None
    assert column(chromium, "step time, ms") == before


def test_one_column_is_sorted_at_a_time_and_words_by_their_letters(chromium, page) -> None:
    chromium.open(page)
    click(chromium, "step time, ms")
    click(chromium, "outcome")
    assert column(chromium, "outcome") == ["ok"] * 7 + ["out of memory"]
    assert chromium.read(f"{FULL}.querySelectorAll('[aria-sort]').length") == 1


def test_every_table_is_sorted_by_the_keyboard_too(chromium, page) -> None:
    chromium.open(page)
    chromium.read("document.querySelector('#best table th:nth-child(2) button').focus()")
    chromium.press("Enter")
    chromium.press("Enter")
    best = "document.querySelector('#best table')"
    assert column(chromium, "ranks (CPU)", best) == ["16", "4", "4", "2", "2", "2", "1", "1"]


def test_the_filter_wants_all_words_and_says_how_many_rows_are_left(chromium, page) -> None:
    chromium.open(page)
    status = "document.querySelector('#table [role=status]').textContent"
    assert chromium.read(status) == "8 of 8 rows shown"
    write = "(() => {{ const box = document.querySelector('#table [type=search]'); box.value = {}; "
    write += "box.dispatchEvent(new Event('input')); }})()"
    chromium.read(write.format("'DDP weak'"))
    assert column(chromium, "ranks (CPU)") == ["2", "4", "8", "16", "2"]
    assert chromium.read(status) == "5 of 8 rows shown"
    chromium.read(write.format("'weak nothing'"))
    assert column(chromium, "strategy") == []
    chromium.read(write.format("''"))
    assert len(column(chromium, "strategy")) == 8


def test_copy_gives_the_rows_shown_apart_by_tabs_and_no_formula(chromium, page) -> None:
    chromium.open(page)
    chromium.read("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }")
    chromium.read("document.querySelector('#table [type=search]').value = 'calc'")
    chromium.read("document.querySelector('#table [type=search]').dispatchEvent(new Event('input'))")
    chromium.read(
        "[...document.querySelectorAll('#table .tools button')].find((b) => b.textContent === 'Copy').click()"
    )
    rows = [line.split("\t") for line in chromium.read("copied").split("\n")]
    assert len(rows) == 2
    row = dict(zip(*rows, strict=True))
    assert row["workload"] == f"'{HOSTILE}"
    assert row["step time, ms"] == "1,300"
    assert row["outcome"] == "ok"


def test_download_gives_the_rows_shown_as_csv(chromium, page, tmp_path) -> None:
    chromium.open(page)
    folder = tmp_path / "downloads"
    chromium.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    click(chromium, "step time, ms")
    button = "[...document.querySelectorAll('#table .tools button')].at(-1)"
    assert chromium.read(f"{button}.textContent") == "Download CSV"
    chromium.read(f"{button}.click()")
    file = folder / "table.csv"
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    assert [row["step time, ms"] for row in rows][:2] == ["10.0", "12.5"]
    assert rows[-2]["workload"] == f"'{HOSTILE}"
    assert rows[-1]["reason"] == "rank 0: allocating 2 GiB"
    assert chromium.complaints == []


def test_without_scripts_every_row_is_there_and_no_control_that_does_nothing(chromium, page) -> None:
    chromium.open(page, scripts=False)
    assert chromium.complaints == []
    texts = chromium.call("DOMSnapshot.captureSnapshot", computedStyles=[])["strings"]
    assert "1,300" in texts
    assert "Download CSV" not in texts
    # With scripts off, no expression is read either: the document is asked for its nodes.
    root = chromium.call("DOM.getDocument")["root"]["nodeId"]
    rows = chromium.call("DOM.querySelectorAll", nodeId=root, selector="#table tbody tr:not([hidden])")
    controls = chromium.call("DOM.querySelectorAll", nodeId=root, selector="button, input:not([type=radio])")
    assert len(rows["nodeIds"]) == 8
    assert controls["nodeIds"] == []


def test_on_a_phone_only_tables_scroll_sideways(chromium, page) -> None:
    chromium.open(page, width=390)
    assert chromium.read("document.documentElement.scrollWidth") <= 390
    wide = """[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, svg, .unseen')
        && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 90))"""
    assert chromium.read(wide) == []


PRESETS = {
    "time": ("step time, ms", "added by the exchange, %"),
    "network": ("added by the exchange, %", "step time, ms"),
    "memory": ("peak on the host, MiB", "step time, ms"),
    "proof": ("proof", "added by the exchange, %"),
}
"""A column that each preset shows, and one that it hides."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_shows_its_columns_without_a_script(chromium, page, preset) -> None:
    chromium.open(page)
    chromium.read(f"document.querySelector('[value={preset}]').click()")
    wide = """(title) => [...document.querySelectorAll('#table th')].find((one) =>
        one.dataset.title === title).offsetWidth > 0"""
    shown, hidden = PRESETS[preset]
    assert chromium.read(f"({wide})({json.dumps(shown)})") is True
    assert chromium.read(f"({wide})({json.dumps(hidden)})") is False
    assert chromium.read(f"({wide})('strategy')") is True


def test_the_head_and_the_first_column_of_the_full_table_stay(chromium, page) -> None:
    chromium.open(page, width=390)
    chromium.read("document.querySelector('[value=all]').click()")
    head = f"{FULL}.tHead.rows[0].cells[0].getBoundingClientRect()"
    before = chromium.read(
        f"[{head}.left, {head}.top - {FULL}.closest('.scroll').getBoundingClientRect().top]"
    )
    chromium.read(f"{FULL}.closest('.scroll').scrollTo(200, 90)")
    after = chromium.read(
        f"[{head}.left, {head}.top - {FULL}.closest('.scroll').getBoundingClientRect().top]"
    )
    assert after == pytest.approx(before, abs=1)


def test_on_paper_are_the_answers_with_sizes_curves_memory_cost_failures_and_environment(
    chromium, page
) -> None:
    chromium.open(page)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    chromium.resize(A4_LANDSCAPE[0])
    shown = "[...document.querySelectorAll('section')].filter((one) => one.offsetHeight).map((one) => one.id)"
    assert chromium.read(shown) == ["summary", "best", "curves", "memory", "cost", "outcomes", "environment"]
    # A page that is too wide would be made smaller as a whole, or cut.
    assert chromium.read("document.documentElement.scrollWidth") <= A4_LANDSCAPE[0]
    tallest = "Math.max(...[...document.querySelectorAll('figure')].map((one) => one.offsetHeight))"
    assert 50 < chromium.read(tallest) <= A4_LANDSCAPE[1]
    breaks = "[...document.querySelectorAll('figure')].map((one) => getComputedStyle(one).breakInside)"
    assert set(chromium.read(breaks)) == {"avoid"}
    data = base64.b64decode(
        chromium.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
    )
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 8
    width, height = map(float, re.search(rb"/MediaBox\s*\[0 0 (\S+) (\S+)\]", data).groups())
    assert width > height


def press_switch(browser: Browser, name: str) -> None:
    browser.read(
        f"[...document.querySelectorAll('.switches button')].find((b) => b.textContent === {name!r}).click()"
    )


def test_a_point_is_reached_by_keyboard_says_what_it_is_and_leads_to_its_row(chromium, page) -> None:
    chromium.open(page)
    chromium.read("document.querySelector('.tiles > :last-child a').focus()")
    chromium.press("Tab")
    told = chromium.read("document.activeElement.getAttribute('aria-label')")
    assert told == "ddp on 2 ranks (CPU): 80.0 % (69.2 to 91.7, range of 3); 3 measured"
    assert chromium.read("document.querySelector('.tip').textContent") == told
    assert chromium.read("document.querySelector('.tip').offsetHeight") > 0
    chromium.press("Enter")
    row = "document.querySelector(location.hash.split('~')[0])"
    assert chromium.read(f"{row}.tagName") == "TR"
    assert 0 <= chromium.read(f"{row}.getBoundingClientRect().top") <= 900


CLICK = """(() => {{
  const point = document.querySelectorAll(".s-curves a.point")[{}];
  point.dispatchEvent(new MouseEvent("click", {{ bubbles: true }}));
  return new Promise((done) => setTimeout(done, 50)).then(() => null);
}})()"""


def test_a_click_leads_to_a_row_that_is_seen_stays_marked_and_leads_back(chromium, page) -> None:
    chromium.open(page)
    points = chromium.read("document.querySelectorAll('.s-curves a.point').length")
    for place in range(points):
        chromium.read(CLICK.format(place))
        row = "document.querySelector('tr.lit')"
        head = f"{FULL}.tHead.getBoundingClientRect().bottom"
        assert chromium.read(f"{row}.getBoundingClientRect().top - {head}") >= -1
        assert chromium.read(f"{row}.getBoundingClientRect().bottom <= innerHeight") is True
    # It stays through a filter, and the series of the point is lit in every drawing.
    chromium.read("document.querySelector('#table [type=search]').dispatchEvent(new Event('input'))")
    assert chromium.read("document.querySelectorAll('tr.lit').length") == 1
    lit = "[...new Set([...document.querySelectorAll('.series.lit')].map((one) => one.dataset.series))]"
    assert chromium.read(lit) == ["ddp"]
    assert chromium.read("document.querySelectorAll('svg:has(.series.lit)').length") > 2
    back = chromium.read("document.querySelector('.back').hash")
    assert chromium.read(f"document.querySelector({back!r}).tagName") == "FIGURE"


OVERLAPS = """[...document.querySelectorAll(".chart")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].filter((one) => getComputedStyle(one).display !== "none");
  const boxes = texts.map((one) => one.getBoundingClientRect()).map((box, place) => ({
    text: texts[place].textContent,
    left: box.left + 1, right: box.right - 1, top: box.top + 3, foot: box.bottom - 3}));
  return boxes.flatMap((one, place) => boxes.slice(place + 1).filter((other) =>
      one.left < other.right && other.left < one.right && one.top < other.foot && other.top < one.foot)
      .map((other) => `${one.text} / ${other.text}`));
})"""


def test_no_label_of_a_drawing_covers_another(chromium, page, tmp_path) -> None:
    path = tmp_path / "large.html"
    path.write_text(render_figures(large_study()), encoding="utf-8")
    for one in (page, path):
        chromium.open(one, width=1440)
        assert chromium.read(OVERLAPS) == []


def test_a_phone_shows_the_size_without_scrolling(chromium, tmp_path) -> None:
    path = tmp_path / "large.html"
    path.write_text(render_figures(large_study()), encoding="utf-8")
    chromium.open(path, width=390)
    assert chromium.read("document.querySelector('.answers td b').textContent") == "8 GPUs"
    assert chromium.read("document.querySelector('.answers td b').getBoundingClientRect().bottom") <= 844


def test_series_and_axes_are_switched_and_stand_in_the_address(chromium, page, tmp_path) -> None:
    chromium.open(page)
    shown = """[...document.querySelectorAll('.series')].filter(
        (one) => getComputedStyle(one).display !== 'none').length"""
    every = chromium.read(shown)
    press_switch(chromium, "ddp")
    assert chromium.read(shown) < every
    assert "off=ddp" in chromium.read("location.hash")
    press_switch(chromium, "ddp")
    assert chromium.read(shown) == every
    place = "document.querySelector('.s-summary .point').getAttribute('transform')"
    before = chromium.read(place)
    choose = "(() => {{ const one = document.querySelector('.switches select[name={}]'); one.value = '{}'; "
    choose += "one.dispatchEvent(new Event('change')); }})()"
    chromium.read(choose.format("y", "log"))
    assert chromium.read(place) != before
    assert "y=log" in chromium.read("location.hash")
    moved = chromium.read(place)
    chromium.read(choose.format("y", ""))
    assert (
        chromium.read(place) == pytest.approx(before) or chromium.read(place).split()[0] == before.split()[0]
    )
    # The same view from its address.
    again = tmp_path / "again.html"
    again.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    chromium.open(again, anchor="#curves~y=log&columns=network&filter=weak")
    assert chromium.complaints == []
    assert chromium.read(place) == moved
    assert chromium.read("document.querySelector('[value=network]').checked") is True
    assert chromium.read("document.querySelector('#table [role=status]').textContent") == "6 of 8 rows shown"
    assert abs(chromium.read("document.querySelector('#curves').getBoundingClientRect().top")) < 100


FRAMES = """[...document.querySelectorAll(".chart[data-x-axis]")].map((svg) => {
  const [left, right] = svg.dataset.xAxis.split(" ").slice(2, 4).map(Number);
  const [foot, top] = svg.dataset.yAxis.split(" ").slice(2, 4).map(Number);
  const ends = [...svg.querySelectorAll(".series polyline")].flatMap((one) =>
      one.getAttribute("points").split(" ").map((end) => end.split(",").map(Number)));
  const ticks = [...svg.querySelectorAll(".tick[data-y]")].filter((one) => one.style.display !== "none");
  const heights = ticks.map((one) => Number(one.getAttribute("transform").match(/[-\\d.]+/g)[1]));
  const inside = (at, from, to) => at > from - 0.1 && at < to + 0.1;
  return ends.every(([x, y]) => inside(x, left, right) && inside(y, top, foot))
      && heights.every((y) => inside(y, top, foot));
})"""
"""Whether the lines and the ticks of each chart are within its frame."""


def test_a_logarithmic_axis_leaves_nothing_outside_of_the_frame(chromium, page) -> None:
    starts = ".s-curves .chart .series[data-start]"
    for axes in ("x=linear&y=linear", "x=log&y=log"):
        page.write_text(page.read_text(encoding="utf-8") + " ", encoding="utf-8")
        chromium.open(page.rename(page.with_name(f"{axes}.html")), anchor=f"#curves~{axes}")
        page = page.with_name(f"{axes}.html")
        assert chromium.read(f"document.querySelectorAll({json.dumps(starts)}).length") > 0
        assert set(chromium.read(FRAMES)) == {True}
    assert chromium.complaints == []


def test_a_view_that_is_sent_is_shown_though_the_page_is_open(chromium, page) -> None:
    chromium.open(page)
    chromium.read("location.hash = '#curves~filter=strong'")
    while chromium._next().get("method") != "Page.loadEventFired":
        pass
    status = "document.querySelector('#table [role=status]').textContent"
    assert chromium.read("location.hash") == "#curves~filter=strong"
    assert chromium.read(status) == "3 of 8 rows shown"


def test_the_target_of_an_address_is_shown_though_filtered_out_or_folded(chromium, page) -> None:
    chromium.open(page, anchor="#method-step-time~filter=strong")
    top = "document.getElementById({}).getBoundingClientRect().top"
    shown = "document.getElementById({}).checkVisibility()"
    step_time = json.dumps("method-step-time")
    assert chromium.read(shown.format(step_time)) is True
    assert 0 <= chromium.read(top.format(step_time)) <= 900
    weak = json.dumps(chromium.read("document.querySelector('#table tbody tr[hidden]').id"))
    assert chromium.read(shown.format(weak)) is False
    # `hashchange` is a task of its own: what it does is waited for.
    chromium.read(
        f"new Promise((done) => {{ addEventListener('hashchange', done); location.hash = {weak}; }})"
        ".then(() => null)"
    )
    assert chromium.read(shown.format(weak)) is True
    assert 0 <= chromium.read(top.format(weak)) <= 900
    assert chromium.read("location.hash").endswith("~filter=strong")
    assert chromium.read("document.querySelector('#table [role=status]').textContent") == "4 of 8 rows shown"


def test_the_first_tab_stop_leads_past_the_navigation(chromium, page) -> None:
    chromium.open(page)
    chromium.press("Tab")
    assert chromium.read("document.activeElement.className") == "skip"
    assert chromium.read("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Enter")
    assert chromium.read("document.activeElement.id") == "main"


TARGETS = """[...document.querySelectorAll("main :is(a[href], button, summary), nav a")].filter((one) => {
  const [box, style] = [one.getBoundingClientRect(), getComputedStyle(one)];
  const inline = style.display === "inline" || one.closest("svg, td, figcaption, li, p, dd");
  return box.width && !inline && (box.width < 23.9 || box.height < 23.9);
}).map((one) => one.outerHTML.slice(0, 90))"""
"""Controls smaller than 24 pixels (WCAG 2.5.8), without links in text and points of drawings, whose values
are in the table below them. The axe-core of the package has no such rule."""


def test_what_is_clicked_is_large_enough(chromium, page) -> None:
    for width in (1440, 390):
        chromium.open(page, width=width)
        chromium.read("document.querySelector('#table').scrollIntoView()")
        assert chromium.read(TARGETS) == []


def axe(browser: Browser, options: str) -> list[dict[str, Any]]:
    """Return the violations that axe-core finds on the open page."""
    spec = importlib.util.find_spec("axe_core_python")
    browser.read((Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8"))
    return browser.read(f"axe.run({options}).then((result) => result.violations)")


@pytest.mark.parametrize(
    ("width", "dark", "rules"),
    [
        (1280, False, "{rules: {'label-content-name-mismatch': {enabled: true}}}"),
        (1280, True, "{runOnly: ['color-contrast']}"),
        (390, False, "{rules: {'color-contrast': {enabled: false}}}"),
    ],
)
def test_axe_finds_nothing(chromium, page, width, dark, rules) -> None:
    chromium.open(page, width=width, dark=dark)
    violations = axe(chromium, f"document, {rules}")
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in violations] == []


def test_axe_is_heard(chromium, page) -> None:
    # So that the test above is known to be able to fail.
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", "<input></main>"), encoding="utf-8")
    chromium.open(page)
    assert [one["impact"] for one in axe(chromium, "{runOnly: ['label']}")] == ["critical"]


WORDS = "document.body.innerText.split(/\\s+/).filter(Boolean).length"
"""The words that are seen: those of what is folded are not."""


def test_85_cells_to_256_gpus_fit_eight_screens_and_5_000_words(chromium, tmp_path) -> None:
    study = large_study()
    assert len(study.pools) == 85
    html = render_figures(study)
    # Aim of the page: 1.5 MB.
    assert len(html.encode()) < 1_500_000
    path = tmp_path / "large.html"
    path.write_text(html, encoding="utf-8")
    chromium.open(path, width=1440)
    assert chromium.complaints == []
    assert chromium.read("document.documentElement.scrollHeight") <= 8 * 900
    assert chromium.read(WORDS) <= 5_000
    # The first screen: the answers, the command, the drawing and what belongs to it.
    foot = "document.querySelector('#summary {}').getBoundingClientRect().bottom"
    for part in (".answers", ".tiles", ".command", ".beside svg", ".points"):
        assert chromium.read(foot.format(part)) <= 900, part
    # Until all is laid out, and until a click has sorted: seconds that a busy machine has to spare as well.
    assert chromium.read("performance.timing.loadEventEnd - performance.timing.navigationStart") < 6000
    started = time.monotonic()
    click(chromium, "step time, ms")
    assert time.monotonic() - started < 3
    chromium.resize(390)
    assert chromium.read("document.documentElement.scrollWidth") <= 390


def test_the_next_command_is_on_the_first_screen_of_a_study_in_trouble_too(chromium, tmp_path) -> None:
    trouble = Trouble(disturbed=0.3, failed=0.12, dirty=True)
    path = tmp_path / "trouble.html"
    path.write_text(render_figures(large_study(seed=7, trouble=trouble)), encoding="utf-8")
    chromium.open(path, width=1440)
    foot = "document.querySelector('#summary .command').getBoundingClientRect().bottom"
    assert chromium.read(foot) <= 900


def test_a_study_like_the_demo_fits_four_screens_and_2_500_words(chromium, new_study, tmp_path) -> None:
    """Two workloads alone and on two ranks of a CPU, weak and strong, what its plan skips and predicts, and
    some runs disturbed."""
    study = new_study(tmp_path / "demo")
    cells = [
        cell
        for workload in ("resnet18-32px", "gpt-nano")
        for kind, batch in (("weak", 8), ("strong", 32))
        for strategy, gpus in (("single", 1), ("ddp", 2))
        for cell in study.series(kind, strategy, [gpus], batch=batch, workload=workload)
    ]
    for kind, batch in (("weak", 8), ("strong", 32)):
        study.skip("single", 2, "single needs 1 rank; on more use ddp", batch=batch, kind=kind)
        study.skip("ddp", 1, "ddp needs at least 2 ranks; on 1 use single", batch=batch, kind=kind)
    study.plan(
        repeats=3,
        command=("matrix", "docs/studies/demo.yaml"),
        predicted_bytes={cell.id: 80 * 2**20 for cell in cells},
    )
    for cell in cells:
        busy = 0.4 if cell.workload == "gpt-nano" else 0.0
        pace = cell.batch_per_replica * (1.3 if cell.gpus > 1 else 1.0)
        own = [round(pace * 0.8e6)] * 8
        study.runs(
            cell,
            [pace, 1.02 * pace, 1.01 * pace],
            off_step_ns=lambda rank, own=own: own,
            input_ms=0.1,
            foreign_cpu_cores=busy,
        )
    path = tmp_path / "demo.html"
    path.write_text(study.page(), encoding="utf-8")
    chromium.open(path, width=1440)
    assert chromium.read("document.documentElement.scrollHeight") <= 4 * 900
    assert chromium.read(WORDS) <= 2_500
    line = "document.querySelector('#cost').getBoundingClientRect().height"
    assert chromium.read(line) <= 80, "without a price it is a line, not a section"
    assert "ranks on CPU share the cores of a machine" in chromium.read(
        "document.querySelector('.answers').textContent"
    )


def test_two_studies_of_85_cells_fit_ten_screens_with_what_is_folded_in_reach(chromium, tmp_path) -> None:
    studies = [replace(large_study(seed), name=name) for seed, name in ((16, "before"), (17, "after"))]
    path = tmp_path / "both.html"
    path.write_text(render_studies(studies), encoding="utf-8")
    chromium.open(path, width=1440)
    assert chromium.complaints == []
    assert chromium.read("document.documentElement.scrollHeight") <= 10 * 900
    seen = "document.getElementById('study-2-{}').checkVisibility()"
    assert chromium.read(seen.format("summary")) is True
    assert chromium.read(seen.format("best")) is False
    chromium.read("document.querySelector('nav a[href=\"#study-2-best\"]').click()")
    chromium.read("new Promise((done) => setTimeout(done))")
    assert chromium.read(seen.format("best")) is True
    assert 0 <= chromium.read("document.getElementById('study-2-best').getBoundingClientRect().top") <= 900
    chromium.open(path, width=390)
    assert chromium.read("document.documentElement.scrollWidth") <= 390


def test_the_page_of_a_running_study_becomes_the_finished_one_by_itself(chromium, small, tmp_path) -> None:
    """The file is replaced as `bench report --watch` does it; only the time between two looks is shorter."""
    page, figures = tmp_path / "running.html", small.analysed()
    cells = ({"cell": "a", "state": "running", "ok": "0", "planned": "3", "others": ""},)

    def write(state: str | None) -> None:
        running = () if state is None else ({**cells[0], "state": state},)
        html = render_figures(replace(figures, running=running))
        short = html.replace("EVERY_MS = 10000", "EVERY_MS = 100")
        for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL):
            other = script.replace("EVERY_MS = 10000", "EVERY_MS = 100")
            digests = [
                base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (script, other)
            ]
            short = short.replace(*digests)
        files.replace(page, short.encode())

    deadline = time.monotonic() + PATIENCE_S
    top = "document.querySelector('#curves').getBoundingClientRect().top"
    state = "document.querySelector('#running td:nth-child(2)')?.textContent"

    def waits_for(expression: str) -> None:
        while not chromium.read(f"document.readyState === 'complete' && Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def hold() -> float:
        """Select text, so that the page stays; returns when it was loaded, after three looks of it."""
        look = "new Promise((done) => setTimeout(() => done(!getSelection().isCollapsed), 350))"
        while True:
            assert time.monotonic() < deadline
            # A page that goes while it is asked gives no answer.
            with suppress(AssertionError):
                chromium.read("getSelection().selectAllChildren(document.querySelector('h1'))")
                if chromium.read(look):
                    return chromium.read("performance.timeOrigin")

    write("running")
    chromium.open(page, anchor="#outcomes")
    hold()
    chromium.read("document.querySelector('details').open = true")
    chromium.read("document.querySelector('#curves').scrollIntoView(); scrollBy(0, -40)")
    same = f"Math.abs({top} - {chromium.read(top)}) <= 1"
    write("waiting")
    chromium.read("getSelection().removeAllRanges()")
    waits_for(f"{state} === 'waiting' && {same} && document.querySelector('details').open")
    loaded = hold()
    write(None)
    assert hold() == loaded
    assert chromium.read(state) == "waiting"
    chromium.read("getSelection().removeAllRanges()")
    waits_for(f"!document.querySelector('#running') && {same} && history.scrollRestoration === 'auto'")
    loaded = chromium.read("performance.timeOrigin")
    chromium.read("new Promise((done) => setTimeout(done, 350))")
    assert chromium.read("performance.timeOrigin") == loaded
    assert chromium.complaints == []
