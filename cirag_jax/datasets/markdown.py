"""Sections of a document as plain text, without the markup of Markdown."""

import functools
import html.parser
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.common.html_blocks import block_names
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from mdit_py_plugins.gfm import gfm_plugin

from cirag_jax.io import replace_surrogates

# YAML between lines of --- (pandoc ends it with ...), or TOML between lines of +++.
_FRONT = re.compile(r"\s*^(---|\+\+\+)[ \t]*\n(.*?)^(?:\1|\.\.\.)[ \t]*$", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"\s*[\w-]+\s*[:=]")
# The break before a list item or a table row.
_ITEM = re.compile(r"\n(?=[ \t]*(?:[-*+•][ \t]|\d{1,3}[.)][ \t]|\|))")
# A first paragraph that is a title: one line of at most 12 words that is no sentence, perhaps above
# a rule.
_TITLE = re.compile(
    r"((?:\S{1,50}[ \t]+){0,11}(?=\S*[^\W_])\S{1,50}(?<![.,:;!?…。，：；！？]))"
    r"[ \t]*(?:\n[ \t]*[=-]{3,})?"
)
_WIKI_LINK = re.compile(r"!?\[\[(?:[^\[\]|]*\|)?([^\[\]|]+)\]\]")  # [[page]] or [[page|text]]
_ATTRIBUTES = re.compile(r"\s*\{[#.:][^{}]*\}$")  # "{#anchor}" after a heading
_SPACED = {*block_names, "br"}  # HTML tags that separate words


class Section(NamedTuple):
    """The text under a heading; text before the first heading has the heading "".

    Attributes:
      heading: text of the heading.
      blocks: paragraphs, lists, tables and code; each is a list of items (list items, table rows).
    """

    heading: str
    blocks: list[list[str]]


def read_sections(text: str, markdown: bool) -> tuple[str, list[Section]]:
    """Returns the title in the front matter, or "", and the sections.

    Front matter, comments, marks of emphasis, the URLs of links and images, and the rules of tables
    are removed. A table row becomes ``column: cell; column: cell``. A first line that is a title
    is a heading, even without marks.

    Args:
      text: the document.
      markdown: whether the document is Markdown. In plain text, only headings with ``#``, a title
        in the first line, code fences, tables and front matter are recognized, and everything else
        stays as it is.
    """
    title, text = _front_matter(text.replace("\r\n", "\n").replace("\r", "\n"))
    sections = [Section("", [])]
    nodes = SyntaxTreeNode(_parser(markdown).parse(text)).children
    for index, node in enumerate(nodes):
        items = [" ".join(item.split()) for item in _items(node, markdown)]
        # A heading of several lines is a paragraph above a rule.
        if node.type == "heading" and "\n" not in node.children[0].content:
            heading = items[0] if items else ""
            sections.append(Section(_ATTRIBUTES.sub("", heading) if markdown else heading, []))
            continue
        is_above = index == 0 and len(nodes) > 1 and nodes[1].type not in ("heading", "hr")
        if is_above and (found := _title_line(node)):
            sections.append(Section(found if not markdown else items[0], []))
            continue
        if node.type == "footnote_block":
            sections.append(Section("", []))
        if any(items):
            sections[-1].blocks.append([item for item in items if item])
    return title, sections


def _title_line(node: SyntaxTreeNode) -> str:
    """Returns the text of a paragraph that is a title, or ""."""
    content = node.children[0].content.strip() if node.type == "paragraph" else ""
    match = _TITLE.fullmatch(content)
    return " ".join(match[1].split()) if match and not _ITEM.match(f"\n{content}") else ""


@functools.cache
def _parser(markdown: bool) -> MarkdownIt:
    if not markdown:
        return MarkdownIt("zero").enable(["heading", "fence", "code", "table"])
    # The default limit of 20 drops deeper lists.
    return MarkdownIt("commonmark", {"maxNesting": 100}).use(gfm_plugin, dollarmath=True)


def _front_matter(text: str) -> tuple[str, str]:
    """Returns the title in the front matter, or "", and the text without the front matter."""
    match = _FRONT.match(text)
    if match is None:
        return "", text
    fields: Any
    try:
        fields = (yaml.safe_load if match[1] == "---" else tomllib.loads)(match[2])
    except Exception:  # Besides YAMLError, for example ValueError for the date 2024-13-01.
        fields = {} if _KEY.match(match[2]) else None
    if not isinstance(fields, dict):  # Prose between two rules.
        return "", text
    title = fields.get("title")
    is_text = isinstance(title, (str, int, float)) and not isinstance(title, bool)
    # YAML may have half surrogate pairs.
    clean = replace_surrogates(" ".join(str(title).split())) if is_text else ""
    return clean, text[match.end() :]


def _items(node: SyntaxTreeNode, markdown: bool) -> Iterator[str]:
    """Yields the texts of a block: list items, table rows and paragraphs."""
    if node.type == "inline":
        yield from _ITEM.split(
            _text(node.to_tokens()[0].children or ()) if markdown else node.content
        )
    elif node.type == "table":
        yield from _rows(node, markdown)
    elif node.type == "html_block":
        yield _html_text(node.content)
    elif node.type == "list_item" and node.info:  # Numbered.
        items = [item for child in node.children for item in _items(child, markdown)]
        yield from (f"{node.info}{node.markup} {item}" for item in items[:1])
        yield from items[1:]
    elif node.type == "alert_title":  # "Note" or "Warning".
        return
    elif node.children:
        for child in node.children:
            yield from _items(child, markdown)
    else:  # Code.
        yield from [node.content] if markdown else _ITEM.split(node.content)


def _rows(table: SyntaxTreeNode, markdown: bool) -> Iterator[str]:
    """Yields the rows of a table with column names, or only the names if there are no rows."""
    names, *rows = (
        [" ".join(" ".join(_items(cell, markdown)).split()) for cell in row.children]
        for part in table.children
        for row in part.children
    )
    for row in rows or [names]:
        named = zip(names if rows else len(names) * [""], row, strict=False)
        yield "; ".join(f"{name}: {cell}" if name else cell for name, cell in named if cell)


def _text(tokens: Iterable[Token]) -> str:
    parts: list[str] = []
    for token in tokens:
        match token.type:
            case "softbreak" | "hardbreak":
                parts.append("\n")
            case "image":
                parts.append(_text(token.children or ()))
            case "html_inline":
                parts.append(_html_text(token.content))
            case "text":
                parts.append(_WIKI_LINK.sub(r"\1", token.content))
            case "math_inline":
                parts.append(f"{token.markup}{token.content}{token.markup}")
            case _:
                parts.append(token.content)
    return "".join(parts)


class _Html(html.parser.HTMLParser):
    """Collects the visible text of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._hidden = tag
        self.parts.append(" " if tag in _SPACED else "")
        self.parts += [value or "" for name, value in attrs if (tag, name) == ("img", "alt")]

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden
        self.parts.append(" " if tag in _SPACED else "")

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self._hidden else data)


def _html_text(source: str) -> str:
    parser = _Html()
    parser.feed(source)
    parser.close()
    return "".join(parser.parts)
