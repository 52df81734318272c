"""Passages from a user's own documents: a file, a folder, or a list of texts."""

import collections
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import logging

from cirag_jax.datasets import conversion, jsonl
from cirag_jax.datasets.markdown import Section, read_sections
from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.errors import UserError, install_command
from cirag_jax.io import is_utf8
from cirag_jax.types import Dataset, Passage

MARKDOWN = (".md", ".markdown")
SUFFIXES = (".txt", *MARKDOWN)
LENGTH = 100  # Words per passage, as in DPR's Wikipedia corpus.

# A word: one character in scripts without spaces (Thai to Burmese, Khmer, Kana, Chinese), otherwise
# up to 50 characters without a space.
_APART = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_APART}]|[^\s{_APART}]{{1,50}}")
_NUMBER = re.compile(r"\d+\.")  # The number of a list item.


class _Document(NamedTuple):
    """A document's name, the title in its front matter ("" if none), sections and default title."""

    name: str
    title: str
    sections: list[Section]
    default_title: str


def read_documents(path: str | Path) -> Dataset:
    """Reads the passages of a document, a folder of documents, or a dataset folder.

    A folder with a ``corpus.jsonl`` is a dataset folder; its triples are read too, but not its
    questions. In any other folder, all documents are read, also from subfolders, except hidden
    files. A warning names skipped files. Passage ids are ``<relative path>#<number>``.
    """
    path = _expanded(path)
    if path.name == jsonl.CORPUS and path.is_file():
        path = path.parent
    if (path / jsonl.CORPUS).is_file():
        return jsonl.read_dataset(path, questions=False)
    passages = [passage for document in _read_all(path) for passage in _passages(document)]
    return Dataset(_utf8_name(Path(path.resolve().name)), (), {p.id: p for p in passages}, {})


def _expanded(path: str | Path) -> Path:
    try:
        expanded = Path(path).expanduser()
        exists = bool(str(path)) and (expanded.is_file() or expanded.is_dir())
    except (OSError, RuntimeError):  # For example, a text instead of a path, or an unknown user.
        exists, expanded = False, Path()
    if not exists:
        raise UserError(
            f"config.documents={str(path)[:200]} is neither a folder nor a file; in Python, pass "
            "texts as a list."
        )
    return expanded


def read_files(path: Path) -> list[tuple[str, str, str]]:
    """Returns (name, title, text) of a document, or of all documents in a folder.

    Paragraphs, list items and table rows are separated by blank lines. Headings are not part of the
    text; the first one is the title, unless the front matter has one.
    """
    files = []
    for document in _read_all(_expanded(path)):
        titles = (document.title, *(section.heading for section in document.sections))
        blocks = itertools.chain.from_iterable(section.blocks for section in document.sections)
        text = "\n\n".join(itertools.chain.from_iterable(blocks))
        files.append((document.name, next(filter(None, titles), document.default_title), text))
    return files


def from_texts(texts: Iterable[str]) -> Dataset:
    """Returns a dataset with the passages of ``texts``; each text is one document."""
    documents = [
        split_document(f"document {number + 1}", _checked(text, f"documents[{number}]"), "")
        for number, text in enumerate(texts)
    ]
    passages = {passage.id: passage for document in documents for passage in document}
    if not passages:
        raise UserError("the documents have no text.")
    return Dataset("documents", (), passages, {})


def _checked(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{name} must be a string, not {ascii(text)[:80]}.")
    if not is_utf8(text):
        raise UserError(f"{name} is not valid UTF-8: it contains half of a surrogate pair.")
    if len(text) < 256 and os.path.isfile(text):
        raise UserError(f"{name}={text!r} is a file; pass its folder, or the text of the file.")
    return str(text)


def split_document(name: str, text: str, title: str, *, markdown: bool = False) -> list[Passage]:
    """Splits a document into passages of whole sentences, about `LENGTH` words each.

    A paragraph stays together if it fits, and a passage never spans two sections. List items and
    table rows are sentences; a sentence of more than twice `LENGTH` words is cut.

    A passage's id is ``<name>#<number>``. Its title is the document's title, followed by the
    section's heading and by headings without text before it. The document's title is the title in
    the front matter, the first heading, or else ``title``. If all are missing, the first words of
    the passage are used.
    """
    return _passages(_Document(name, *read_sections(text, markdown), title))


def _passages(document: _Document) -> list[Passage]:
    passages: list[Passage] = []
    first, headings = document.title, list[str]()
    for heading, blocks in document.sections:
        first = first or heading
        if heading not in ("", first):
            headings.append(heading)
        if not blocks:  # The heading becomes a part of the next title.
            continue
        section_title = ": ".join([first or document.default_title, *headings])
        headings = []
        for sentences in _pack(blocks):
            joined = " ".join(sentences)
            beginning = " ".join(joined.split()[:6])
            passage_id = f"{document.name}#{len(passages) + 1}"
            passages.append(Passage(passage_id, section_title or beginning, joined, sentences))
    return passages


def _pack(blocks: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups sentences into about `LENGTH` words; groups start at blocks if possible."""
    groups: list[tuple[str, ...]] = []
    group: list[str] = []

    def close() -> None:
        if group:
            groups.append(tuple(group))
            group.clear()

    for items in blocks:
        sentences = [
            piece for item in items for whole in _sentences(item) for piece in _pieces(whole)
        ]
        if _count_words(group) + _count_words(sentences) > LENGTH:
            close()
        for sentence in sentences:
            if group and _count_words(group) + _count_words([sentence]) > LENGTH:
                close()
            group.append(sentence)
    close()
    return groups


def _sentences(item: str) -> tuple[str, ...]:
    first, *others = split_sentences(item)
    if others and _NUMBER.fullmatch(first):
        return f"{first} {others[0]}", *others[1:]
    return first, *others


def _pieces(sentence: str) -> list[str]:
    """Cuts a very long sentence into pieces of `LENGTH` words."""
    starts = [word.start() for word in _WORD.finditer(sentence)]
    if len(starts) <= 2 * LENGTH:
        return [sentence]
    cuts = [*starts[::LENGTH], len(sentence)]
    return [sentence[start:end].strip() for start, end in itertools.pairwise(cuts)]


def _count_words(sentences: Iterable[str]) -> int:
    return sum(1 for sentence in sentences for _ in _WORD.finditer(sentence))


def _read_all(path: Path) -> list[_Document]:
    """Reads a document, or all documents of a folder; a warning names the skipped files."""
    files, skipped = _find(path)
    documents: list[_Document] = []
    for file, name in files:
        try:
            title, sections = read_sections(*_read(file))
        except UserError:
            if path.is_file() or file.suffix.lower() not in conversion.SUFFIXES:
                raise
            skipped[f"unreadable {file.suffix.lower()}"].append(name)
            continue
        if any(section.blocks for section in sections):
            documents.append(_Document(name, title, sections, Path(name).stem.replace("_", " ")))
        else:
            skipped["without text"].append(name)
    if not documents:
        command = install_command(conversion.EXTRA)
        more = f"after {command} also {', '.join(conversion.SUFFIXES)} files"
        known = f"documents are .txt and .md files, or a {jsonl.CORPUS}, {more}"
        found = f"; {_describe(skipped)}" if path.is_dir() and skipped else ""
        raise UserError(f"{path} has no text; {known}{found}.")
    if skipped:
        logging.warning("%s: %s.", path, _describe(skipped))
    return documents


def _find(path: Path) -> tuple[list[tuple[Path, str]], dict[str, list[str]]]:
    """Returns documents with names relative to the folder, and names of other files by kind."""
    skipped: dict[str, list[str]] = collections.defaultdict(list)
    if path.is_file():
        return [(path, _utf8_name(Path(path.name)))], skipped
    documents = []
    for file in sorted(path.rglob("*")):
        name, kind = file.relative_to(path), file.suffix.lower()
        if any(part[0] == "." for part in name.parts) or not file.is_file():
            continue
        if kind in SUFFIXES or kind in conversion.SUFFIXES and conversion.is_installed(kind):
            documents.append((file, _utf8_name(name)))
        else:
            skipped[kind or "without a suffix"].append(_utf8_name(name))
    return documents, skipped


def _utf8_name(path: Path) -> str:
    r"""Returns a path with ``/``, in which bytes that are not UTF-8 are written like ``\\xe9``."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _describe(skipped: dict[str, list[str]]) -> str:
    """Returns a message: the number of skipped files by kind, the first of each, and the remedy."""
    kinds = sorted(skipped, key=lambda kind: -len(skipped[kind]))
    parts = []
    for kind in kinds[:5]:
        names = ", ".join(skipped[kind][:3]) + (", ..." if len(skipped[kind]) > 3 else "")
        parts.append(f"{len(skipped[kind])} {kind} ({names})")
    if kinds[5:]:
        parts.append(f"{sum(len(skipped[kind]) for kind in kinds[5:])} of other kinds")
    number = sum(map(len, skipped.values()))
    text = f"skipped {number} {'file' if number == 1 else 'files'}: {', '.join(parts)}"
    to_install = [kind for kind in kinds if kind in conversion.SUFFIXES]
    if to_install:
        command = install_command(conversion.EXTRA)
        text += f"; to read {', '.join(to_install)} files, {command}"
    return text


def _read(file: Path) -> tuple[str, bool]:
    """Returns the text of a document, and whether it is Markdown."""
    kind = file.suffix.lower()
    if kind in conversion.SUFFIXES:
        return conversion.convert(file)
    try:
        content = file.read_bytes()
        place = content.find(b"\0")  # Valid UTF-8, but binary data.
        text = content.decode("utf-8-sig") if place < 0 else None
    except UnicodeDecodeError as error:
        text, place = None, error.start
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
    if text is None:
        raise UserError(
            f"{file} is not UTF-8 text (byte {place}); save it as UTF-8 or move it elsewhere."
        )
    return text, kind in MARKDOWN
