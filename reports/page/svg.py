"""Drawing as inline SVG: one look for all figures, the same bytes every time, colours left to the page.

matplotlib writes hexadecimal colours; they are replaced by the page's CSS variables, so that one drawing
serves light, dark and paper. Colours: Okabe & Ito, Color Universal Design (2008).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#1c2024"
MUTED = "#6b7480"
RULE = "#d8dde3"
PAPER = "#fdfdfc"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    PAPER: "paper",
    BLUE: "blue",
    VERMILLION: "vermillion",
    GREEN: "green",
    PURPLE: "purple",
    ORANGE: "orange",
    SKY: "sky",
}
# Any: the keys' type in matplotlib's own annotations is a list of literals that grows with each version.
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    # A dollar sign in a name is a dollar sign.
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A finished figure of the page."""

    title: str
    svg: Markup
    note: str = ""
    """What a reader must know beside the drawing; empty for nothing."""


@contextmanager
def axes(*, width: float, height: float) -> Iterator[Axes]:
    """Empty axes of a figure of so many inches, in the report's look."""
    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_visible(False)
        plain = figure.add_subplot()
        plain.patch.set_visible(False)
        yield plain


def inline(drawn: Axes, *, name: str, title: str, description: str) -> Markup:
    """The axes' figure as an `svg` element with a title for screen readers.

    `name` is unique on the page: it goes in front of every id inside. Call it inside `axes`.
    """
    figure = drawn.get_figure(root=True)
    assert figure is not None
    file = io.StringIO()
    # Not savefig: it draws everything twice. Any: the method has no annotations.
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    body = _body(file.getvalue(), name)
    width, height = figure.get_size_inches() * 72
    head = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{escape(title)}</title>\n'
        f'<desc id="{name}-description">{escape(description)}</desc>\n'
    )
    return Markup(head + body)


def _body(svg: str, name: str) -> str:
    """What is inside the `svg` element, with ids of its own and the page's colours."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    return re.sub(r"#[0-9a-f]{6}\b", _variable, body)


def _variable(colour: re.Match[str]) -> str:
    name = _VARIABLES.get(colour[0])
    return f"var(--{name})" if name else colour[0]
