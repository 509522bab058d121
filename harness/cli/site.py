"""`bench site`: a static folder with an index of studies and their pages."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="site")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path("runs"))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("public"),
    show_default=True,
    help="the folder to write it into",
)
@click.option(
    "--history",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="nights of bench history add; ./history if that is there and this is left out",
)
@click.option("--redact", is_flag=True, help="without nights, hosts, users, paths, addresses and device ids")
@click.option("--serve", is_flag=True, help="then serve it on 127.0.0.1 until Ctrl-C")
def site_command(folder: Path, output: Path, history: Path | None, *, redact: bool, serve: bool) -> int:
    """Write an index of the studies in FOLDER (default: runs), with their pages, as a static folder.

    The index has a row a study: its answer, what changed since the last study like it, and how many cells
    have no figure. The browser searches and sorts it, from a file or from any static host. Pages that this
    site has of unchanged studies are kept.
    """
    from harness.reporting.site import serve as serve_site
    from harness.reporting.site import write_site
    from harness.terminal.console import Console

    console = Console()
    default = Path("history")
    nights = history or (default if any(default.glob("*/*.json")) else None)
    console.result(f"site: {write_site(folder, output, console, history=nights, redact=redact)}")
    if serve:
        serve_site(output, console)
    return 0
