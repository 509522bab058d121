"""Writing a site: a static folder with an index of studies, their pages, and the nights of a history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from harness.features.review.index import NIGHTS, Failed, SiteStudy, answer_of, site_index, tried
from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.page.render import render_figures, render_sections
from results import files
from results.errors import UsageError
from results.features import hook
from results.store import Study
from results.version import VERSION

T = TypeVar("T")
_MANY = 10
"""Pages from which on processes that each import the renderer first are quicker than one."""
_MARK = ".bench-site"
"""File of a site that says what rendered its pages; pages of another version or redaction are not kept."""


def write_site(folder: Path, target: Path, console: Console, *, history: str | None, redact: bool) -> Path:
    """Write the site of the studies in `folder` into `target`, and return its index.

    A study that cannot be read is named in the index. Pages of unchanged studies are kept, pages of deleted
    studies are removed. Raises UsageError if the folder has no study.
    """
    roots = sorted(_studies(folder))
    if not roots:
        raise UsageError(f"{folder} has no study: give a folder that has studies of bench matrix, like runs")
    unreadable: dict[str, str] = {}

    def leave_out(root: Path, why: str) -> None:
        console.warn(f"{root} is left out: {why}")
        name = f"a study ({len(unreadable) + 1})" if redact else root.relative_to(folder).as_posix()
        unreadable[name] = "it cannot be read" if redact else why

    read = _each(
        roots, lambda root: read_figures([str(root)], CostFlags(), console, redact=redact)[0], leave_out
    )
    answers = _each(read, lambda root: answer_of(read[root]), leave_out)
    read = {root: read[root] for root in answers}
    if redact:
        # One redaction for all studies, so that a stand-in means the same thing in all of them.
        figures = read_figures([str(root) for root in read], CostFlags(), console, redact=True)
        read = dict(zip(read, figures, strict=True))
    mark = f"{VERSION} {'redacted' if redact else 'as it is'}"
    known = (target / _MARK).is_file() and files.read(target / _MARK).text == mark
    studies: dict[Path, SiteStudy] = {}
    to_render: list[Path] = []
    for number, (root, one) in enumerate(read.items(), 1):
        name = root.relative_to(folder).as_posix()
        # A folder may be named after a user.
        page = f"studies/{number}.html" if redact else f"studies/{name}.html"
        shown = one if redact else replace(one, name=name)
        studies[root] = SiteStudy(
            figures=shown, page=page, answer=answer_of(one) if redact else answers[root]
        )
        if redact or not known or not _is_current(target / page, root):
            to_render.append(root)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        in_order = map if len(to_render) < _MANY else pool.map
        pages = in_order(partial(tried, render_figures), [studies[root].figures for root in to_render])
        for root, text in zip(to_render, pages, strict=True):
            if isinstance(text, Failed):
                leave_out(root, text.why)
                del studies[root]
            else:
                files.replace(target / studies[root].page, text.encode())
    if (target / _MARK).is_file():
        _remove_others(target, {one.page for one in studies.values()})
    nights = None if history is None or redact else _nights(history, console)
    if nights is not None:
        files.replace(target / NIGHTS, nights.encode())
    index = target / "index.html"
    files.replace(index, site_index([*studies.values()], unreadable, nights=nights is not None).encode())
    files.replace(target / _MARK, mark.encode())
    return index


def _each(
    roots: Iterable[Path], make: Callable[[Path], T], leave_out: Callable[[Path, str], None]
) -> dict[Path, T]:
    """Make something of each study; those that fail are left out."""
    made = {}
    for root in roots:
        found = tried(make, root)
        if isinstance(found, Failed):
            leave_out(root, found.why)
        else:
            made[root] = found
    return made


def _nights(history: str, console: Console) -> str | None:
    section_of = hook("nights")
    section = None if section_of is None else section_of(Path(history), console)
    return None if section is None else render_sections("Nights", [section])


def _remove_others(target: Path, pages: Set[str]) -> None:
    """Remove the pages of an earlier site that this one does not have."""
    for path in (*(target / "studies").rglob("*.html"), target / NIGHTS):
        if path.relative_to(target).as_posix() not in pages:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()


def serve(target: Path, console: Console) -> None:
    """Serve the site on the loopback interface, on a free port, until interrupted."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(target))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        console.result(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C")
        server.serve_forever()


def _studies(folder: Path) -> Iterator[Path]:
    """The studies below a folder; nothing inside of a study is one."""
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            if Study(path).is_there:
                yield path
            elif not path.is_symlink():
                yield from _studies(path)


def _is_current(page: Path, root: Path) -> bool:
    """Whether a page is not older than its study: its JSON files, its review, and the results of its runs.

    Results are derived only where the study may be written.
    """
    if not page.is_file() or not os.access(root, os.W_OK):
        return False
    # Reading a study writes its index.jsonl anew.
    sources = (*root.glob("*.json"), *root.glob("review.jsonl"), *root.glob("cells/*/*/run.json"))
    return page.stat().st_mtime >= max((path.stat().st_mtime for path in sources), default=0.0)
