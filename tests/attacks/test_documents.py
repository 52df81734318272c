"""Documents with nested, broken and unusual markup.

All visible text must reach the passages, and no URL, comment or other hidden text.
"""

import re

import pytest
from hypothesis import example
from hypothesis import strategies as st

from cirag_jax.datasets import documents, markdown
from cirag_jax.datasets.documents import LENGTH, read_documents, read_files, split_document
from cirag_jax.types import Passage
from tests.attacks.hostile import DEEP, attack, attempt

# Blocks of a size that is drawn. Each W stands for a new word, and each H for a hidden one.
_BLOCKS = {
    "paragraph": lambda n: (
        "W **W _W_** ~~W~~ `W` [W](H 'H') ![W](H) <b id=H>W</b> $W$ W\\* &amp; W"
    ),
    "links": lambda n: "[W][r] [W] <https://W.org/> https://W.org [[W]] [[H|W]] [^W]\n\n[r]: H",
    "line": lambda n: "W " + "x" * n * 50 + " W " + "x " * n * 50 + "W",
    "long": lambda n: "W " + f"[W](H) {'a b c ' * n}" * 5 + "**W**",
    "image": lambda n: (
        f"W ![W](data:image/{('svg+xml', 'png')[n % 2]};base64,H{'QUFB' * n * 20}) W"
    ),
    "heading": lambda n: f"{'#' * (n % 6 + 1)} W *W*\n\nW",
    "rule": lambda n: "W\n===\n\nW W\n---\n\nW\n\n***",
    "list": lambda n: "\n".join(f"{'  ' * i}{'-*+'[i % 3]} W" for i in range(n % 120)),
    "numbers": lambda n: "\n".join(f"{'    ' * i}{i + 1}. W" for i in range(n % 60)),
    "tasks": lambda n: "- [ ] W\n- [x] W\n  - W\n\n    W\n\n      W",
    "quote": lambda n: "> " * (n % 150) + "W",
    "quotes": lambda n: "\n".join("> " * (i + 1) + "- W" for i in range(n % 80)),
    "items": lambda n: "- " * (n % 150) + "W",
    "alert": lambda n: "> [!NOTE]\n> W\n>\n> - W",
    "table": lambda n: "| W | W |\n| --- | :-: |\n| W | W |\n| W |\n" + "| W " * (n % 40),
    "quoted table": lambda n: "> W|W\n> -|-\n> W|W|W\\|W|W",
    "fence": lambda n: f"~~~ text\n{'W ' * (n % 40)}\n\n```\nW\n~~~",
    "code": lambda n: "    W\n\n        W",
    "math": lambda n: "$$\nW\n$$",
    "html": lambda n: f"<div class='a>H'>W<br H>W <p{' a=b' * n}>W</p> W &lt; W</div>",
    "broken html": lambda n: f"<p>W <![foo[ a ]]> W <! b> W {'<a b=' * n}",
    "details": lambda n: "<details><summary>W</summary>\n\nW\n\n</details>\n\nW",
    "comment": lambda n: "W <!-- H --> W\n\n<!-- H\n\nH -->\n\nW",
    "script": lambda n: "<script>H < H</script>\n\nW\n\n<style>H</style>W",
    "note": lambda n: f"W[^{n}]\n\n[^{n}]: W\n\n    W\n\n    - W\n\nW",
    "unused note": lambda n: f"[^n{n}]: W\n\n[^n{n}]: W",
    "nested note": lambda n: "[^a]: W\n    [^b]: W\n    W",
    "marks": lambda n: "W " + "[]!*_`~$|&\\<^("[n % 14] * n + " W",
    "brackets": lambda n: "[" * n + "W" + "](u)" * n + " W",
    "autolinks": lambda n: "W " + "<http:" * n + " W",
    "scripts": lambda n: "W。W、" + "日本語" * n + "\n\nก W\u202e W\u200d W \u2028 W",
}
_FRONTS = (
    *("", "---\ntitle: W\nH: H\n---\n", "---\ntitle: W: W\n---\n", '+++\ntitle = "W"\n+++\n'),
    *("---\ntitle: W\nH: [\n---\n", "---\nW\n---\n", "W\n\n", "# W\n"),
    "---\ntitle: W\nH: " + "{b: " * 5000 + "\n---\n",
)
_DOCUMENTS = st.tuples(
    st.sampled_from(_FRONTS),
    st.lists(st.tuples(st.sampled_from(sorted(_BLOCKS)), st.integers(0, 300)), max_size=6),
)


def _write(front: str, blocks: list[tuple[str, int]]) -> tuple[str, list[str]]:
    """Returns a document, and its visible words. The words of a document differ."""
    # A paragraph, so that no block continues the one before it.
    parts = [_BLOCKS[kind](number) for kind, number in blocks]
    text = front + "".join(f"{part}\n\nW.\n\n" for part in parts) + "W."
    pieces = re.split("([WH])", text)
    words = [f"zq{place}v" if piece == "W" else "" for place, piece in enumerate(pieces)]
    hidden = [f"zq{place}h" if piece == "H" else "" for place, piece in enumerate(pieces)]
    parts = (
        word or other or piece for word, other, piece in zip(words, hidden, pieces, strict=True)
    )
    return "".join(parts), [word for word in words if word]


def _check(passages: list[Passage], name: str, words: list[str], is_markdown: bool = True) -> None:
    shown = " ".join(f"{passage.title}\n{passage.text}" for passage in passages)
    assert set(words) <= set(re.findall(r"zq\d+v", shown))
    assert not (is_markdown and re.findall(r"zq\d+h", shown))
    assert [passage.id for passage in passages] == [
        f"{name}#{place}" for place in range(1, len(passages) + 1)
    ]
    for passage in passages:
        assert passage.text == " ".join(passage.sentences or ()) and passage.title
        for sentence in passage.sentences or ():
            assert sentence == sentence.strip() != ""
            assert not re.fullmatch(r"[-|: ]*-[-|: ]*", sentence)  # Rules of tables.
            assert documents._count_words([sentence]) <= 2 * LENGTH


@pytest.mark.parametrize("is_markdown", [True, False])
@example(("", [("broken html", 1)]))  # An AssertionError of Python's HTML parser.
@example(("", [("unused note", 0)]))
@example(("", [("table", 5)]))
@example(("", [("quote", 140)]))
@example(("", [("items", 149)]))
@example(("", [("image", 100)]))
@example(("", [("image", 299)]))
@attack(60, _DOCUMENTS)
def test_document_keeps_all_visible_words(is_markdown, document):
    text, words = _write(*document)
    passages = attempt(lambda: split_document("d", text, "t", markdown=is_markdown))
    assert passages is not None
    _check(passages, "d", words, is_markdown)
    windows = text.replace("\n", "\r\n")
    assert split_document("d", windows, "t", markdown=is_markdown) == passages


@attack(15, _DOCUMENTS, _DOCUMENTS)
def test_document_is_independent_of_other_documents(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("documents")
    text, words = _write(*first)
    (folder / "b.md").write_text(text, encoding="utf-8")
    alone = list(read_documents(folder).corpus.values())
    _check(alone, "b.md", words)
    (folder / "a.md").write_text(_write(*second)[0], encoding="utf-8")
    together = read_documents(folder).corpus.values()
    assert [passage for passage in together if passage.id.startswith("b.md#")] == alone
    ((_, _, copied), _) = sorted(read_files(folder), reverse=True)
    # Without white space, because very long words are cut.
    assert "".join(copied.split()) == "".join("".join(passage.text.split()) for passage in alone)


_REPEATED = ("[", "![", "<http:", "<a b='", "<!--", ":", "`a ", "$", "*a_ ", "[^", "^[", "> ", "|")


@pytest.mark.parametrize("mark", _REPEATED)
def test_document_repeated_marks_take_linear_work(monkeypatch, mark):
    lengths = []
    parse = markdown._gfm(markdown._MAX_MARKS).inline.parse

    def counting(source, *arguments):
        lengths.append(len(source))
        return parse(source, *arguments)

    monkeypatch.setattr(markdown._gfm(markdown._MAX_MARKS).inline, "parse", counting)
    text = mark * (DEEP // 5 // len(mark))
    (*_, block) = markdown.read_sections(f"a\n\n{text}", markdown=True)[1][-1].blocks
    assert max(lengths) <= markdown._MAX_TEXT
    assert len("".join(block).replace(" ", "")) >= 0.5 * len(text.replace(" ", ""))
