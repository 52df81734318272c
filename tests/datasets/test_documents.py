"""Passages from a user's own documents, and documents that cannot be read."""

import logging
import os
import zipfile

import pytest

from cirag_jax.datasets import conversion
from cirag_jax.datasets.documents import (
    LENGTH,
    _count_words,
    from_texts,
    read_documents,
    read_files,
    split_document,
)
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from tests import tiny


def test_read_documents_folder_of_text_and_markdown(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "ada_lovelace.txt").write_text("\ufeffAda wrote notes. She lived in London.\n")
    (tmp_path / "deep" / "b.md").write_text("# Byron\n\nHe was a poet.\n\n## Life\n\nHe left.\n")
    (tmp_path / "c.csv").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    found = read_documents(tmp_path)
    assert found.questions == () and found.triples == {}
    shown = [(p.id, p.title, p.sentences) for p in found.corpus.values()]
    assert shown == [
        ("ada_lovelace.txt#1", "ada lovelace", ("Ada wrote notes.", "She lived in London.")),
        ("deep/b.md#1", "Byron", ("He was a poet.",)),
        ("deep/b.md#2", "Byron: Life", ("He left.",)),
    ]
    assert all(sentences_of(p) == p.sentences for p in found.corpus.values())
    one = read_documents(tmp_path / "ada_lovelace.txt")
    assert list(one.corpus) == ["ada_lovelace.txt#1"]


def test_read_documents_dataset_folder_needs_no_questions(tmp_path):
    folder = tiny.dataset_folder(tmp_path / "data")
    (folder / "questions.jsonl").unlink()
    for path in (folder, folder / "corpus.jsonl"):
        found = read_documents(path)
        assert found.corpus == tiny.dataset().corpus and found.triples


def test_split_document_passages_have_whole_sentences():
    sentence = "The river " + "slowly " * 16 + "flows north."
    text = "\n\n".join([f"{sentence} " * 3, f"{sentence} " * 3, f"{sentence} " * 7])
    found = split_document("d", text, "River")
    assert [len(p.sentences or ()) for p in found] == [3, 3, 5, 2]  # Paragraphs stay together.
    assert all(len(p.text.split()) <= LENGTH for p in found)
    assert " ".join(p.text for p in found).split() == text.split()
    (long,) = split_document("d", "word " * 200, "t")  # A long sentence is not cut.
    assert len(long.text.split()) == 200


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("word " * 250, [100, 100, 50]),  # There is no full stop.
        ("\n".join(["- ten words of an item of a list these"] * 15), [100, 50]),
        ("\n".join(["12) ten words of an item of a list these"] * 15), [100, 50]),
        ("Cells:\n" + "\n".join(["| a | b |"] * 30), [96, 55]),
        ("漢字仮名" * 60, [100, 100, 40]),  # A script without spaces.
        ("x" * 50 * 210, [100, 100, 10]),  # One very long word.
    ],
)
def test_split_document_text_without_full_stop_is_cut(text, sizes):
    found = split_document("d", text, "t")
    assert [_count_words(passage.sentences or ()) for passage in found] == sizes
    assert "".join("".join(p.text.split()) for p in found) == "".join(text.split())


def test_split_document_windows_line_ends_are_equivalent(tmp_path):
    text = "# Ada  \n\nShe wrote notes\nin London.\n\n## Life\n\nShe left.\n"
    for name, end in (("a.md", "\n"), ("b.md", "\r\n"), ("c.md", "\r")):
        (tmp_path / name).write_bytes(text.replace("\n", end).encode())
    found = [(p.title, p.sentences) for p in read_documents(tmp_path).corpus.values()]
    assert found == 3 * [("Ada", ("She wrote notes in London.",)), ("Ada: Life", ("She left.",))]
    assert {(title, body) for _, title, body in read_files(tmp_path)} == {
        ("Ada", "She wrote notes in London.\n\nShe left.")
    }


@pytest.mark.parametrize(
    ("line", "title"),
    [("## C#", "C#"), ("# Ada ##", "Ada"), ("# C# #", "C#"), ("# Ada\t#  ", "Ada"), ("## ##", "t")],
)
def test_split_document_only_separate_marks_close_a_heading(line, title):
    (passage,) = split_document("d", f"{line}\n\nText.", "t")
    assert passage.title == title and passage.text == "Text."


@pytest.mark.parametrize(
    ("fence", "end"),
    [("```", "```"), ("~~~ sh", "~~~~"), ("  ````python", "`````  "), ("```", "``` no\n```")],
)
def test_split_document_comment_in_code_is_no_heading(fence, end):
    text = f"# Ada\n\n{fence}\n# a comment\nrun\n{end}\n\n# Life\n\nShe left."
    code, life = split_document("d", text, "t")
    assert code.title == "Ada" and "# a comment run" in code.text
    assert (life.title, life.text) == ("Ada: Life", "She left.")


def test_split_document_inline_code_is_no_fence():
    found = split_document("d", "```x``` is code.\n\n# Life\n\nShe left.", "t")
    assert [passage.title for passage in found] == ["t", "Life"]


# Lines of Markdown, and the sentences that remain.
MARKDOWN = {
    "A **bold** and *slanted* ~~word~~, `a * b`, and snake_case.": [
        "A bold and slanted word, a * b, and snake_case."
    ],
    "See [the _map_](https://a.org/x_y), [her][ada] and <https://b.org>.\n\n[ada]: https://c.org": [
        "See the map, her and https://b.org."
    ],
    "![A portrait](ada.png) [![badge](b.svg)](https://c.org)": ["A portrait badge"],
    "Before.\n\n<!-- hidden\n\n# also hidden -->\n\nAfter <!-- this --> all.": [
        "Before.",
        "After all.",
    ],
    "| Name | Born |\n| :--- | ---: |\n| *Ada* | 1815 |\n| Byron \\| Lord | |": [
        "Name: Ada; Born: 1815",
        "Name: Byron | Lord",
    ],
    "| Only | names |\n| --- | --- |": ["Only; names"],
    "| | x |\n|-|-|\n| a | b |": ["a; x: b"],
    "- one\n  - two\n    1. three. Four.\n- [x] five": ["one", "two", "1. three.", "Four.", "five"],
    "3) third\n4) fourth": ["3) third", "4) fourth"],
    "> Quoted\n> # text": ["Quoted", "text"],
    "> [!NOTE]\n> Careful.": ["Careful."],
    "One\n\n* * *\n\nTwo\n\n---\n\nThree": ["One", "Two", "Three"],
    "```sh\n# no heading\n```\n\n    code": ["# no heading", "code"],
    "<details><summary>More</summary>\n\nText&nbsp;&amp; H<sub>2</sub>O.\n\n</details>": [
        "More",
        "Text & H2O.",
    ],
    "<table><tr><td>a</td><td>b</td></tr></table>\n\n<style>p {}</style>": ["a b"],
    "Costs $5 and $6, or $x_1$.": ["Costs $5 and $6, or $x_1$."],
    "In [[Lovelace, Ada|Ada]] and [[London]].": ["In Ada and London."],
    "Known[^1].\n\n[^1]: From a letter.": ["Known.", "From a letter."],
    "Line one  \nline two\\\nthree \\* four": ["Line one line two three * four"],
    "One line\nand another\n---\n\nEnd.": ["One line and another", "End."],
}


@pytest.mark.parametrize(("text", "sentences"), MARKDOWN.items())
def test_split_document_markdown_marks_are_removed(text, sentences):
    found = split_document("d", text, "t", markdown=True)
    assert [sentence for passage in found for sentence in passage.sentences or ()] == sentences


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("Ada\n===\n\nText.\n\nLife\n----\n\nText.", ["Ada", "Ada: Life"]),
        ("# *Ada* [L.](x) {#ada}\n\nText.", ["Ada L."]),
        ("- # item\n\n  Text.", ["t"]),
        ("---\ntitle: Ada\ntags: [a, b]\n---\nText.\n\n# Life\n\nText.", ["Ada", "Ada: Life"]),
        ("\n---\ntitle: 1984\n...\nText.", ["1984"]),
        ('+++\ntitle = "Ada"\n[x]\ny = 1\n+++\n\nText.', ["Ada"]),
        (
            "---\ntitle: Ada: a life\ndate: 2024-13-01\n---\nText.",
            ["Ada: a life"],
        ),  # No valid YAML.
        ("---\n# a comment\nauthor: x\n---\n\n# Ada\n\nText.", ["Ada"]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_split_document_front_matter_and_headings_are_titles(text, titles, end):
    found = split_document("d", text.replace("\n", end), "t", markdown=True)
    assert [passage.title for passage in found] == titles
    assert {passage.text for passage in found} <= {"Text.", "item Text."}


def test_split_document_prose_between_rules_is_kept():
    (passage,) = split_document("d", "---\nAda wrote.\n\n---\n\nShe left.", "t", markdown=True)
    assert passage.sentences == ("Ada wrote.", "She left.")


def test_split_document_plain_text_is_not_markdown():
    text = "---\ntitle: Ada\n---\n2*3*4 is List<String>, _so_.\n[Bob]: hi\n\n|a|b|\n|-|-|\n|*c*|d|"
    (passage,) = split_document("d", text, "t")
    assert passage.title == "Ada"
    assert passage.sentences == ("2*3*4 is List<String>, _so_.", "[Bob]: hi", "a: *c*; b: d")


def test_read_documents_skipped_files_are_named(tmp_path, caplog, monkeypatch):
    (tmp_path / "a.md").write_text("Ada wrote.")
    (tmp_path / "empty.md").write_text("---\ntitle: x\n---\n")
    (tmp_path / "deep").mkdir()
    for name in ("1.png", "2.png", "3.png", "4.PNG", "b.pdf", "LICENSE", ".hidden.png"):
        (tmp_path / "deep" / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert [p.id for p in read_documents(tmp_path).corpus.values()] == ["a.md#1"]
    assert caplog.messages == [
        f"{tmp_path}: skipped 7 files: 4 .png (deep/1.png, deep/2.png, deep/3.png, ...), "
        "1 without a suffix (deep/LICENSE), 1 unreadable .pdf (deep/b.pdf), "
        "1 without text (empty.md)."
    ]
    caplog.clear()
    monkeypatch.setattr(conversion, "is_installed", lambda suffix: False)
    read_documents(tmp_path)
    (message,) = caplog.messages
    assert "1 .pdf (deep/b.pdf)" in message
    assert "to read .pdf files, pip install -r requirements-documents.txt." in message


def test_read_documents_odd_bytes_in_names_are_escaped(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    for name in (b"a_\xe9.txt", b"a_\xe8.txt", "日本.md".encode()):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(b"Ada wrote.")
    found = read_documents(os.fsdecode(folder))
    assert found.name == r"caf\xe9"
    assert {p.id: p.title for p in found.corpus.values()} == {
        r"a_\xe8.txt#1": r"a \xe8",
        r"a_\xe9.txt#1": r"a \xe9",
        "日本.md#1": "日本",
    }


@pytest.mark.parametrize("name", ["a.md", "a.html", "a.txt"])
def test_read_documents_escaped_half_surrogates_are_replaced(tmp_path, name):
    text = '---\ntitle: "Ada\\ud800"\n---\n\nA&#xD800; b.'
    (tmp_path / name).write_text(text)
    for passage in read_documents(tmp_path).corpus.values():
        f"{passage.title} {passage.text}".encode()


def test_from_texts_half_surrogate_is_refused():
    with pytest.raises(UserError, match=r"documents\[1\] is not valid UTF-8: it contains half"):
        from_texts(["Ada.", "half \udc00"])


def test_read_documents_converter_missing_is_reported(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(b"x")
    monkeypatch.setitem(conversion._PACKAGES, ".pdf", ("not_installed",))
    with pytest.raises(UserError, match=r"reading .*a\.pdf needs not_installed, .*documents\.txt"):
        read_documents(tmp_path / "a.pdf")


def test_read_documents_html_main_text_is_read(tmp_path):
    page = (
        "<html><head><meta charset=latin-1><title>Ada &amp; co</title></head><body>"
        "<nav>Menu</nav><p>Caf\xe9 <b>one</b>.</p><script>x</script><h2>Life</h2><ul><li>a</ul>"
        "<table><tr><th>A<th>B</tr><tr><td>1<td>2</tr></table></body></html>"
    )
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    found = [(p.title, p.sentences) for p in read_documents(tmp_path).corpus.values()]
    assert found == [("Ada & co", ("Caf\xe9 one.",)), ("Ada & co: Life", ("a", "A: 1; B: 2"))]


def test_read_documents_docx_has_headings_and_tables(tmp_path):
    def paragraph(text, style=""):
        properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"

    cells = "".join(f"<w:tr><w:tc>{paragraph(c)}</w:tc></w:tr>" for c in ("Born", "1815"))
    body = paragraph("Ada", "Heading1") + paragraph("She wrote.") + f"<w:tbl>{cells}</w:tbl>"
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as file:
        file.writestr("[Content_Types].xml", f'<Types xmlns="{package}/content-types"/>')
        file.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
            f'Type="{office}/officeDocument" Target="word/document.xml"/></Relationships>',
        )
        file.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
        )
    (passage,) = read_documents(tmp_path).corpus.values()
    assert (passage.title, passage.sentences) == ("Ada", ("She wrote.", "Born", "1815"))


def test_read_documents_pdf_text_is_read(tmp_path):
    drawing = b"BT /F 12 Tf 72 720 Td (Ada wrote notes.) Tj 0 -14 Td (She left.) Tj ET"
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%b\nendstream" % (len(drawing), drawing),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    content = b"%PDF-1.4\n"
    places = []
    for number, value in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%b\nendobj\n" % (number, value)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 6\n0000000000 65535 f \n%btrailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    (tmp_path / "ada_l.pdf").write_bytes(content + end % (table, len(content)))
    (passage,) = read_documents(tmp_path).corpus.values()
    assert (passage.title, passage.sentences) == ("ada l", ("Ada wrote notes.", "She left."))


def test_from_texts_first_words_are_the_title():
    found = from_texts(["Ada Lovelace was born in London in 1815.", " "])
    (passage,) = found.corpus.values()
    assert (passage.id, passage.title) == ("document 1#1", "Ada Lovelace was born in London")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text \(byte 3\); save it as UTF-8"),
        ("a.txt", b"PK\0\0", r"a\.txt is not UTF-8 text \(byte 2\)"),
        ("a.txt", b" \n", "has no text"),
        ("a.png", b"x", r"are .txt and .md files, or a corpus.jsonl, .* skipped 1 file: 1 \.png"),
        ("a.pdf", b"x", r"has no text; .* skipped 1 file: 1 unreadable \.pdf \(a\.pdf\)\.$"),
    ],
)
def test_read_documents_unreadable_path_is_reported(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_documents(tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a file"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no text"):
        from_texts([""])


@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize(
    ("text", "title", "sentences"),
    [
        ("Ada Lovelace\n\nShe wrote.", "Ada Lovelace", ["She wrote."]),
        ("\n  The Heron (a ketch), 1887 \r\n\r\nLost.", "The Heron (a ketch), 1887", ["Lost."]),
        ("1984\n\nText.", "1984", ["Text."]),
        ("Ada\n===\n\nShe wrote.", "Ada", ["She wrote."]),
        ("Ada", "file", ["Ada"]),  # No text follows.
        ("Dear Ada,\n\nHello.", "file", ["Dear Ada,", "Hello."]),
        ("She wrote.\n\nShe left.", "file", ["She wrote.", "She left."]),
        ("She wrote\nto us\n\nand left.", "file", ["She wrote to us", "and left."]),
        (f"{'so ' * 13}\n\nText.", "file", [" ".join(["so"] * 13), "Text."]),
        ("a" * 51 + "\n\nText.", "file", ["a" * 51, "Text."]),
    ],
)
def test_split_document_first_line_is_title(text, title, sentences, markdown):
    """A first line without the form of a sentence is a title, and no evidence."""
    (passage,) = split_document("n", text, "file", markdown=markdown)
    assert (passage.title, passage.text) == (title, " ".join(passage.sentences or ()))
    assert "".join(passage.sentences or ()) == "".join(sentences)


def test_split_document_first_line_list_or_byline_is_no_title():
    for text in ("- Ada\n\nText.", "1. Ada\n\nText.", "Ada\n\n# Life\n\nText."):
        first = split_document("n", text, "file")[0]
        assert first.title == "file" and "Ada" in first.text
