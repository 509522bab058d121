"""Pictures of a generated study's report for README and docs/report.md (`make gallery`)."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import click
from generated_study import Trouble, large_study
from PIL import Image, ImageChops

from reports.page.render import render_figures

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"
WIDTH, HEIGHT = 1100, 4000
"""Pixels of the browser's window; pictures are cut at their content and at `HIGHEST`."""
HIGHEST, OTHERS = 560, {"first": 700, "anatomy": 850}
"""The height of most pictures, and of those that need more."""
COLOURS = 48
ANCHORS = (
    "first",
    "best",
    "curves",
    "anatomy",
    "memory",
    "cost",
    "ranks",
    "outcomes",
    "table",
)
"""Sections in the order of the page; `first` is the page as it opens."""


@click.command()
@click.option("--program", default="chromium", show_default=True, help="The browser.")
def main(program: str) -> None:
    """Take a picture of each section of the generated study's report."""
    FOLDER.mkdir(exist_ok=True)
    page = render_figures(large_study(seed=7, trouble=Trouble(cluster=True)))
    with tempfile.TemporaryDirectory() as folder:
        for anchor in ANCHORS:
            alone = f"header, section:not(#{anchor}) {{ display: none !important }} body {{ padding: 8px }}"
            path = Path(folder) / f"{anchor}.html"
            style = "" if anchor == "first" else alone
            path.write_text(page.replace("</style>", f"{style}</style>", 1), encoding="utf-8")
            raw = path.with_suffix(".png")
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
            subprocess.run(
                [
                    *(program, *flags, f"--user-data-dir={folder}/profile"),
                    *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={raw}", path.as_uri()),
                ],
                check=True,
                stderr=subprocess.DEVNULL,
            )
            picture = Image.open(raw).convert("RGB")
            empty = Image.new("RGB", picture.size, picture.getpixel((0, HEIGHT - 1)))
            _, _, right, bottom = ImageChops.difference(picture, empty).getbbox()
            cut = picture.crop((0, 0, right + 8, min(bottom + 8, OTHERS.get(anchor, HIGHEST))))
            cut.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(FOLDER / f"{anchor}.png", optimize=True)
            print(FOLDER / f"{anchor}.png")


if __name__ == "__main__":
    main()
