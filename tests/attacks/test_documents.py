"""Documents with nested, broken and unusual markup: all visible text must reach the passages."""

import re

import pytest
from hypothesis import example
from hypothesis import strategies as st

from cirag_jax.datasets import documents, markdown
from cirag_jax.datasets.documents import LENGTH, read_documents, read_files, split_document
from cirag_jax.types import Passage
from tests.attacks.hostile import DEEP, attack, attempt

# Blocks; each W stands for a new word, and N for a number that is drawn, which may be large.
_BLOCKS = {
    "paragraph": lambda n: "W **W _W_** ~~W~~ `W` [W](u 't') ![W](u) <b>W</b> $W$ W\\* &amp; W",
    "links": lambda n: "[W][r] [W] <https://W.org/> https://W.org [[W]] [[p|W]] [^W]\n\n[r]: u",
    "line": lambda n: "W " + "x" * n * 50 + " W " + "x " * n * 50 + "W",
    "long": lambda n: "W " + f"[W](u) {'a b c ' * n}" * 5 + "**W**",
    "image": lambda n: f"W ![W](data:image/png;base64,{'QUFB' * n * 20}) W",
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
    "html": lambda n: f"<div class='a>b'>W<br>W <p{' a=b' * n}>W</p> W &lt; W</div>",
    "broken html": lambda n: f"<p>W <![foo[ a ]]> W <! b> W {'<a b=' * n}",
    "details": lambda n: "<details><summary>W</summary>\n\nW\n\n</details>\n\nW",
    "comment": lambda n: "W <!-- a --> W\n\n<!-- b\n\nc -->\n\nW",
    "script": lambda n: "<script>a < b</script>\n\nW\n\n<style>c</style>W",
    "note": lambda n: f"W[^{n}]\n\n[^{n}]: W\n\n    W\n\n    - W\n\nW",
    "unused note": lambda n: f"[^n{n}]: W\n\n[^n{n}]: W",
    "nested note": lambda n: "[^a]: W\n    [^b]: W\n    W",
    "marks": lambda n: "W " + "[]!*_`~$|&\\<^("[n % 14] * n + " W",
    "brackets": lambda n: "[" * n + "W" + "](u)" * n + " W",
    "autolinks": lambda n: "W " + "<http:" * n + " W",
    "scripts": lambda n: "W。W、" + "日本語" * n + "\n\nก W\u202e W\u200d W \u2028 W",
}
_FRONTS = (
    *("", "---\ntitle: W\n---\n", "---\ntitle: W: W\n---\n", '+++\ntitle = "W"\n+++\n'),
    *("---\ntitle: W\ntags: [\n---\n", "---\nW\n---\n", "W\n\n", "\ufeff# W\n"),
    "---\ntitle: W\na: " + "{b: " * 5000 + "\n---\n",
)
_DOCUMENTS = st.tuples(
    st.sampled_from(_FRONTS),
    st.lists(st.tuples(st.sampled_from(sorted(_BLOCKS)), st.integers(0, 300)), max_size=6),
)


def _write(front: str, blocks: list[tuple[str, int]]) -> tuple[str, list[str]]:
    """Returns a document, and its visible words, each of which occurs once."""
    # A paragraph, so that no block continues the one before it.
    parts = [_BLOCKS[kind](number) for kind, number in blocks]
    text = front + "".join(f"{part}\n\nW.\n\n" for part in parts) + "W."
    words = [f"zq{number}v" for number in range(text.count("W"))]
    pieces = text.split("W")
    return "".join(p + w for p, w in zip(pieces, [*words, ""], strict=True)), words


def _check(passages: list[Passage], name: str, words: list[str]) -> None:
    shown = " ".join(f"{passage.title}\n{passage.text}" for passage in passages)
    assert set(words) <= set(re.findall(r"zq\d+v", shown))
    assert [passage.id for passage in passages] == [
        f"{name}#{place}" for place in range(1, len(passages) + 1)
    ]
    for passage in passages:
        assert passage.text == " ".join(passage.sentences or ()) and passage.title
        for sentence in passage.sentences or ():
            assert sentence == sentence.strip() != ""
            assert documents._count_words([sentence]) <= 2 * LENGTH


@pytest.mark.parametrize("is_markdown", [True, False])
@example(("", [("broken html", 1)]))  # An AssertionError of Python's HTML parser.
@example(("", [("unused note", 0)]))
@example(("", [("table", 5)]))
@example(("", [("quote", 140)]))
@attack(60, _DOCUMENTS)
def test_document_keeps_all_visible_words(is_markdown, document):
    text, words = _write(*document)
    passages = attempt(lambda: split_document("d", text, "t", markdown=is_markdown))
    assert passages is not None
    # In plain text, front matter and headings are read too.
    _check(passages, "d", words)
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
    assert copied.split() == " ".join(passage.text for passage in alone).split()


_REPEATED = ("[", "![", "<http:", "<a b='", "<!--", ":", "`a ", "$", "*a_ ", "[^", "^[", "> ", "|")


@pytest.mark.parametrize("mark", _REPEATED)
def test_document_repeated_marks_take_linear_work(monkeypatch, mark):
    lengths = []
    parse = markdown._gfm(markdown._MAX_MARKS).inline.parse

    def counting(source, *arguments):
        lengths.append(len(source))
        return parse(source, *arguments)

    monkeypatch.setattr(markdown._gfm(markdown._MAX_MARKS).inline, "parse", counting)
    text = mark * (DEEP // len(mark))
    (*_, block) = markdown.read_sections(f"a\n\n{text}", markdown=True)[1][-1].blocks
    assert max(lengths) <= markdown._MAX_TEXT
    assert len("".join(block).replace(" ", "")) >= 0.5 * len(text.replace(" ", ""))
