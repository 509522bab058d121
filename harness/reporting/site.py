"""Writing a site: a static folder with an index of studies, their pages, and the nights of a history."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path

from harness.reporting.studies import CostFlags, read_figures
from harness.terminal.console import Console
from reports.page.render import render_figures
from reports.page.site import NIGHTS, SiteStudy, site_index, site_nights
from results import files
from results.errors import BenchError, UsageError
from results.history import read_nights
from results.store import Study

_MANY = 10
"""Pages from which on processes that each import the renderer first are quicker than one."""
_DEPTH = 2
"""How far below the folder studies are looked for: `runs/NAME`, `runs/TEAM/NAME`."""


def write_site(folder: Path, target: Path, console: Console, *, history: Path | None, redact: bool) -> Path:
    """Write the site of the studies in `folder` into `target`, and return its index.

    A study that cannot be read is named in the index. Raises UsageError if the folder has no study.
    """
    roots = sorted(_studies(folder))
    if not roots:
        raise UsageError(f"{folder} has no study: give a folder that has studies of bench matrix, like runs")
    studies: list[SiteStudy] = []
    unreadable: dict[str, str] = {}
    to_render: list[SiteStudy] = []
    for root in roots:
        name = root.relative_to(folder).as_posix()
        try:
            [figures] = read_figures([str(root)], CostFlags(), console, redact=redact)
        except (BenchError, OSError) as error:
            unreadable[name] = str(error)
            console.warn(f"{root} is left out: {error}")
            continue
        one = SiteStudy(figures=replace(figures, name=name), page=f"studies/{name}.html")
        studies.append(one)
        if not redact and _is_current(root):
            files.replace(target / one.page, (root / "report.html").read_bytes())
        else:
            to_render.append(one)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        in_order = map if len(to_render) < _MANY else pool.map
        pages = in_order(render_figures, [one.figures for one in to_render])
        for one, page in zip(to_render, pages, strict=True):
            files.replace(target / one.page, page.encode())
    nights = None
    if history is not None and not redact:
        found, damaged = read_nights(history)
        for sentence in damaged:
            console.warn(sentence)
        nights = site_nights(found)
    if nights is not None:
        files.replace(target / NIGHTS, nights.encode())
    index = target / "index.html"
    files.replace(index, site_index(studies, unreadable, nights=nights is not None).encode())
    return index


def serve(target: Path, console: Console) -> None:
    """Serve the site on the loopback interface, on a free port, until interrupted."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(target))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        console.result(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C")
        server.serve_forever()


def _studies(folder: Path) -> Iterator[Path]:
    below = ["*/" * depth for depth in range(1, _DEPTH + 1)]
    yield from (path for pattern in below for path in folder.glob(pattern) if Study(path).plan_paths())


def _is_current(root: Path) -> bool:
    """Whether the page in the study is not older than its plans and the results derived from its runs.

    Results are derived only where the study may be written.
    """
    page = root / "report.html"
    if not page.is_file() or not os.access(root, os.W_OK):
        return False
    sources = [*Study(root).plan_paths(), *root.glob("cells/*/*/run.json")]
    return page.stat().st_mtime >= max(path.stat().st_mtime for path in sources)
