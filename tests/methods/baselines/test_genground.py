"""GenGround and its parsers."""

import json

import pytest

from cirag_jax.commands import task
from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.genground import (
    GengroundConfig,
    genground,
    parse_deduction,
    parse_grounding,
)
from cirag_jax.runtime.requests import Generate, Generated, Rank, Retrieve
from cirag_jax.types import Passage, Question
from configs.methods import genground as genground_config
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(7)]
BORN, WHERE = "Where was Ada Moen born?", "In which province is Lund?"
EMPTY = "<ref>Empty</ref> <revise></revise>"


def deduced(question, answer):
    return json.dumps({"question": question, "answer": answer})


def run(generator, reader=("Answer: Skane",), *, scores=None, **settings):
    texts = {"generator": list(generator), "reader": list(reader)}
    scores = {f"p{i}": 7.0 - i for i in range(7)} | (scores or {})
    fakes = FakeHandlers({None: PASSAGES}, {}, texts, scores)
    return fakes, fakes.drive(genground(Question("q", QUESTION, ()), GengroundConfig(**settings)))


def test_genground_supported_guesses_are_revised():
    grounded = "<ref>Ada was born in Lund.</ref>\n<revise>Lund</revise>"
    fakes, result = run(
        [deduced(BORN, "Malmo"), EMPTY, grounded, deduced(WHERE, "Skane"), EMPTY, EMPTY, EMPTY],
        max_steps=2,
    )
    assert fakes.requests[1:3] == [Retrieve(BORN, 50), Rank(BORN, tuple(PASSAGES), 10, "passages")]
    first, second = (prompt(r) for r in fakes.received(Generate, "generator")[1:3])
    assert "Text 2." in first and "Text 3." not in first and "memory: Malmo" in first
    assert "Text 3." in second and "Text 2." not in second
    asked = prompt(fakes.received(Generate, "generator")[3])
    assert asked.endswith(f"Known:\n{BORN} Lund")
    assert prompt(fakes.received(Generate, "reader")[0]).endswith(f"{BORN} Lund\n{WHERE} Skane")
    assert result.answer == "Skane"
    assert result.passages == (
        "p3",
        "p4",
        "p5",
        "p0",
        "p1",
        "p2",
        "p6",
    )  # Supporting passages come first.
    assert result.steps[0].notes == {"guess": "Malmo", "answer": "Lund"}
    assert result.parse_errors == {"answer_not_grounded": 1}


def test_genground_repeated_sub_question_becomes_question():
    again = deduced(BORN, "Malmo")
    fakes, result = run([again, EMPTY, again, EMPTY, again], num_passages=3)
    assert [r.query for r in fakes.received(Retrieve)] == [BORN, QUESTION]
    assert result.parse_errors == {"answer_not_grounded": 2, "repeated_query": 2}


def test_genground_unreadable_json_becomes_question():
    fakes, result = run(["Where?", EMPTY, "{"], num_passages=3)
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION]
    assert result.parse_errors == {
        "answer_not_grounded": 1, "deduction_broken_json": 1, "deduction_no_json": 1,
    }  # fmt: skip


def test_genground_no_passages_keeps_the_guess():
    low = {f"p{i}": -1.0 for i in range(7)}
    fakes, result = run([deduced(BORN, "Malmo")], scores=low, max_steps=1, min_score=0.0)
    assert result.steps[0].notes["answer"] == "Malmo" and result.steps[0].passages == ()


def test_genground_keeps_passages_with_any_logit():
    responses = [deduced(BORN, "Malmo"), EMPTY, EMPTY]
    scores = {f"p{i}": -9.0 for i in range(7)}
    _, result = run(responses, scores=scores, max_steps=1, num_passages=5)
    assert len(result.passages) == 5
    _, result = run([responses[0]], scores=scores, max_steps=1, min_score=0.0)
    assert result.passages == ()
    assert genground_config.get_config("small").genground.min_score == 0.3


def test_genground_batches_are_limited():
    fakes, result = run(
        [deduced(BORN, "Malmo"), EMPTY, EMPTY], ["It lies there."], max_steps=1, batch=2,
        max_batches=2,
    )  # fmt: skip
    first, second = (prompt(r) for r in fakes.received(Generate, "generator")[1:])
    assert "Text 1." in first and "Text 2." not in first
    assert "Text 3." in second and "Text 4." not in second
    assert result.parse_errors == {"answer_no_answer_mark": 1, "answer_not_grounded": 1}


def test_genground_needs_match_its_requests():
    needs = GengroundConfig().needs
    assert (needs.roles, needs.rankers) == (("generator", "reader"), ("passages",))
    assert needs.abilities == {"generator": ("json_schema",)}
    assert GengroundConfig(rerank_from=0).needs.rankers == ()
    assert GengroundConfig(constrained=False).needs.abilities == {}


def test_genground_missing_tags_are_counted():
    _, result = run([deduced(BORN, "Malmo"), "Yes."], max_steps=1, num_passages=3)
    assert result.parse_errors == {"answer_not_grounded": 1, "grounding_no_reference": 1}


def test_genground_reader_grounds_answers():
    fakes, result = run(
        [deduced(BORN, "Malmo")],
        ["Answer: Unanswerable", "Answer: Lund", "Answer: Skane"],
        max_steps=1, rerank_from=0, grounding="reader", reader_format="brief",
    )  # fmt: skip
    grounds = fakes.received(Generate, "reader")
    assert BORN in prompt(grounds[0]) and "Unanswerable" in prompt(grounds[0])
    # The reader reads the supporting passages.
    assert QUESTION in prompt(grounds[2]) and "Text 4." in prompt(grounds[2])
    assert "Text 0." not in prompt(grounds[2]) and result.answer == "Skane"
    assert fakes.received(Rank) == []


def test_genground_truncated_grounding_is_ignored():
    cut = Generated("Ada Moen; born in; Lund; located in; the", "length")
    _, result = run(
        [deduced(BORN, "Malmo")], [cut, "Answer: Skane"], num_passages=2,
        max_steps=1, rerank_from=0, grounding="reader", reader_format="chain",
    )  # fmt: skip
    assert result.steps[0].notes["answer"] == "Malmo" and not result.steps[0].kept
    assert result.parse_errors == {"answer_not_grounded": 1, "grounding_truncated": 1}


def test_genground_nothing_grounded_reads_pairs():
    fakes, result = run(
        [deduced(BORN, "Malmo")], ["Answer: Unanswerable", "Answer: Skane"], num_passages=2,
        max_steps=1, rerank_from=0, grounding="reader", reader_format="chain",
    )  # fmt: skip
    assert result.attempts[0].evidence == (f"{BORN} Malmo",) and result.answer == "Skane"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"rerank_from": -1}, "rerank_from=-1 must not be negative"),
        ({"grounding": "page"}, "grounding='page'"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
        ({"grounding": "reader"}, "grounding=reader needs"),
    ],
)
def test_genground_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        GengroundConfig(**settings)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("<ref>Lund  is.</ref> <revise>Lund</revise>", ("Lund is.", "Lund", None)),
        ("<REF>x</REF><revise>y", ("x", "y", None)),
        ("<ref>empty.</ref>", ("", "", None)),
        ("<ref>x</ref>", ("x", "", "no_revision")),
        ("", ("", "", "no_reference")),
    ],
)
def test_parse_grounding_returns_reference_and_answer(text, result):
    assert parse_grounding(text) == result


def test_parsers_mutated_outputs_never_raise():
    outputs = (deduced(BORN, "Lund"), "<ref>x</ref> <revise>y</revise>", EMPTY)
    pieces = ("{", "}", '"', "<", ">", "</ref>", "<revise>", "\\", "\n", "\x00", "\ud800", "[" * 40)
    for text, rng in mutated_texts(outputs, pieces, seed=3):
        result = parse_deduction(text, truncated=rng.random() < 0.5)
        assert result.problem or (result.question and result.guess)
        grounded = parse_grounding(text)
        assert grounded.problem or not grounded.reference or grounded.revised


def test_paper_preset_has_the_defaults():
    paper = genground_config.get_config("paper")
    assert GengroundConfig(**task.plain(paper.genground)) == GengroundConfig()
    ranker = paper.rankers.passages  # Scores are logits.
    assert (ranker.kind, ranker.model) == ("cross_encoder", "BAAI/bge-reranker-v2-m3")
