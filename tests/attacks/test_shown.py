"""Pages and terminal output, which hostile input must not control."""

import dataclasses
import html.parser
import io
import json
import pathlib
import unicodedata
import zipfile

from hypothesis import example

from cirag_jax import cli
from cirag_jax.commands.session import own_question
from cirag_jax.datasets import prepare
from cirag_jax.datasets.demo import __main__ as demo_command
from cirag_jax.errors import UserError
from cirag_jax.io import say, visible, write_lines
from cirag_jax.llm.types import Usage
from cirag_jax.reports import console, trace
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from tests.attacks.hostile import TEXTS, attack, attempt
from tests.reports import made_up


class _Markup(html.parser.HTMLParser):
    """The tags of a page with their attributes, and its blocks of JSON data."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.blocks, self._inside = [], [], False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._inside = ("type", "application/json") in attrs
        self.tags.append((tag, tuple(attrs)))

    def handle_endtag(self, tag):
        self._inside = False
        self.tags.append((f"/{tag}", ()))

    def handle_data(self, data):
        if self._inside and data.strip():
            self.blocks.append(json.loads(data))


FILE = pathlib.Path("journal.sqlite")


def _page(text: str) -> _Markup:
    question, prediction, passage = made_up.hostile(text)
    fields, outcome = dataclasses.asdict(question), codec.encode(prediction)
    records = [
        Record(text, fields, outcome, None, 1.0, Usage(), {"generate": 1}, FILE),
        Record(f"{text} again", fields, None, text, 1.0, Usage(), {}, FILE),
    ]
    file = io.StringIO()
    trace.write_page(file, text, records, {passage.id: passage})
    file.getvalue().encode()  # no lone surrogates
    return _Markup(file.getvalue())


_HARMLESS = _page("text")


@example("\ud800\udfff\ud800")
@attack(40, TEXTS)
def test_page_has_harmless_markup(text):
    page = attempt(lambda: _page(text))
    assert page is not None and page.tags == _HARMLESS.tags
    # JSON readers combine two adjacent surrogates into one character.
    assert page.blocks[0]["question"] == json.loads(json.dumps(text))


def _drives_nothing(output: str) -> bool:
    kinds = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    harmless = "\n\t\u200c\u200d"
    return all(c in harmless or unicodedata.category(c) not in kinds for c in output)


@attack(150, TEXTS)
def test_output_does_not_control_terminal(text):
    assert attempt(lambda: _drives_nothing(visible(text)))
    question, prediction, passage = made_up.hostile(text)
    assert _drives_nothing(console.render(prediction, {passage.id: passage}))
    result = {"answer": text, text: [text]}
    printed = cli._printable(result)
    assert _drives_nothing(printed) and "\n" not in printed and "\t" not in printed
    printed.encode()
    assert json.loads(printed) == json.loads(json.dumps(result))  # adjacent surrogates form a pair


def test_say_escapes_unprintable_characters(capsys):
    say("half \ud800 a pair \x1b[2J \u202e\n\tgrüß Gott \u0645\u0631\u062d\u0628\u0627 e\u0301 😀")
    output = capsys.readouterr().err
    assert output == "half \\ud800 a pair \\x1b[2J \\u202e\n\tgrüß Gott مرحبا e\u0301 😀\n"


_EVIL = "x\x1b[2J\u202e"


def test_archive_member_name_is_escaped(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "data_ids_april7.zip", "w") as archive:
        for name in ("train.json", "dev.json", "test.json"):
            archive.writestr(f"{_EVIL}/{name}", "no JSON")
    flags = ["--benchmark=two_wiki", f"--manual_dir={tmp_path}", f"--out={tmp_path / 'out'}"]
    assert prepare.main(flags) == 2
    output = capsys.readouterr().err.splitlines()[-1]  # after the progress bars of TFDS
    assert output.startswith("prepare: ") and "x\\x1b[2J\\u202e/" in output
    assert _drives_nothing(output)


def test_demo_error_is_escaped(capsys, monkeypatch):
    def fail():
        raise UserError(f"{_EVIL}\nis damaged")

    monkeypatch.setattr(demo_command, "build", fail)
    assert demo_command.main([]) == 2
    assert capsys.readouterr().err == "demo: x\\x1b[2J\\u202e is damaged\n"


@attack(60, TEXTS)
def test_own_question_with_any_text(text):
    question = attempt(lambda: own_question(text))
    if question is not None:
        question.question.encode()
        assert question.question.strip() and "\n" not in question.question


def test_write_lines_escapes_surrogates(tmp_path):
    record = {"text": "half \ud800 a pair"}
    write_lines(tmp_path / "x.jsonl", [record])
    assert (tmp_path / "x.jsonl").read_text("utf-8") == '{"text": "half \\ud800 a pair"}\n'
    assert json.loads((tmp_path / "x.jsonl").read_text("utf-8")) == record
