"""FLARE."""

import itertools
import math

import pytest

from cirag_jax.commands import opening
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Token
from cirag_jax.methods.baselines.flare import (
    FlareConfig,
    flare,
    improbable_spans,
    interleaved,
    masked,
    parse_question,
    probability,
)
from cirag_jax.methods.common.writing import sentence_of
from cirag_jax.runtime.requests import Generate, Generated, Rank, RequestError, Retrieve
from cirag_jax.types import Passage, Question
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
BORN, FINAL = "Ada Moen was born in Lund.", "So the answer is: Skane."
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]


def said(text, *improbable, finish="length", low=0.1):
    """Returns a response with one token per word; ``improbable`` words have a low probability."""
    words = text.split(" ")
    pieces = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    offsets = itertools.accumulate([0, *map(len, pieces[:-1])])
    tokens = tuple(
        Token(piece, -1, math.log(low if word.strip(".") in improbable else 0.9), offset=offset)
        for piece, word, offset in zip(pieces, words, offsets, strict=True)
    )
    return Generated(text, finish, tokens=tokens)


def run(responses, scores=None, passages=None, others=None, **settings):
    texts = {"generator": list(responses), **(others or {})}
    fakes = FakeHandlers(passages or {None: PASSAGES[:6]}, {}, texts, scores or {})
    return fakes, fakes.drive(flare(Question("q", QUESTION, ()), FlareConfig(**settings)))


def test_flare_certain_sentences_need_no_retrieval():
    fakes, result = run([said(f"{BORN} {FINAL}"), said(f"{FINAL} More.")])
    assert fakes.kinds() == ["generator", "generator"]
    assert (result.answer, result.passages, result.parse_errors) == ("Skane", (), {})
    first, second = fakes.received(Generate)
    assert first.logprobs and not first.continue_final and first.messages[-1].role == "user"
    assert second.continue_final and second.messages[-1].text == BORN


def test_flare_improbable_token_retrieves_and_writes_again():
    rewritten = said(f"Ada Moen was born in Malmo. {FINAL}", "Malmo.")
    fakes, result = run([said(f"{BORN} Then.", "Lund"), rewritten, said(FINAL)])
    assert fakes.kinds() == ["generator", "Retrieve", "generator", "generator"]
    assert fakes.received(Retrieve) == [Retrieve("Ada Moen was born in", 5)]
    ahead, again, last = map(prompt, fakes.received(Generate))
    assert "Text 0." not in ahead and "Text 4." in again and "Text 0." not in last
    assert "Malmo" in last and "Lund" not in last  # The rewritten sentence counts.
    step = result.steps[0]
    assert (step.query, step.thought) == ("Ada Moen was born in", "Ada Moen was born in Malmo.")
    assert step.notes["look_ahead"] == BORN and step.notes["lowest_probability"] < 0.2
    assert result.passages == ("p0", "p1", "p2", "p3", "p4") and result.answer == "Skane"


@pytest.mark.parametrize(("threshold", "retrieves"), [(0.05, False), (0.5, True)])
def test_flare_threshold_decides_about_retrieval(threshold, retrieves):
    responses = [said(FINAL, "Skane")] + [said(FINAL)] * retrieves
    fakes, _ = run(responses, threshold=threshold)
    assert ("Retrieve" in fakes.kinds()) == retrieves


def test_flare_query_threshold_masks_tokens_of_the_query():
    fakes, _ = run([said(FINAL, "Skane", low=0.15), said(FINAL)], query_threshold=0.1)
    assert fakes.received(Retrieve)[0].query == FINAL


def test_flare_query_sentence_is_the_complete_sentence():
    fakes, _ = run([said(FINAL, "Skane"), said(FINAL)], query="sentence")
    assert fakes.received(Retrieve)[0].query == FINAL


def test_flare_passages_are_ranked_by_their_best_score():
    town, province = f"{BORN} Then.", "It is in Skane. Then."
    texts = [said(town, "Lund"), said(town), said(province, "Skane"), said(province), said(FINAL)]
    passages = {"Ada Moen was born in": PASSAGES[:3], "It is in": [PASSAGES[2], PASSAGES[1]]}
    assert run(texts, passages=passages)[1].passages == ("p0", "p2", "p1")


def test_flare_generated_queries_are_interleaved():
    ahead = said("Ada Moen was born in Lund in Skane. Then.", "Moen", "Lund", "Skane")
    questions = ["Question: Who was born?\nx", "Where was Ada born?"]
    passages = {"Who was born?": PASSAGES[:3], None: PASSAGES[2:6]}
    fakes, result = run(
        [ahead, said(FINAL)], passages=passages, others={"questioner": questions},
        query="generated", max_questions=2, num_passages=3,
    )  # fmt: skip
    asked = [prompt(request) for request in fakes.received(Generate, "questioner")]
    assert [text.rpartition("Term: ")[2] for text in asked] == ["Moen", "Lund"]
    assert [r.query for r in fakes.received(Retrieve)] == ["Who was born?", "Where was Ada born?"]
    assert result.steps[0].passages == ("p0", "p2", "p1")
    assert result.steps[0].more_queries == ("Where was Ada born?",)
    assert FlareConfig(query="generated").needs.roles == ("generator", "questioner")


def test_flare_empty_questions_accept_the_sentence():
    fakes, result = run([said(FINAL, "Skane")], others={"questioner": [" "]}, query="generated")
    assert "Retrieve" not in fakes.kinds() and result.answer == "Skane"
    assert result.parse_errors == {"question_empty": 1, "query_empty": 1}


def test_flare_sentence_of_improbable_tokens_is_accepted():
    fakes, result = run([said("Skane. The.", "Skane"), said(FINAL)])
    assert "Retrieve" not in fakes.kinds() and result.parse_errors == {"query_empty": 1}


def test_flare_first_retrieval_shows_passages_of_the_question():
    fakes, result = run([said(FINAL)], first_retrieval=True)
    assert fakes.received(Retrieve) == [Retrieve(QUESTION, 5)]
    assert "Text 4." in prompt(fakes.received(Generate)[0]) and result.steps[0].query == QUESTION


def test_flare_text_without_answer_is_continued():
    fakes, result = run([said(BORN, finish="stop"), Generated(" Skane.", "stop")])
    assert fakes.received(Generate)[1].messages[-1].text == f"{BORN} So the answer is:"
    assert result.answer == "Skane" and result.parse_errors == {"no_answer_mark": 1}


@pytest.mark.parametrize("settings", [{"max_rounds": 2}, {"max_tokens": 3}])
def test_flare_limits_end_the_text(settings):
    more = [said("She paints. She."), said("She sings. She.")]
    fakes, _ = run([*more, " Skane"], **settings)
    last = fakes.received(Generate)[2]
    assert last.messages[-1].text == "She paints. She sings. So the answer is:"


def test_flare_repeated_or_empty_sentence_ends_the_text():
    _, result = run([said(f"{BORN} Then."), said(f"{BORN} Then."), "Skane"])
    assert result.parse_errors == {"no_answer_mark": 1, "repeated_sentence": 1}
    _, result = run(["", ""])
    assert result.answer == "" and result.parse_errors == {
        "answer_empty": 1, "no_answer_mark": 1, "sentence_empty": 1,
    }  # fmt: skip


def test_flare_empty_rewriting_keeps_the_sentence():
    _, result = run([said(FINAL, "Skane"), " "])
    assert result.answer == "Skane" and result.parse_errors == {"rewriting_empty": 1}


def test_flare_reader_reads_the_passages_if_there_are_any():
    settings = {"reader_format": "brief"}
    responses = [said(FINAL, "Skane"), said(FINAL)]
    fakes, result = run(responses, others={"reader": ["Answer: Lund"]}, **settings)
    assert result.answer == "Lund" and "Text 4." in prompt(fakes.received(Generate, "reader")[0])
    assert run([said(FINAL)], **settings)[1].answer == "Skane"  # No passages, no reader.
    failed = run(responses, others={"reader": [RequestError("too long")]}, **settings)[1]
    assert failed.error == "too long" and len(failed.passages) == 5


def test_flare_rerank_keeps_the_best_passages():
    fakes, result = run(
        [said(FINAL, "Skane"), said(FINAL)], {"p5": 2.0}, rerank_from=50, num_passages=1
    )
    assert fakes.received(Retrieve)[0].k == 50 and len(fakes.received(Rank)) == 1
    assert result.passages == ("p5",)


@pytest.mark.parametrize("server", ["openai", "transformers"])
def test_flare_server_without_abilities_is_refused(server):
    flags = ["--config.generator.backend=openai", f"--config.generator.server={server}"]
    config = load_config("configs/methods/flare.py", flags)
    with pytest.raises(UserError, match="does not support .*, which config.flare needs"):
        opening.check(config, FlareConfig().needs)
    opening.check(load_config("configs/methods/flare.py"), FlareConfig().needs)


def test_probability_of_missing_or_bad_numbers_is_0():
    values = (None, float("nan"), float("-inf"), 1.0)
    assert [probability(Token("", -1, value)) for value in values] == [0.0, 0.0, 0.0, 1.0]


def test_interleaved_takes_turns_and_keeps_passages_once():
    first, second = PASSAGES[:2], (PASSAGES[0], PASSAGES[3], PASSAGES[4])
    assert [p.id for p in interleaved([first, second, ()])] == ["p0", "p1", "p3", "p4"]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("\nWho is Ada?\nmore", "Who is Ada?"),
        ('**Question:** "Who?"', "Who?"),
        ("Note: Who?", "Note: Who?"),
        ("", ""),
        ("x" * 999, "x" * 300),
    ],
)
def test_parse_question_returns_the_first_line(text, question):
    assert parse_question(text) == question


def test_flare_parsers_mutated_texts_never_raise():
    outputs = (f"{BORN} {FINAL}", "Question: Who was born in Lund?", " Dr. A. was. ")
    pieces = (".", "\n", "?", ":", '"', "\x00", "\ud800", " " * 40, "…", "。", "\r")
    for seed in range(5):
        for text, rng in mutated_texts(outputs, pieces, seed):
            assert len(parse_question(text)) <= 300
            response = said(text)
            if rng.random() < 0.3:  # Tokens of another text, or without positions.
                offset = rng.randint(-1, 50)
                tokens = (Token("x", -1, rng.choice([None, -9.0]), offset=offset),)
                response = Generated(text, "stop", tokens=tokens)
            sentence = sentence_of(response)
            masked(sentence, 0.5)
            improbable_spans(sentence, 0.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": 1.5}, "threshold"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"query": "all"}, "query='all' is not one of masked, generated, sentence"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_flare_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        FlareConfig(**settings)


def test_flare_presets_of_papers_have_their_values():
    dualrag, cirag, paper = (
        load_config(f"configs/methods/flare.py:{name}") for name in ("dualrag", "cirag", "paper")
    )
    assert (dualrag.flare.rerank_from, cirag.flare.rerank_from) == (50, 0)
    assert (dualrag.flare.max_rounds, cirag.flare.max_rounds) == (5, 4)
    for config in (dualrag, cirag):
        assert (config.flare.threshold, config.flare.num_passages) == (0.2, 10)
        assert config.generator.max_tokens == 64 and config.data.limit == 1000
    assert (paper.flare.threshold, paper.flare.query_threshold) == (0.8, 0.4)
