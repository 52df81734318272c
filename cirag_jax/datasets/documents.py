"""Passages from a user's own documents: text and Markdown files, or a list of texts."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage

SUFFIXES = (".txt", ".md")
LENGTH = 100  # Words per passage, as in DPR's Wikipedia corpus.

_HEADING = re.compile(r"#{1,6}[ \t]+(.*)")
_FENCE = re.compile(r" {0,3}(?:(`{3,})[^`]*|(~{3,}).*)$")
# The break before a list item or a table row.
_ITEM = re.compile(r"\n(?=[ \t]*(?:[-*+•][ \t]|\d{1,3}[.)][ \t]|\|))")
# A word: one character in scripts without spaces (Thai to Burmese, Khmer, Kana, Chinese), otherwise
# up to 50 characters without a space.
_APART = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_APART}]|[^\s{_APART}]{{1,50}}")


def read_documents(path: str | Path) -> Dataset:
    """Reads the passages of a document, a folder of documents, or a dataset folder.

    A folder with a ``corpus.jsonl`` is a dataset folder; its triples are read too, but not its
    questions. In any other folder, all ``.txt`` and ``.md`` files are read, also from subfolders,
    except hidden files. Passage ids are ``<relative path>#<number>``.
    """
    path = Path(path).expanduser()
    if path.name == jsonl.CORPUS and path.is_file():
        path = path.parent
    if (path / jsonl.CORPUS).is_file():
        return jsonl.read_dataset(path, questions=False)
    passages: list[Passage] = []
    for file, name in _files(path):
        passages += split_document(name, _read(file), file.stem.replace("_", " "))
    if not passages:
        raise _empty_error(path)
    return Dataset(path.resolve().name, (), {p.id: p for p in passages}, {})


def read_files(path: Path) -> list[tuple[str, str, str]]:
    """Returns (name, title, text) of a text file, or of all files in a folder.

    The title is the first Markdown heading, or else the file name. Headings end a paragraph and are
    removed from the text.
    """
    documents = []
    for file, name in _files(path):
        sections = _sections(_read(file))
        first = next((heading for heading, _ in sections if heading), "")
        text = "\n\n".join(body for _, body in sections)
        if text.strip():
            documents.append((name, first or file.stem.replace("_", " "), text))
    if not documents:
        raise _empty_error(path)
    return documents


def _files(path: Path) -> list[tuple[Path, str]]:
    """Returns the text files with their names relative to the folder."""
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        texts = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        visible = (f for f in texts if not any(p[0] == "." for p in f.relative_to(path).parts))
        files, root = sorted(file for file in visible if file.is_file()), path
    else:
        raise UserError(f"config.documents={path} is neither a folder nor a file.")
    return [(file, file.relative_to(root).as_posix()) for file in files]


def _empty_error(path: Path) -> UserError:
    return UserError(
        f"{path} has no text; documents are {' and '.join(SUFFIXES)} files, or a {jsonl.CORPUS}."
    )


def from_texts(texts: Iterable[str]) -> Dataset:
    """Returns a dataset with the passages of ``texts``; each text is one document."""
    documents = [split_document(f"document {n}", text, "") for n, text in enumerate(texts, 1)]
    passages = {passage.id: passage for document in documents for passage in document}
    if not passages:
        raise UserError("the documents have no text.")
    return Dataset("documents", (), passages, {})


def split_document(name: str, text: str, title: str) -> list[Passage]:
    """Splits a document into passages of whole sentences, about `LENGTH` words each.

    A paragraph stays together if it fits, and a passage never spans two sections. List items and
    table rows are sentences; a sentence of more than twice `LENGTH` words is cut.

    A passage's id is ``<name>#<number>``. Its title is the document's title, followed by the
    section's heading. The document's title is the first Markdown heading, or else ``title``. If
    both are missing, the first words of the passage are used.
    """
    passages: list[Passage] = []
    first = ""
    for heading, body in _sections(text):
        first = first or heading
        document_title = first or title
        is_first = heading in ("", first)
        section_title = document_title if is_first else f"{document_title}: {heading}"
        for sentences in _pack(re.split(r"\n[ \t]*\n", body)):
            joined = " ".join(sentences)
            beginning = " ".join(joined.split()[:6])
            passage_id = f"{name}#{len(passages) + 1}"
            passages.append(Passage(passage_id, section_title or beginning, joined, sentences))
    return passages


def _sections(text: str) -> list[tuple[str, str]]:
    """Returns (heading, body) of every section; text before the first heading has heading "".

    As in Markdown, lines inside code fences are not headings. A heading may be followed by a space
    and closing ``#`` characters.
    """
    sections: list[tuple[str, list[str]]] = [("", [])]
    fence = ""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        mark, heading = _FENCE.match(line), _HEADING.match(line)
        if heading and not fence:
            sections.append((_without_closing(heading[1]), []))
            continue
        if mark and not fence:
            fence = mark[1] or mark[2]
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        sections[-1][1].append(line)
    return [(heading, "\n".join(lines)) for heading, lines in sections]


def _without_closing(heading: str) -> str:
    heading = heading.strip()
    bare = heading.rstrip("#")
    return bare.rstrip() if bare[-1:] in ("", " ", "\t") else heading


def _pack(paragraphs: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups sentences into about `LENGTH` words; groups start at paragraphs if possible."""
    groups: list[tuple[str, ...]] = []
    group: list[str] = []

    def close() -> None:
        if group:
            groups.append(tuple(group))
            group.clear()

    for paragraph in paragraphs:
        sentences = [
            piece
            for item in _ITEM.split(paragraph)
            for sentence in split_sentences(" ".join(item.split()))
            for piece in _pieces(sentence)
        ]
        if _count_words(group) + _count_words(sentences) > LENGTH:
            close()
        for sentence in sentences:
            if group and _count_words(group) + _count_words([sentence]) > LENGTH:
                close()
            group.append(sentence)
    close()
    return groups


def _pieces(sentence: str) -> list[str]:
    """Cuts a very long sentence into pieces of `LENGTH` words."""
    starts = [word.start() for word in _WORD.finditer(sentence)]
    if len(starts) <= 2 * LENGTH:
        return [sentence]
    cuts = [*starts[::LENGTH], len(sentence)]
    return [sentence[start:end].strip() for start, end in itertools.pairwise(cuts)]


def _count_words(sentences: Iterable[str]) -> int:
    return sum(1 for sentence in sentences for _ in _WORD.finditer(sentence))


def _read(file: Path) -> str:
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
    return text
