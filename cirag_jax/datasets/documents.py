"""A user's own documents as passages: text and Markdown files, or a list of texts."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage

SUFFIXES = (".txt", ".md")
# Words of a passage: Wikipedia's passages of the benchmarks have about as many (DPR cuts at 100).
LENGTH = 100

_HEADING = re.compile(r"#{1,6}[ \t]+(.*)")
_FENCE = re.compile(r" {0,3}(?:(`{3,})[^`]*|(~{3,}).*)$")
# Before a line that begins an item of a list or a row of a table.
_ITEM = re.compile(r"\n(?=[ \t]*(?:[-*+•][ \t]|\d{1,3}[.)][ \t]|\|))")
# A word; of scripts that write none apart a character (Thai to Burmese, Khmer, Kana, Chinese), of
# what is no word at all 50 characters.
_APART = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_APART}]|[^\s{_APART}]{{1,50}}")


def read_documents(path: str | Path) -> Dataset:
    """The passages of a folder of documents, of one document, or of a dataset folder.

    A folder with a ``corpus.jsonl`` is a dataset folder, whose questions are not needed and whose
    triples come along. Of any other, all ``.txt`` and ``.md`` files are read, sub-folders included;
    hidden ones are not. Ids are ``<relative path>#<number>``.
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
        raise _nothing(path)
    return Dataset(path.resolve().name, (), {p.id: p for p in passages}, {})


def read_files(path: Path) -> list[tuple[str, str, str]]:
    """(name, title, text) of a text file, or of all in a folder as `read_documents` finds them.

    Markdown headings give the title and are no text; each ends a paragraph.
    """
    found = []
    for file, name in _files(path):
        sections = _sections(_read(file))
        first = next((heading for heading, _ in sections if heading), "")
        text = "\n\n".join(body for _, body in sections)
        if text.strip():
            found.append((name, first or file.stem.replace("_", " "), text))
    if not found:
        raise _nothing(path)
    return found


def _files(path: Path) -> list[tuple[Path, str]]:
    """Text files, each with its name in the folder."""
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        visible = (f for f in found if not any(p[0] == "." for p in f.relative_to(path).parts))
        files, root = sorted(file for file in visible if file.is_file()), path
    else:
        raise UserError(f"config.documents={path} is neither a folder nor a file.")
    return [(file, file.relative_to(root).as_posix()) for file in files]


def _nothing(path: Path) -> UserError:
    return UserError(
        f"{path} has no text: documents are {' and '.join(SUFFIXES)} files, or a {jsonl.CORPUS}."
    )


def from_texts(texts: Iterable[str]) -> Dataset:
    """The passages of texts, each a document without a name."""
    split = [split_document(f"document {n}", text, "") for n, text in enumerate(texts, 1)]
    passages = {passage.id: passage for found in split for passage in found}
    if not passages:
        raise UserError("the documents have no text.")
    return Dataset("documents", (), passages, {})


def split_document(name: str, text: str, title: str) -> list[Passage]:
    """A document as passages of whole sentences, about `LENGTH` words each, with ids from ``name``.

    Paragraphs are kept together where they fit, and none is joined with the next section's. Items
    of lists and rows of tables are sentences; what has more than twice `LENGTH` words is cut. The
    title is that of the document (its first Markdown heading, else ``title``, else its first
    words), with the section's beside.
    """
    passages: list[Passage] = []
    first = ""
    for heading, body in _sections(text):
        first = first or heading
        whole = first or title
        titled = whole if heading in ("", first) else f"{whole}: {heading}"
        for sentences in _pack(re.split(r"\n[ \t]*\n", body)):
            joined = " ".join(sentences)
            beginning = " ".join(joined.split()[:6])
            place = f"{name}#{len(passages) + 1}"
            passages.append(Passage(place, titled or beginning, joined, sentences))
    return passages


def _sections(text: str) -> list[tuple[str, str]]:
    """(heading, body) of every section; the part before the first heading has none.

    As in Markdown: no line between fences is a heading, and only ``#`` that stand apart close one.
    """
    found: list[tuple[str, list[str]]] = [("", [])]
    fence = ""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        mark, heading = _FENCE.match(line), _HEADING.match(line)
        if heading and not fence:
            found.append((_without_closing(heading[1]), []))
            continue
        if mark and not fence:
            fence = mark[1] or mark[2]
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        found[-1][1].append(line)
    return [(heading, "\n".join(lines)) for heading, lines in found]


def _without_closing(heading: str) -> str:
    heading = heading.strip()
    bare = heading.rstrip("#")
    return bare.rstrip() if bare[-1:] in ("", " ", "\t") else heading


def _pack(paragraphs: Sequence[str]) -> list[tuple[str, ...]]:
    """Sentences in groups of about `LENGTH` words, which begin with a paragraph where they can."""
    groups: list[tuple[str, ...]] = []
    held: list[str] = []

    def close() -> None:
        if held:
            groups.append(tuple(held))
            held.clear()

    for paragraph in paragraphs:
        sentences = [
            piece
            for item in _ITEM.split(paragraph)
            for sentence in split_sentences(" ".join(item.split()))
            for piece in _pieces(sentence)
        ]
        if _words(held) + _words(sentences) > LENGTH:
            close()
        for sentence in sentences:
            if held and _words(held) + _words([sentence]) > LENGTH:
                close()
            held.append(sentence)
    close()
    return groups


def _pieces(sentence: str) -> list[str]:
    """A sentence, or what has no full stop for long, in pieces of `LENGTH` words."""
    starts = [word.start() for word in _WORD.finditer(sentence)]
    if len(starts) <= 2 * LENGTH:
        return [sentence]
    cuts = [*starts[::LENGTH], len(sentence)]
    return [sentence[start:end].strip() for start, end in itertools.pairwise(cuts)]


def _words(sentences: Iterable[str]) -> int:
    return sum(1 for sentence in sentences for _ in _WORD.finditer(sentence))


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
        place = content.find(b"\0")  # Valid UTF-8, and in no text.
        text = content.decode("utf-8-sig") if place < 0 else None
    except UnicodeDecodeError as error:
        text, place = None, error.start
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
    if text is None:
        raise UserError(
            f"{file} is not UTF-8 text (byte {place}); save it as UTF-8, or move it elsewhere."
        )
    return text
