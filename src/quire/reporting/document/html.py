"""A document as one HTML file, which loads nothing.

    <style>   assets/theme.css, uplot.css, document.css
    <body>    text, tables, and every chart as a still picture (`svg`), readable and printable without scripts
    <script type="application/json">     the same charts and films as numbers
    <script>  uplot.js; then the modules of this folder, joined: they replace each still picture by a live plot

The policy in its head allows only these two scripts, by their hashes, and no loading. So a document is harmless even if
a bug let a name pass as markup. All text passes through `escape`; the numbers are JSON without a "<", so no name can
end their script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from quire.assets import ASSETS_FOLDER
from quire.reporting.document.content import Chart, Document, Film, Section, Table
from quire.reporting.document.svg import chart_svg
from quire.reporting.document.theme import colour_names

MODULES = ("format.mjs", "theme.mjs", "charts.mjs", "film.mjs", "main.mjs")
"""The modules, in the order of their imports."""
MIN_SECTIONS_LISTED, MANY_CHARTS, LONG_CELL = 4, 4, 40
_FOLDER = Path(__file__).parent
_CODE = re.compile(r"`([^`]+)`")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[\w.]+";\n', re.MULTILINE)


def document_html(document: Document) -> str:
    """Return a document as HTML. Equal documents give equal text. Does not mutate."""
    parts = [part for section in document.sections for part in section.parts]
    charts = [_chart_data(part) for part in parts if isinstance(part, Chart)]
    content = {"charts": charts, "films": [_film_data(part) for part in parts if isinstance(part, Film)]}
    plots, own = (ASSETS_FOLDER / "uplot.js").read_text(encoding="utf-8"), joined_modules()
    return _template("document.html").substitute(
        policy=_policy(plots, own),
        title=escape(document.title),
        style=_style(),
        head=_head(document),
        sections="\n".join(_section(number, section) for number, section in enumerate(document.sections)),
        content=safe_json(content),
        plots=plots,
        modules=own,
    )


def joined_modules() -> str:
    """Return the modules joined into one, in order, without their imports and exports."""
    texts = ((_FOLDER / name).read_text(encoding="utf-8") for name in MODULES)
    return "".join(_IMPORT.sub("", text).replace("\nexport ", "\n") for text in texts)


def safe_json(value: Any) -> str:
    r"""Return JSON for use inside a script: without "<", it cannot end the script or begin a comment.

    >>> safe_json(["</script>"])
    '["\\u003c/script>"]'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so no line separators either
    return text.replace("<", "\\u003c")


def words(text: str) -> str:
    """Return text as markup: escaped, with code between backticks.

    >>> words("run `a<b>`")
    'run <code>a&lt;b&gt;</code>'
    """
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _template(name: str) -> Template:
    return Template((_FOLDER / name).read_text(encoding="utf-8"))


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _style() -> str:
    licence = (ASSETS_FOLDER / "uplot.LICENSE").read_text(encoding="utf-8")
    sheets = (ASSETS_FOLDER / "theme.css", ASSETS_FOLDER / "uplot.css", _FOLDER / "document.css")
    return f"/* uPlot: {licence}*/\n" + "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)


# ---- text and tables ----------------------------------------------------------------------------------------------


def _head(document: Document) -> str:
    lines = ["<header>", f"<h1>{words(document.title)}</h1>"]
    if document.lead:
        lines.append(f"<p>{words(document.lead)}</p>")
    if document.facts:
        lines.append(f"<dl>{''.join(map(_fact, document.facts))}</dl>")
    if len(document.sections) >= MIN_SECTIONS_LISTED:
        links = (
            f'<a href="#section-{number}">{words(section.title)}</a>'
            for number, section in enumerate(document.sections)
        )
        lines.append(f"<nav>{' '.join(links)}</nav>")
    return "\n".join([*lines, "</header>"])


def _fact(fact: tuple[str, str]) -> str:
    name, value = fact
    return f"<div><dt>{words(name)}</dt><dd>{words(value)}</dd></div>"


def _section(number: int, section: Section) -> str:
    parts = "\n".join(map(_part, section.parts))
    many = ' class="many"' if sum(isinstance(part, Chart) for part in section.parts) >= MANY_CHARTS else ""
    return f'<section id="section-{number}"{many}>\n<h2>{words(section.title)}</h2>\n{parts}\n</section>'


def _part(part: str | Table | Chart | Film) -> str:
    match part:
        case Table():
            return _table(part)
        case Chart():
            still = f'<div class="still">{chart_svg(part, on_ground=False)}</div><div class="plot"></div>'
            note = f'<p class="note">{words(part.note)}</p>' if part.note else ""
            return f'<figure class="chart"><figcaption>{words(part.title)}</figcaption>{still}{note}</figure>'
        case Film():
            size = f", {part.blocks_per_cell:,} blocks in a cell" if part.blocks_per_cell > 1 else ""
            return _template("film.html").substitute(title=words(part.title + size))
    return f"<p>{words(part)}</p>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{words(cell)}</th>' for cell in table.header)
    is_of_words = any(len(cell) > LONG_CELL for row in table.rows for cell in row[1:])
    opening = [f'<td data-column="{escape(name)}">' if is_of_words else "<td>" for name in table.header[1:]]
    rows = "".join(
        f'<tr><th scope="row">{words(row[0])}</th>'
        f"{''.join(f'{td}{words(cell)}</td>' for td, cell in zip(opening, row[1:], strict=True))}</tr>"
        for row in table.rows
    )
    title = f"<caption>{words(table.title)}</caption>" if table.title else ""
    note = f'<p class="note">{words(table.note)}</p>' if table.note else ""
    kind = ' class="words"' if is_of_words else ""
    body = f"{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll" tabindex="0"><table{kind}>{body}</table></div>{note}'


# ---- numbers ------------------------------------------------------------------------------------------------------


def _chart_data(chart: Chart) -> dict[str, Any]:
    series = [
        {"name": one.name, "values": _numbers(one.values), "colour": colour}
        for one, colour in zip(chart.series, colour_names(chart), strict=True)
    ]
    return {
        "title": chart.title,
        "kind": chart.kind,
        "names": chart.names,
        "places": _numbers(chart.places),
        "series": series,
        "x": asdict(chart.x_axis),
        "y": asdict(chart.y_axis),
        "group": chart.group,
    }


def _film_data(film: Film) -> dict[str, Any]:
    packed = base64.b64encode(zlib.compress(b"".join(film.pictures), 9)).decode()
    sizes = {"numBlocks": film.num_blocks, "blocksPerCell": film.blocks_per_cell, "numCells": film.num_cells}
    times = _numbers(film.times_s)
    return {"times": times, "captions": film.captions, "pictures": packed, "group": film.group, **sizes}


def _numbers(values: Sequence[float | None]) -> list[float | None]:
    """Return numbers with six digits, more than a plot can show; None for values that are not numbers."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]
