"""The report in a real browser: no console error, nothing blocked, no sideways scrolling on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from reports.page.render import render
from results.outcome import Evidence

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
]
COMPLAINT = re.compile(r"CONSOLE|Refused to|Content Security Policy|net::ERR")


class Browser:
    """A headless browser with a profile of its own for each call."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.calls = 0

    def open(self, page: Path, *flags: str) -> tuple[str, list[str]]:
        """What it prints, and what it complains about."""
        self.calls += 1
        profile = self.folder / f"profile-{self.calls}"
        done = subprocess.run(
            [self.program, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if COMPLAINT.search(line)]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on the path (chromium, chromium-browser, google-chrome); install one")
    return Browser(program, tmp_path)


@pytest.fixture
def page(small, tmp_path: Path) -> Path:
    """The small study with an emulated size, as a file."""
    cell = small.series("weak", "ddp", [16], batch=8)[0]
    small.plan()
    small.runs(cell, [40.0], evidence=Evidence.EMULATED, exposed_ms=10.0, warnings=["on battery"])
    path = tmp_path / "report.html"
    path.write_text(render(small.study, small.study.collect()), encoding="utf-8")
    return path


def test_the_report_opens_without_a_complaint(browser: Browser, page: Path) -> None:
    dom, complaints = browser.open(page, "--dump-dom")
    assert complaints == []
    assert '<section id="method">' in dom


def test_a_page_that_breaks_its_policy_is_noticed(browser: Browser, page: Path) -> None:
    # So that the test above is known to be able to fail.
    broken = page.with_name("broken.html")
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("</body>", "<script>alert(1)</script></body>"), encoding="utf-8")
    assert browser.open(broken, "--dump-dom")[1] != []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_is_painted_at_desktop_and_phone_width(browser: Browser, page: Path, width: int) -> None:
    picture = page.with_name(f"report-{width}.png")
    _, complaints = browser.open(page, f"--window-size={width},2400", f"--screenshot={picture}")
    assert complaints == []
    with Image.open(picture) as image:
        assert image.size == (width, 2400)
        # Ink, paper and the colours of the curves: far more than an empty page has.
        colours = image.convert("RGB").getcolors(maxcolors=2400 * width)
        assert colours is not None
        assert len(colours) > 200


def test_on_a_phone_only_tables_scroll_sideways(browser: Browser, page: Path) -> None:
    # The page's policy forbids scripts: a copy without the policy measures itself.
    measured = page.with_name("measured.html")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    script = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    measured.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    dom, _ = browser.open(measured, "--window-size=390,844", "--dump-dom")
    title = re.search(r"<title>(\d+) of (\d+)</title>", dom)
    assert title is not None
    assert int(title[1]) <= int(title[2])
