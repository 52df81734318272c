"""Self-contained pages: what their HTML, style, script and data have in common.

A page fetches nothing and sends nothing. A Content-Security-Policy lets no script and no style take
effect but the page's own, known by their hashes. What a run holds reaches it as escaped text, as
JSON in data blocks in which no ``<`` stands, or inside a picture.
"""

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import visible
from cirag_jax.reports.tables import Table


class Section(NamedTuple):
    """A part of a page, with a heading.

    Attributes:
      title: the heading, in our own words.
      tables: with their captions.
      pictures: SVG files by what they show.
      notes: paragraphs below.
    """

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
    """A page before and after its data blocks.

    Args:
      body: file of this folder with what the page shows, in which ``{{NAME}}`` stands for a part.
      title: text.
      style: files of this folder.
      script: files of this folder.
      images: whether it may show pictures that stand in it.
      **parts: HTML.
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
    # Half of a surrogate pair has no place in a UTF-8 file.
    parts["title"] = html.escape(title.encode("utf-8", "backslashreplace").decode("utf-8"))
    parts["body"] = _fill(_file(body), parts)
    parts |= {"policy": policy, "style": css, "script": f"<script>{js}</script>" if js else ""}
    before, _, after = _file("page.html").partition("{{data}}\n")
    return _fill(before, parts), _fill(after, parts)


def data_block(name: str, value: Any) -> str:
    """JSON that no HTML parser takes for anything but text: ASCII, and without ``<``."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def sections(found: Sequence[Section]) -> str:
    """HTML of the sections, each under an anchor that is called as `anchor` says."""
    return "\n".join(map(_section, found))


def anchor(title: str) -> str:
    """The name of a section in an address."""
    return title.lower().replace(" ", "-")


def link(to: str, label: str, tab: str = "") -> str:
    """HTML of a link; ``to`` and the ``tab`` that opens it, if not this one, are our own words."""
    target = f' target="{tab}"' if tab else ""
    return f'<a href="{to}"{target}>{text(label)}</a>'


def text(value: str) -> str:
    """HTML of a text that shows as what it is."""
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
    return "".join(_pieces(template, parts))


def _pieces(template: str, parts: Mapping[str, str]) -> Iterator[str]:
    # In one pass, so that nothing that is put in is searched for a place itself.
    for piece in template.split("{{"):
        name, found, rest = piece.partition("}}")
        yield parts[name] + rest if found else piece


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return importlib.resources.files("cirag_jax.reports").joinpath(name).read_text("utf-8")
