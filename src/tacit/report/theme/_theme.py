"""How figures look, and how they get into a page.

A figure is drawn in fixed colours. In a page its SVG is part of the document and these colours become CSS variables,
so that one figure serves light and dark; its text stays text, in the page's own font.
"""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WIDTH = 9.0  # inches: 900 pixels in a page, with text of about 13 pixels
INK, MUTED, FAINT, GRID, PAPER = "#22252b", "#676c75", "#b9bec6", "#e3e6ea", "#fefefe"
# After Okabe and Ito (2008): distinguishable with every kind of colour vision; the marks differ as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5559b", "#e69f00", "#56a4d9", "#7a5c2e")
MARKS = ("o", "s", "D", "^", "v", "P", "X")

# The same colours on a dark page, in the order of ROLES.
ROLES = {"ink": INK, "muted": MUTED, "faint": FAINT, "grid": GRID, "paper": PAPER} | {
    f"series-{place}": colour for place, colour in enumerate(COLOURS, 1)
}
DARK = {
    "ink": "#e8eaed",
    "muted": "#a3a9b3",
    "faint": "#5b616b",
    "grid": "#30343b",
    "paper": "#16181c",
    "series-1": "#58b0ea",
    "series-2": "#ff8f4d",
    "series-3": "#35c79b",
    "series-4": "#e08fc8",
    "series-5": "#f3bd45",
    "series-6": "#9cd0f5",
    "series-7": "#c9a56b",
}

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a $ in somebody's name is a $
    "axes.labelcolor": MUTED,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "auto",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def styled() -> Any:
    """The style, for as long as a figure is drawn or written: matplotlib's own settings stay as they were."""
    return style.context(["default", _STYLE])


def figure(width: float, height: float) -> Figure:
    """An empty figure that pyplot does not know of."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def mark(place: int) -> str:
    return MARKS[(place + place // len(COLOURS)) % len(MARKS)]


def end_labels(axes: Axes, labels: list[tuple[float, str, str]], size: float = 9.0) -> None:
    """Name each line at its right end (height, text, colour), moved apart where they would overlap."""
    low, high = axes.get_ylim()
    owner = axes.get_figure()
    if not isinstance(owner, Figure):
        raise TypeError("These axes are not in a figure of their own.")
    gap = size * 1.35 / (owner.get_figheight() * 72 * 0.78)  # of the axes' height
    places = sorted((((y - low) / (high - low), text, tint) for y, text, tint in labels), key=lambda label: label[0])
    spread = [place for place, _, _ in places]
    for _ in range(200):
        moved = False
        for i in range(len(spread) - 1):
            short = gap - (spread[i + 1] - spread[i])
            if short > 1e-6:
                spread[i], spread[i + 1], moved = spread[i] - short / 2, spread[i + 1] + short / 2, True
        if not moved:
            break
    for (place, text, tint), height in zip(places, spread, strict=True):
        if abs(place - height) > 1e-3:
            axes.plot([1.005, 1.02], [place, height], color=tint, lw=0.8, transform=axes.transAxes, clip_on=False)
        axes.text(1.027, height, text, color=tint, size=size, va="center", transform=axes.transAxes)


def svg(figure: Figure, name: str = "figure", alt: str = "") -> str:
    """A figure as an ``<svg>`` element for a page; ``name`` keeps its ids apart from those of other figures."""
    buffer = io.StringIO()
    with styled(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.S)
    text = re.sub(r'(\bid="|url\(#|href="#)', lambda found: f"{found[0]}{name}-", text)
    for role, colour in ROLES.items():
        text = text.replace(colour, f"var(--{role}, {colour})")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    if size is None:
        raise ValueError("This version of matplotlib writes pictures without a viewBox.")
    label = f' role="img" aria-label="{html.escape(alt)}"' if alt else ""
    width = round(100 * figure.get_figwidth())  # pixels at which its text has the size of the page's
    head = f'<svg viewBox="0 0 {size[1]} {size[2]}" style="max-width: {width}px" xmlns="http://www.w3.org/2000/svg"'
    return f'{head} xmlns:xlink="http://www.w3.org/1999/xlink"{label}' + text[text.index(">") :]


def png(figure: Figure, dpi: float = 200) -> bytes:
    """A figure as a PNG picture on white."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()
