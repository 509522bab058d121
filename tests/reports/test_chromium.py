"""The report in a real browser: no console error, sorting, filtering, paper, phone, dark, without scripts."""

from __future__ import annotations

import base64
import csv
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
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from reports.page.render import render
from results.budget import RankColumns
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
PATIENCE_S = 60
A4_LANDSCAPE = (1032, 703)
"""Pixels (96 an inch) inside of the margins of 12 mm."""
A3_WIDTH = 1497
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
        """What the browser answers; complaints that it sends meanwhile are kept."""
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

    def open(self, page: Path, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.complaints.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.resize(width)
        self.call("Page.navigate", url=page.as_uri())
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

    def picture(self, *, whole: bool = False) -> Image.Image:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data)))

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
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
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
def page(request: pytest.FixtureRequest, kept: dict[str, str], tmp_path: Path) -> Path:
    """The small study with an emulated size and a hostile name, as a file of the test's own."""
    if not kept:
        kept["page"] = _page(request.getfixturevalue("small"))
    path = tmp_path / "report.html"
    path.write_text(kept["page"], encoding="utf-8")
    return path


def _page(small) -> str:
    cell = small.series("weak", "ddp", [16], batch=8)[0]
    hostile = small.series("weak", "ddp", [2], batch=8, workload=HOSTILE)[0]
    small.plan()
    small.runs(cell, [40.0], evidence=Evidence.EMULATED, exposed_ms=10.0, warnings=["on battery"])
    small.runs(hostile, [1300.0])
    return render(small.study, small.study.collect())


def column(browser: Browser, title: str, table: str = FULL) -> list[str]:
    """What the rows that are shown have under a heading, from the top."""
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
    """Click the heading of the full table; what it then says of its order."""
    return browser.read(
        f"""(() => {{
          const heads = [...{FULL}.tHead.rows[0].cells];
          const head = heads.find((one) => one.dataset.title === {json.dumps(title)});
          head.querySelector("button").click();
          return head.ariaSort;
        }})()"""
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_opens_without_a_complaint(chromium: Browser, page: Path, dark: bool) -> None:
    chromium.open(page, dark=dark)
    assert chromium.complaints == []
    assert chromium.read("document.querySelectorAll('section').length") > 8
    paper = chromium.read("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 27)" if dark else "rgb(253, 253, 252)")


@pytest.mark.parametrize("foreign", ["<script>alert(1)</script>", "<img src='https://example.org/x.png'>"])
def test_a_page_that_breaks_its_policy_is_noticed(chromium: Browser, page: Path, foreign: str) -> None:
    # So that the test above is known to be able to fail.
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{foreign}</body>"), encoding="utf-8")
    chromium.open(page)
    assert any("Content Security Policy" in complaint for complaint in chromium.complaints)


def test_a_click_on_a_heading_sorts_by_the_number_and_not_by_its_text(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    before = column(chromium, "step time")
    assert "1.30 s" in before
    assert click(chromium, "step time") == "ascending"
    # Weak: 10, 12.5, 16, 40 (emulated); strong: 40, 25; the hostile one 1300; the one without figures last.
    sizes = ["10.0 ms", "12.5 ms", "16.0 ms", "25.0 ms", "40.0 ms", "40.0 ms", "1.30 s", "-"]
    assert column(chromium, "step time") == sizes
    assert click(chromium, "step time") == "descending"
    assert column(chromium, "step time") == [*reversed(sizes[:-1]), "-"]
    assert click(chromium, "step time") is None
    assert column(chromium, "step time") == before


def test_one_column_is_sorted_at_a_time_and_words_by_their_letters(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    click(chromium, "step time")
    click(chromium, "outcome")
    assert column(chromium, "outcome") == ["ok"] * 7 + ["out of memory"]
    assert chromium.read(f"{FULL}.querySelectorAll('[aria-sort]').length") == 1


def test_every_table_is_sorted_by_the_keyboard_too(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.read("document.querySelector('#headline th:nth-child(3) button').focus()")
    chromium.press("Enter")
    chromium.press("Enter")
    headline = "document.querySelector('#headline table')"
    assert column(chromium, "ranks (CPU)", headline) == ["16", "4", "4", "2", "2", "2", "1", "1"]
    assert chromium.read("[...document.querySelectorAll('#method, #environment')].length") == 2


def test_the_filter_wants_all_words_and_says_how_many_rows_are_left(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    status = "document.querySelector('#table [role=status]').textContent"
    assert chromium.read(status) == "8 of 8 rows shown"
    write = "(() => {{ const box = document.querySelector('#table input'); box.value = {}; "
    write += "box.dispatchEvent(new Event('input')); }})()"
    chromium.read(write.format("'DDP weak'"))
    assert column(chromium, "ranks (CPU)") == ["2", "4", "8", "16", "2"]
    assert chromium.read(status) == "5 of 8 rows shown"
    chromium.read(write.format("'weak nothing'"))
    assert column(chromium, "strategy") == []
    chromium.read(write.format("''"))
    assert len(column(chromium, "strategy")) == 8


def test_copy_gives_the_rows_shown_apart_by_tabs_and_no_formula(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.read("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }")
    chromium.read("document.querySelector('#table input').value = 'calc'")
    chromium.read("document.querySelector('#table input').dispatchEvent(new Event('input'))")
    chromium.read(
        "[...document.querySelectorAll('#table .tools button')].find((b) => b.textContent === 'Copy').click()"
    )
    rows = [line.split("\t") for line in chromium.read("copied").split("\n")]
    assert len(rows) == 2
    row = dict(zip(*rows, strict=True))
    assert row["workload"] == f"'{HOSTILE}"
    assert row["step time"] == "1.30 s"
    assert row["exposed"] == ""


def test_download_gives_the_rows_shown_as_csv(chromium: Browser, page: Path, tmp_path: Path) -> None:
    chromium.open(page)
    folder = tmp_path / "downloads"
    chromium.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    click(chromium, "step time")
    button = "[...document.querySelectorAll('#table .tools button')].at(-1)"
    assert chromium.read(f"{button}.textContent") == "Download CSV"
    chromium.read(f"{button}.click()")
    file = folder / "table.csv"
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    assert [row["step time"] for row in rows][:2] == ["10.0 ms", "12.5 ms"]
    assert rows[-2]["workload"] == f"'{HOSTILE}"
    assert rows[-1]["reason"] == "rank 0: allocating 2 GiB"
    assert chromium.complaints == []


def test_without_scripts_every_row_is_there_and_no_control_that_does_nothing(
    chromium: Browser, page: Path
) -> None:
    chromium.open(page, scripts=False)
    assert chromium.complaints == []
    texts = chromium.call("DOMSnapshot.captureSnapshot", computedStyles=[])["strings"]
    assert "1.30 s" in texts
    assert "Download CSV" not in texts
    # With scripts off, no expression is read either: the document is asked for its nodes.
    root = chromium.call("DOM.getDocument")["root"]["nodeId"]
    rows = chromium.call("DOM.querySelectorAll", nodeId=root, selector="#table tbody tr:not([hidden])")
    controls = chromium.call("DOM.querySelectorAll", nodeId=root, selector="button, input")
    assert len(rows["nodeIds"]) == 8
    assert controls["nodeIds"] == []


def test_on_a_phone_only_tables_scroll_sideways(chromium: Browser, page: Path) -> None:
    chromium.open(page, width=390)
    assert chromium.read("document.documentElement.scrollWidth") <= 390
    wide = """[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, svg, .unseen')
        && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 90))"""
    assert chromium.read(wide) == []


HEADLINE = "document.querySelector('#headline .scroll')"


def test_the_headline_fits_a_common_screen(chromium: Browser, page: Path) -> None:
    # Of longer names than the small study has.
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<span>ddp</span>", "<span>scratch-ddp</span> <span>+ powersgd:4</span>"))
    chromium.open(page, width=1280)
    chromium.read("document.querySelector('#headline td.long').parentNode.remove()")
    for width in (1280, 1400):
        chromium.resize(width)
        assert chromium.read(f"{HEADLINE}.scrollWidth") <= chromium.read(f"{HEADLINE}.clientWidth")


def test_a_phone_shows_a_number_of_the_headline_and_shades_the_edge(chromium: Browser, page: Path) -> None:
    chromium.open(page, width=390)
    place = f"[...{HEADLINE}.querySelectorAll('th')].findIndex((one) => one.dataset.title === 'step time')"
    right = f"{HEADLINE}.querySelector('tbody tr').cells[{place}].getBoundingClientRect().right"
    assert chromium.read(f"{HEADLINE}.scrollWidth > {HEADLINE}.clientWidth")
    assert chromium.read(right) <= 390
    assert (
        chromium.read(f"getComputedStyle({HEADLINE}).backgroundAttachment") == "local, local, scroll, scroll"
    )
    # The workload is said above the strategy, which stays where it is.
    strategy = f"{HEADLINE}.querySelector('td[data-above=gpt-nano]')"
    assert chromium.read(f"getComputedStyle({strategy}, '::before').content") == '"gpt-nano"'
    assert chromium.read(f"{HEADLINE}.querySelector('tbody td').offsetWidth") == 0
    left = f"{strategy}.getBoundingClientRect().left"
    before = chromium.read(left)
    assert chromium.read(f"{HEADLINE}.scrollLeft = 200, {left}") == before


def test_headings_stay_with_their_drawings_on_paper(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    before = """[...document.querySelectorAll('.drawings')].map((one) =>
        getComputedStyle(one.previousElementSibling).breakAfter + ' ' + getComputedStyle(one).display)"""
    assert set(chromium.read(before)) == {"avoid block"}
    after = "[...document.querySelectorAll('h2 + p')].map((one) => getComputedStyle(one).breakAfter)"
    assert set(chromium.read(after)) == {"avoid"}


def test_nothing_is_cut_on_paper(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    chromium.resize(A4_LANDSCAPE[0])
    # A page that is too wide would be made smaller as a whole, or cut. The full table has larger sheets.
    wide = "document.documentElement.scrollWidth"
    assert chromium.read(f"document.querySelector('#table').hidden = true, {wide}") <= A4_LANDSCAPE[0]
    tallest = "Math.max(...[...document.querySelectorAll('figure')].map((one) => one.offsetHeight))"
    assert 50 < chromium.read(tallest) <= A4_LANDSCAPE[1]
    breaks = "[...document.querySelectorAll('figure')].map((one) => getComputedStyle(one).breakInside)"
    assert set(chromium.read(breaks)) == {"avoid"}
    chromium.read("document.querySelector('#table').hidden = false")
    chromium.resize(A3_WIDTH)
    assert chromium.read(wide) <= A3_WIDTH
    data = base64.b64decode(
        chromium.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
    )
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 4 <= pages <= 40
    width, height = map(float, re.search(rb"/MediaBox\s*\[0 0 (\S+) (\S+)\]", data).groups())
    assert width > height


def test_the_heads_of_a_sortable_table_are_repeated_on_the_next_sheet(chromium: Browser, page: Path) -> None:
    # Chromium does not repeat a head with a button that is a box of its own.
    chromium.open(page)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    shown = "getComputedStyle(document.querySelector('#headline button')).display"
    assert chromium.read(shown) == "contents"


def test_what_is_folded_is_open_on_paper_and_folded_again(chromium: Browser, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folded = "<details id='planted'><summary>more</summary><p>inside</p></details></main>"
    page.write_text(text.replace("</main>", folded), encoding="utf-8")
    chromium.open(page)
    state = "document.querySelector('#planted').open"
    assert chromium.read(f"dispatchEvent(new Event('beforeprint')), {state}") is True
    assert chromium.read(f"dispatchEvent(new Event('afterprint')), {state}") is False


def test_the_first_tab_stop_leads_past_the_navigation(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.press("Tab")
    assert chromium.read("document.activeElement.className") == "skip"
    assert chromium.read("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Enter")
    assert chromium.read("document.activeElement.id") == "main"


def axe(browser: Browser, options: str) -> list[dict[str, Any]]:
    """What axe-core has against the page that is open."""
    spec = importlib.util.find_spec("axe_core_python")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    browser.read((Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8"))
    return browser.read(f"axe.run({options}).then((result) => result.violations)")


@pytest.mark.parametrize(
    ("width", "dark", "rules"),
    [
        (1280, False, "{}"),
        (1280, True, "{runOnly: ['color-contrast']}"),
        (390, False, "{rules: {'color-contrast': {enabled: false}}}"),
    ],
)
def test_axe_finds_nothing_serious(chromium: Browser, page: Path, width: int, dark: bool, rules: str) -> None:
    chromium.open(page, width=width, dark=dark)
    # What is inside of a drawing is one picture to a screen reader, by its title.
    violations = axe(chromium, f"{{exclude: ['svg *']}}, {rules}")
    serious = [one for one in violations if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in serious] == []


def test_axe_is_heard(chromium: Browser, page: Path) -> None:
    # So that the test above is known to be able to fail.
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", "<input></main>"), encoding="utf-8")
    chromium.open(page)
    assert [one["impact"] for one in axe(chromium, "{runOnly: ['label']}")] == ["critical"]


def test_a_hundred_cells_of_256_ranks_are_quick_and_small(
    chromium: Browser, new_study, tmp_path: Path
) -> None:
    study = new_study(tmp_path / "large")
    strategies = ["ddp", *(f"ddp:bucket_mb={size}" for size in range(1, 25))]
    cells = [cell for name in strategies for cell in study.series("weak", name, [2, 4, 8, 256], batch=8)]
    plan = study.plan(repeats=3)
    study.runs(cells[0], [10.0], exposed_ms=2.0)
    (one,) = study.study.collect()
    ranks = RankColumns(
        node=[rank // 8 for rank in range(256)],
        compute_ns=[9_000_000 + 1_000 * rank for rank in range(256)],
        compute_sd_ns=[50_000] * 256,
        slowest_share=[1 / 256] * 256,
        wait_ns=[500_000] * 256,
        steps=40,
    )
    results = [
        msgspec.structs.replace(one, cell_id=cell.id, run_id=f"run-{cell.id}-{repeat}", ranks=ranks)
        for cell in plan.cells
        for repeat in range(3)
    ]
    html = render(study.study, results)
    assert len(plan.cells) == 100
    assert len(html.encode()) < 5_000_000
    path = tmp_path / "large.html"
    path.write_text(html, encoding="utf-8")
    chromium.open(path)
    assert chromium.complaints == []
    # Until all is laid out, and until a click has sorted: seconds that a busy machine has to spare as well.
    assert chromium.read("performance.timing.loadEventEnd - performance.timing.navigationStart") < 6000
    started = time.monotonic()
    click(chromium, "step time")
    assert time.monotonic() - started < 3
    assert chromium.read("document.querySelectorAll('*').length") < 60_000
