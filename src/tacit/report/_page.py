"""One self-contained HTML page: style, tables and figures inside it, nothing fetched, light and dark."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tacit.report._tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The page can fetch nothing, whatever is written into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Picture:
    """A figure with what is written below it; ``alt`` is for people who do not see it (by default the caption)."""

    figure: Figure
    caption: str = ""
    alt: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page. In ``text`` an empty line ends a paragraph and lines that start with "- " are a list."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure | Picture] = ()
    folded: bool = False  # only its title shows until it is opened


@dataclass(frozen=True)
class Banner:
    """What stands above everything: the promise in plain words, in a few signs, in a formal sentence, with warnings."""

    promise: str
    sentence: str
    warnings: Sequence[str] = ()
    plain: Sequence[tuple[str, str]] = ()  # questions and their answers


def page(
    title: str, sections: Sequence[Section], *, lead: str = "", banner: Banner | None = None, footer: str = ""
) -> str:
    """The whole page as text."""
    counter = _Counter()
    body = "\n".join(_section(section, number, counter) for number, section in enumerate(sections, 1))
    style = Path(__file__).with_name("page.css").read_text("utf-8") + (_colours() if counter.figures else "")
    contents = ""
    if len(sections) > 3:
        links = "".join(
            f'<li><a href="#part-{number}">{html.escape(section.title)}</a></li>'
            for number, section in enumerate(sections, 1)
        )
        contents = f'<nav aria-label="Contents"><ol>{links}</ol></nav>'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{html.escape(title)}</h1>
{f'<div class="lead">{_text(lead)}</div>' if lead else ""}
{_banner(banner) if banner else ""}
{contents}
</header>
<main>
{body}
</main>
<footer>{_text(footer)}</footer>
</body>
</html>
"""


class _Counter:
    """Numbers figures, so that their ids differ."""

    figures = 0


def _section(section: Section, number: int, counter: _Counter) -> str:
    parts = [_text(section.text)]
    for one in section.figures:
        counter.figures += 1
        parts.append(_figure(one, f"figure{counter.figures}"))
    parts += [table.html() for table in section.tables]
    inside, title = "\n".join(part for part in parts if part), html.escape(section.title)
    if section.folded:
        return f'<details id="part-{number}"><summary><h2>{title}</h2></summary>\n{inside}\n</details>'
    return f'<section id="part-{number}">\n<h2>{title}</h2>\n{inside}\n</section>'


def _figure(given: Figure | Picture, name: str) -> str:
    from tacit.report import theme

    picture = given if isinstance(given, Picture) else Picture(given)
    alt = picture.alt or picture.caption
    wide, slim = theme.svg(picture.figure, name, alt), theme.svg(theme.narrow(picture.figure), f"{name}-narrow", alt)
    caption = f"<figcaption>{html.escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure class="plot"><div class="wide">{wide}</div><div class="narrow">{slim}</div>{caption}</figure>'


def _banner(banner: Banner) -> str:
    warnings = "".join(f"<strong>{html.escape(warning)}</strong>" for warning in banner.warnings)
    kind = "warned" if banner.warnings else "kept"
    plain = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in banner.plain)
    return (
        f'<div class="banner {kind}">'
        + (f'<dl class="plain">{plain}</dl>' if plain else "")
        + f'<p class="promise"><span>{html.escape(banner.promise)}</span>{warnings}</p>'
        f"<p>{html.escape(banner.sentence)}</p></div>"
    )


def _text(text: str) -> str:
    """Paragraphs and lists; everything in them is text."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if lines and all(line.startswith("- ") for line in lines):
            parts.append("<ul>" + "".join(f"<li>{html.escape(line[2:])}</li>" for line in lines) + "</ul>")
        elif lines:
            parts.append(f"<p>{html.escape(' '.join(lines))}</p>")
    return "\n".join(parts)


def _colours() -> str:
    from tacit.report import theme

    def block(colours: dict[str, str]) -> str:
        return ":root { " + " ".join(f"--{role}: {colour};" for role, colour in colours.items()) + " }"

    return f"{block(theme.ROLES)}\n@media (prefers-color-scheme: dark) {{ {block(theme.DARK)} }}\n"
