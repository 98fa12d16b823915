"""Look at a run's page in headless Chromium, and compare its numbers with the JSON beside it.

    python tools/check_page.py RUN_DIR [--shots FOLDER]

At 400 and 1,400 pixels, light and dark: nothing may be wider than the screen, and no text of a plot may be cut. Every
number in a table, in the box above and in a heading of a figure must be one of run.json's, as far as it is shown.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS, SCHEMES = (400, 1400), {"light": 1, "dark": 0}
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
MEASURE = """<script>
const wide = [...document.querySelectorAll('svg, img, p, li, dl, h1, h2, figure')].filter(
  one => !one.closest('.scroll') && one.getBoundingClientRect().right > window.innerWidth + 0.5);
const seen = [...document.querySelectorAll('.plot svg')].filter(one => one.getBoundingClientRect().width > 0);
const cut = seen.filter(one => { const box = one.getBoundingClientRect();
  return [...one.querySelectorAll('text')].some(text => { const own = text.getBoundingClientRect();
    return own.left < box.left - 2 || own.right > box.right + 2; }); });
parent.postMessage(JSON.stringify({page: document.documentElement.scrollWidth, screen: window.innerWidth,
  wide: wide.length, figures: seen.length, cut: cut.map(one => one.getAttribute('aria-label')),
  colour: getComputedStyle(document.body).backgroundColor}), '*');
</script></body>"""
FRAME = """<title>nothing</title><script>onmessage = told => { document.title = told.data; };</script>
<iframe src="measured.html" style="border: 0" width="WIDTH" height="HEIGHT"></iframe>"""  # windows have 500 or more
# A hash such as 7e065091554 is no number, nor is the beginning of 7b3f.
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*+(?:\.\d++)?+(?:e[-+]?\d{1,3})?+(?!\w)%?")


def look(page: Path, width: int, scheme: str, shot: Path | None = None) -> dict[str, Any]:
    """What the page measures in a window of a width; `shot` is where a picture of it goes."""
    if CHROMIUM is None:
        raise SystemExit("There is no Chromium here: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
        (folder / "measured.html").write_text(text.replace("</body>", MEASURE), "utf-8")
        high = "900" if shot is None else "9000"
        (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", high))
        options = [
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size=1500,{high}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--virtual-time-budget=5000",
            *([] if shot is None else [f"--screenshot={shot.resolve()}"]),
        ]
        command = [CHROMIUM, *FLAGS, *options, "--dump-dom", f"file://{folder / 'frame.html'}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    if title is None:
        raise SystemExit("The page could not be measured.")
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found


def complaints(found: dict[str, Any], width: int) -> list[str]:
    """What is wrong with a page that was measured."""
    wrong = []
    if found["screen"] != width or found["page"] > width:
        wrong.append(f"the page is {found['page']} pixels wide")
    if found["wide"]:
        wrong.append(f"{found['wide']} parts overflow")
    return [*wrong, *(f"cut: {name}" for name in found["cut"])]


class Cells(HTMLParser):
    """The tables of a page by their titles, and what stands in the box above."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.box = self.title = ""
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        if tag == "div" and kind.startswith("banner"):
            self._in = "box"
        elif tag == "figcaption":
            self._in, self.title = "title", ""
        elif tag == "tr":
            self.tables.setdefault(self.title, []).append([])
        elif tag in ("td", "th"):
            self._in = "cell"
            self.tables[self.title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("div", "figcaption", "td", "th"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "box":
            self.box += data
        elif self._in == "title":
            self.title += data
        elif self._in == "cell":
            self.tables[self.title][-1][-1] += data


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value, those in its texts included."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(key)
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, str):
        yield from (worth(found)[0] for found in NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def worth(text: str) -> tuple[float, float]:
    """A number as it is shown, and what its last digit stands for."""
    plain = text.replace(",", "").replace("−", "-")
    scale = 0.01 if plain.endswith("%") else 1.0
    plain = plain.rstrip("%")
    digits, _, power = plain.partition("e")
    places = len(digits.partition(".")[2])
    return float(plain) * scale, scale * float(f"1e{int(power or 0) - places}")


def unknown(page: Path, facts: dict[str, Any]) -> list[str]:
    """The numbers of a page's tables and box that are none of the JSON's, rounded to what is shown."""
    cells = Cells()
    cells.feed(page.read_text("utf-8"))
    known = sorted({*numbers(facts), 50.0, 100.0})  # the box compares with a coin toss: 50 times out of 100
    texts = [cell for table in cells.tables.values() for row in table for cell in row]
    wrong = []
    for text in [*texts, cells.box]:
        for shown in NUMBER.findall(text):
            value, digit = worth(shown)
            if not any(abs(value - each) <= digit * (1 + 1e-9) for each in known):
                wrong.append(f"{shown} in {text.strip()[:60]!r}")
    return wrong


def main() -> int:
    """Check one run; the exit code says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--shots", type=Path)
    settings = parser.parse_args()
    page, wrong = settings.run / "report.html", 0
    for width in WIDTHS:
        for scheme in SCHEMES:
            shot = settings.shots and settings.shots / f"{width}-{scheme}.png"
            found = look(page, width, scheme, shot)
            said = complaints(found, width)
            wrong += len(said)
            print(f"{width} {scheme}, {found['figures']} plots: {'; '.join(said) or 'nothing overflows, none is cut'}")
    strangers = unknown(page, json.loads((settings.run / "run.json").read_text("utf-8")))
    print(f"numbers that are not in run.json: {'; '.join(strangers) or 'none'}")
    return int(bool(wrong or strangers))


if __name__ == "__main__":
    sys.exit(main())
