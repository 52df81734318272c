"""The extraction formats of KiRAG and TRACE."""

import importlib.metadata

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.common import dialects, extraction_prompts
from cirag_jax.methods.common.extraction import ExtractionSettings, extract, extractor_version
from cirag_jax.runtime.requests import Generate
from cirag_jax.types import Passage, Triple
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

ULE = Passage("p", "Ule", "The Ule flows to Tarn. Its mouth is Osk Bay.")
FLOWS = ("Ule", "flows to", "Tarn")


def parse(text, dialect="kirag", reason="stop"):
    return dialects.parse(text, reason, dialect, ULE)


@pytest.mark.parametrize(
    ("text", "expected", "problem"),
    [
        ("<Ule; flows to; Tarn>", (FLOWS,), None),
        ("1. <Ule;flows to;Tarn>\n<ule; Flows to; tarn>", (FLOWS,), None),
        ("<Ule; has; a mouth, a source>", (("Ule", "has", "a mouth, a source"),), None),
        ("<Ule; in; a; b>", (("Ule", "in", "a; b"),), None),
        ("<head entity; relation; tail entity>\n<Ule; flows to; Tarn>", (FLOWS,), "wrong_shape"),
        ("<head; relation; tail>", (), "wrong_shape"),
        ("<Ule; flows> <Ule; flows to; Tarn>", (FLOWS,), "wrong_shape"),
        ("<Ule; ; Tarn>", (), "wrong_shape"),
        ("Ule flows to Tarn", (), "no_triples"),
        ("", (), "no_triples"),
    ],
)
def test_parse_kirag_returns_triples_and_problem(text, expected, problem):
    assert parse(text) == (expected, problem)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<Osk Bay; is mouth of; Ule>", ("Osk Bay", "is mouth of", "Ule")),
        ("<The river; flows to; Tarn>", FLOWS),  # The title replaces an unknown head.
        ("<Tarn; Ule; flows to; Tarn>", FLOWS),  # "Tarn; Ule" is an unknown head.
    ],
)
def test_parse_trace_returns_triple(text, expected):
    assert parse(text, "trace") == ((expected,), None)


def test_parse_truncated_response_keeps_complete_triples():
    assert parse("<Ule; flows to; Tarn>\n<Ule; mo", reason="length") == ((FLOWS,), "truncated")
    assert parse("<Ule; flows to; Tarn>", reason="length") == ((FLOWS,), None)
    assert parse("Sure", reason="length") == ((), "truncated")


@pytest.mark.parametrize("dialect", dialects.DIALECTS[1:])
def test_worked_example_is_parsed_and_recognized(dialect):
    example = dialects.messages(ULE, dialect)[2].text
    triples, problem = dialects.parse(example, "stop", dialect, extraction_prompts.EXAMPLE)
    assert len(triples) >= 6 and problem is None
    if dialect == "trace":
        assert {head for head, _, _ in triples} == {extraction_prompts.EXAMPLE.title}
    assert all(extraction_prompts.is_example(triple, ULE) for triple in triples)
    assert dialects.messages(ULE, dialect)[3].text == extraction_prompts.passage_turn(ULE)


@pytest.mark.parametrize("dialect", dialects.DIALECTS[1:])
def test_extract_dialect_makes_one_call(dialect):
    said = "<Ule; flows to; Tarn>\n<Ule; mouth; Osk Bay>\n<Agnes Thorley; built; Ule>"
    fakes = FakeHandlers({}, {}, {"extractor": [said]})
    result = fakes.drive(extract(ULE, ExtractionSettings(dialect=dialect)))
    (asked,) = fakes.received(Generate)
    assert asked.max_tokens == 512 and "<head; relation; tail>" in prompt(asked)
    kept = (Triple(*FLOWS, "p", 0), Triple("Ule", "mouth", "Osk Bay", "p", 1))
    if dialect == "trace":  # The title replaces Agnes, who is not in the text.
        kept += (Triple("Ule", "built", "Ule", "p", 0),)
    else:
        assert result.parse_errors == {"triples: example": 1}
    assert result.triples == kept


def test_extract_unreadable_response_fails():
    result = FakeHandlers({}, {}, {"extractor": ["No facts."]}).drive(
        extract(ULE, ExtractionSettings(dialect="kirag"))
    )
    assert (result.status, result.cause) == ("failed", "answer: no_triples")
    assert result.parse_errors == {"triples: no_triples": 1}


def test_extractor_version_changes_with_dialect():
    assert len({extractor_version(d)["prompt"] for d in dialects.DIALECTS}) == 3
    cut = importlib.metadata.version("sentencex")  # The splitter determines a triple's sentence.
    assert extractor_version() == {
        "prompt": extraction_prompts.prompt_hash(),
        "parser": 1,
        "sentencex": cut,
    }
    assert "dialect" not in ExtractionSettings().identity
    assert ExtractionSettings(dialect="trace").identity["dialect"] == "trace"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dialect": "rdf"}, "openie, kirag, trace"),
        ({"dialect": "kirag", "constrained": True}, "constrained=true needs dialect=openie"),
    ],
)
def test_extraction_settings_invalid_dialect_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        ExtractionSettings(**settings)


def test_parse_mutated_outputs_never_raise():
    pieces = ("<", ">", ";", "; ;", "\n", "head entity", "\x00", "\ud800", "<" * 40, ";" * 9)
    outputs = [dialects.messages(ULE, dialect)[2].text for dialect in dialects.DIALECTS[1:]]
    for text, rng in mutated_texts(outputs, pieces, seed=5, max_edits=6):
        for dialect in dialects.DIALECTS[1:]:
            triples, problem = parse(text, dialect, rng.choice(("stop", "length")))
            assert triples or problem
            assert all(len(t) == 3 and all(p.strip() and "\n" not in p for p in t) for t in triples)
