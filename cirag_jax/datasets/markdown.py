"""Sections of a document as plain text, without the markup of Markdown."""

import contextlib
import functools
import html
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.common.html_blocks import block_names
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_block.table import escapedSplit, getLine
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from mdit_py_plugins.gfm import gfm_plugin

from cirag_jax.io import one_line, replace_surrogates

# YAML between lines of --- (pandoc ends it with ...), or TOML between lines of +++.
_FRONT = re.compile(r"\s*^(---|\+\+\+)[ \t]*\n(.*?)^(?:\1|\.\.\.)[ \t]*$", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"\s*[\w-]+\s*[:=]")
_TITLE_FIELD = re.compile(r"^title[ \t]*[:=][ \t]*([\"']?)(.*)\1[ \t]*$", re.MULTILINE)
_MAX_FRONT = 10_000  # Characters of front matter that are parsed, because YAML can be slow.
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
# Depth of nested blocks, and of nested marks inside a text. Anything deeper is text.
_MAX_BLOCKS, _MAX_MARKS = 100, 20
# Longer texts are parsed in parts, because some rules take quadratic time. Parts end at white space
# if there is any.
_MAX_TEXT = 5000
_PART = re.compile(rf".{{1,{_MAX_TEXT}}}(?:(?<=\s)|\Z)|.{{1,{_MAX_TEXT}}}", re.DOTALL)
# An image that is stored in its URL; markdown-it knows few kinds.
_DATA, _NO_DATA = re.compile(r"data:[\w/+.-]+;base64,[\w/+=%-]+"), "data:image/png;base64,"
_SPACED = {*block_names, "br"}  # HTML tags that separate words
# A comment, a declaration, or a tag with its name and attributes, whose values may contain ">".
_TAG = re.compile(
    r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<[!?](?!--)[^>]*>"
    r"|<(/?[a-z][^\s/>]*)((?:=\s*\"[^\"]*\"|=\s*'[^']*'|[^>])*+)>",
    re.DOTALL | re.IGNORECASE,
)
_TAG_START = re.compile(r"<[/!?]?[a-z!?-]", re.IGNORECASE)
_ALT = re.compile(r"(?<![\w-])alt\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))", re.IGNORECASE)
_HIDDEN = {tag: re.compile(rf"</{tag}\b", re.IGNORECASE) for tag in ("script", "style")}
# After this many tags without an end, the rest is text, because each search reads all of it.
_MAX_UNCLOSED = 20


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
    is a heading, even without marks. Footnotes become the last section. The time is proportional to
    the length of the document.

    Args:
      text: the document.
      markdown: whether the document is Markdown. In plain text, only headings with ``#``, a title
        in the first line, code fences, tables and front matter are recognized, and everything else
        stays as it is.
    """
    title, text = _front_matter(text.replace("\r\n", "\n").replace("\r", "\n"))
    sections = [Section("", [])]
    notes, env = list[tuple[int, list[str]]](), dict[str, Any]()
    nodes = SyntaxTreeNode(_parser(markdown).parse(text, env)).children
    nodes.sort(key=lambda node: node.type == "footnote_reference")
    footnotes = env.get("footnotes", {"refs": {}, "list": {}})
    for index, node in enumerate(nodes):
        items = [one_line(item) for item in _items(node, markdown)]
        if node.type == "footnote_reference":
            number = footnotes["refs"][f":{node.meta['label']}"]
            notes.append((number if number >= 0 else len(footnotes["list"]), items))
            continue
        # A heading of several lines is a paragraph above a rule.
        if node.type == "heading" and "\n" not in node.children[0].content:
            heading = items[0] if items else ""
            sections.append(Section(_ATTRIBUTES.sub("", heading) if markdown else heading, []))
            continue
        is_above = index == 0 and len(nodes) > 1 and nodes[1].type not in ("heading", "hr")
        if is_above and (found := _title_line(node)):
            sections.append(Section(found if not markdown else items[0], []))
            continue
        if any(items):
            sections[-1].blocks.append([item for item in items if item])
    # Sorted by number; notes that are not referred to come last.
    notes.sort(key=lambda note: note[0])
    if items := [item for _, texts in notes for item in texts if item]:
        sections.append(Section("", [items]))
    return title, sections


def _title_line(node: SyntaxTreeNode) -> str:
    """Returns the text of a paragraph that is a title, or ""."""
    content = node.children[0].content.strip() if node.type == "paragraph" else ""
    match = _TITLE.fullmatch(content)
    return one_line(match[1]) if match and not _ITEM.match(f"\n{content}") else ""


@functools.cache
def _parser(markdown: bool) -> MarkdownIt:
    parser = _gfm(2 * _MAX_BLOCKS)
    if not markdown:
        parser = MarkdownIt("zero").enable(["heading", "fence", "code", "table"])
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    if markdown:
        parser.block.ruler.before("table", "deep", _deep)
        parser.core.ruler.at("inline", _inline)
        parser.disable("footnote_tail")  # Drops notes that are not referred to.
    return parser


@functools.cache
def _gfm(max_nesting: int) -> MarkdownIt:
    return MarkdownIt("commonmark", {"maxNesting": max_nesting}).use(gfm_plugin, dollarmath=True)


def _inline(state: StateCore) -> None:
    """Parses the marks in the texts of all blocks."""
    parser = _gfm(_MAX_MARKS)
    for token in state.tokens:
        if token.type == "inline":
            content = _DATA.sub(_NO_DATA, token.content)
            parts = [content] if len(content) <= _MAX_TEXT else _PART.findall(content)
            parsed = (parser.inline.parse(part, parser, state.env, []) for part in parts)
            token.children = list(itertools.chain.from_iterable(parsed))


def _deep(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Turns blocks that are nested too deeply into a text; the library drops them."""
    if silent or state.level < _MAX_BLOCKS:
        return False
    line = start
    while line < end and (state.isEmpty(line) or state.sCount[line] >= state.blkIndent):
        line += 1
    state.push("paragraph_open", "p", 1)
    state.push("inline", "", 0).content = state.getLines(start, line, state.blkIndent, False)
    state.push("paragraph_close", "p", -1)
    state.line = line
    return True


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Parses a table. Cells beyond the last column, which the library drops, join the last cell."""
    first = len(state.tokens)
    if not table(state, start, end, silent):
        return False
    cells, place = list[str](), 0
    for token in state.tokens[first:]:
        if token.type == "tr_open":
            assert token.map
            cells, place = escapedSplit(getLine(state, token.map[0]).strip()), 0
            cells = cells[1:] if not cells[0] else cells
        elif token.type == "inline":
            cell, place = token, place + 1
        elif token.type == "tr_close":
            cell.content = " ".join([cell.content, *(text.strip() for text in cells[place:])])
    return True


def _front_matter(text: str) -> tuple[str, str]:
    """Returns the title in the front matter, or "", and the text without the front matter."""
    match = _FRONT.match(text)
    if match is None:
        return "", text
    fields = _fields(match[1], match[2])
    if not isinstance(fields, dict):  # Prose between two rules.
        return "", text
    title = fields.get("title")
    is_text = isinstance(title, (str, int, float)) and not isinstance(title, bool)
    # YAML may have half surrogate pairs.
    clean = replace_surrogates(one_line(str(title))) if is_text else ""
    return clean, text[match.end() :]


def _fields(mark: str, text: str) -> Any:
    """Returns the fields of front matter; only the title if it is damaged or long."""
    if len(text) <= _MAX_FRONT:
        # Besides YAMLError, for example ValueError for the date 2024-13-01.
        with contextlib.suppress(Exception):
            return (yaml.safe_load if mark == "---" else tomllib.loads)(text)
    title = _TITLE_FIELD.search(text)
    return ({"title": title[2]} if title else {}) if _KEY.match(text) else None


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
        [one_line(" ".join(_items(cell, markdown))) for cell in row.children]
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


def _html_text(source: str) -> str:
    """Returns the visible text of HTML, and the descriptions of images."""
    parts: list[str] = []
    place = unclosed = 0
    while unclosed < _MAX_UNCLOSED and (start := source.find("<", place)) >= 0:
        parts.append(html.unescape(source[place:start]))
        match = _TAG.match(source, start)
        if match is None:
            unclosed += _TAG_START.match(source, start) is not None
            parts.append("<")
            place = start + 1
            continue
        place, name = match.end(), (match[1] or "").lower()
        parts.append(" " if name.removeprefix("/") in _SPACED else "")
        if name == "img" and (alt := _ALT.search(match[2])):
            parts.append(html.unescape(next(filter(None, alt.groups()), "")))
        if name in _HIDDEN and not match[2].endswith("/"):
            end = _HIDDEN[name].search(source, place)
            place = end.start() if end else len(source)
    parts.append(html.unescape(source[place:]))
    return "".join(parts)
