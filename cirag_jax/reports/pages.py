"""Self-contained HTML pages.

A page makes no network requests. Its Content-Security-Policy only allows its own script and style,
identified by their hashes. The data of a run appears only as escaped text, as JSON without ``<`` in
data blocks, or in pictures.
"""

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import visible
from cirag_jax.reports.tables import Table


class Section(NamedTuple):
    """A section of a page: tables, SVG pictures by name, then paragraphs."""

    title: str
    tables: Sequence[Table] = ()
    pictures: Mapping[str, bytes] = {}
    notes: Sequence[str] = ()


def template(
    body: str,
    title: str,
    style: Sequence[str],
    script: Sequence[str] = (),
    images: bool = False,
    **parts: str,
) -> tuple[str, str]:
    """Returns the HTML before and the HTML after the data blocks of a page.

    Args:
      body: file name of the body in this folder; each ``{{NAME}}`` is replaced by a part.
      title: the title, as plain text.
      style: names of CSS files in this folder.
      script: names of JavaScript files in this folder.
      images: whether to allow pictures in the page.
      **parts: the HTML of each part, by name.
    """
    css, js = ("".join(map(_file, names)) for names in (style, script))
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(js)}'",
            f"style-src '{_hash(css)}'",
            "img-src data:" if images else "img-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    # UTF-8 cannot encode half of a surrogate pair.
    parts["title"] = html.escape(title.encode("utf-8", "backslashreplace").decode("utf-8"))
    parts["body"] = _fill(_file(body), parts)
    parts |= {"policy": policy, "style": css, "script": f"<script>{js}</script>" if js else ""}
    before, _, after = _file("page.html").partition("{{data}}\n")
    return _fill(before, parts), _fill(after, parts)


def data_block(name: str, value: Any) -> str:
    """Returns a script element with JSON that HTML parsers read as text: ASCII without ``<``."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def sections(parts: Sequence[Section]) -> str:
    """Returns the HTML of sections, each with an `anchor`."""
    return "\n".join(map(_section, parts))


def anchor(title: str) -> str:
    """Returns the HTML id of the section with this title."""
    return title.lower().replace(" ", "-")


def link(to: str, label: str, tab: str = "") -> str:
    """Returns a link; ``to`` and ``tab``, the target window, must be trusted text."""
    target = f' target="{tab}"' if tab else ""
    return f'<a href="{to}"{target}>{text(label)}</a>'


def text(value: str) -> str:
    """Returns a text as HTML, with invisible characters escaped."""
    return html.escape(visible(value))


def _section(section: Section) -> str:
    parts = [*map(_table, section.tables)]
    for name, svg in section.pictures.items():
        source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
        parts.append(f'<figure><img alt="{text(name)}" src="{source}"></figure>')
    shown = f'<div class="row">{"".join(parts)}</div>\n' if parts else ""
    notes = "\n".join(f"<p>{text(note)}</p>" for note in section.notes)
    heading = f"<h2>{text(section.title)}</h2>"
    return f'<section id="{anchor(section.title)}">{heading}\n{shown}{notes}</section>'


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{text(cell)}</{tag}>" for cell in cells) + "</tr>"

    header, *rows = table.rows
    body = "\n".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="wide"><table><caption>{text(table.caption)}</caption>\n'
        f"<thead>{row(header, 'th')}</thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def _fill(template: str, parts: Mapping[str, str]) -> str:
    # In one pass, because inserted parts must not be searched for placeholders.
    pieces = (piece.partition("}}") for piece in template.split("{{"))
    return "".join(parts[name] + rest if end else name for name, end, rest in pieces)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return importlib.resources.files("cirag_jax.reports").joinpath(name).read_text("utf-8")
