"""DRAGIN."""

import itertools

import pytest

from cirag_jax.commands import opening
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Token
from cirag_jax.methods.baselines.dragin import (
    DraginConfig,
    dragin,
    find_need,
    query_of,
    scored_words,
)
from cirag_jax.methods.common.own_prompts import OwnPrompt, run_with
from cirag_jax.runtime.requests import Generate, Generated, Rank, RequestError, Retrieve
from cirag_jax.types import Passage, Question
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
BORN, FINAL = "Ada Moen was born in Lund.", "So the answer is: Skane."
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]
ATTENDED = (
    ("<s>", 0, 0.5),
    (" Ada", 9, 0.3),
    (" prov", 7, 0.2),
    (" was", 8, 0.2),
    (" Moen", 10, 0.1),
)


def said(text, needy="", finish="length", entropy=3.0, received=0.5, attended=ATTENDED):
    """Returns a response with a token per word; the word ``needy`` has a high entropy."""
    words = text.split(" ")
    pieces = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    offsets = itertools.accumulate([0, *map(len, pieces[:-1])])
    tokens = tuple(
        Token(
            piece, -1, entropy=entropy if needy and needy in word else 0.1, offset=offset,
            attended=attended, received=received if needy and needy in word else 0.1,
        )
        for piece, word, offset in zip(pieces, words, offsets, strict=True)
    )  # fmt: skip
    return Generated(text, finish, tokens=tokens)


def run(responses, scores=None, others=None, passages=None, **settings):
    texts = {"generator": list(responses), **(others or {})}
    fakes = FakeHandlers(passages or {None: PASSAGES[:6]}, {}, texts, scores or {})
    return fakes, fakes.drive(dragin(Question("q", QUESTION, ()), DraginConfig(**settings)))


def test_dragin_without_need_keeps_the_text():
    fakes, result = run([said(f"{BORN} {FINAL}")])
    assert fakes.kinds() == ["generator"]
    (request,) = fakes.received(Generate)
    assert request.entropy and request.attention == 100 and not request.logprobs
    assert (result.answer, result.passages, result.parse_errors) == ("Skane", (), {})


def test_dragin_need_retrieves_and_writes_the_sentence_again():
    fakes, result = run([
        said(f"Ada paints. {BORN} More text.", "Lund", received=2.0),
        Generated("Ada Moen was born in Malmo. Other text.", "length"),
        said(FINAL),
    ])  # fmt: skip
    assert fakes.kinds() == ["generator", "Retrieve", "generator", "generator"]
    # "was" is a stop word, "province" begins with "prov", and the order is that of the text.
    assert fakes.received(Retrieve) == [Retrieve("province Ada Moen", 3)]
    ahead, again, last = fakes.received(Generate)
    assert "Text 0." not in prompt(ahead) and "Text 2." in prompt(again)
    assert again.messages[-1].text == "Ada paints." and not again.attention
    assert last.messages[-1].text == "Ada paints. Ada Moen was born in Malmo."
    assert "Text 0." not in prompt(last)
    assert result.answer == "Skane" and result.passages == ("p0", "p1", "p2")
    assert result.steps[0].notes["score"] == pytest.approx(3.0 * 2.0 / 2.5 * 6)


@pytest.mark.parametrize(("threshold", "retrieves"), [(8.9, True), (9.1, False)])
def test_dragin_threshold_decides_about_retrieval(threshold, retrieves):
    responses = [said(BORN, "Lund"), FINAL if retrieves else said(FINAL)]
    fakes, _ = run(responses, threshold=threshold)
    assert ("Retrieve" in fakes.kinds()) == retrieves


def test_find_need_needs_entropy_attention_and_a_content_word():
    for response in (
        said(BORN, "Lund", entropy=0.1),
        said(BORN, "Lund", received=0.0),
        said(BORN, "was"),
    ):
        assert find_need(response, scored_words(response), 1.0) is None
    need = find_need(said(BORN, "Lund"), scored_words(said(BORN, "Lund")), 1.0)
    assert need is not None and [word.text for word in need.words] == ["Lund"]


def test_scored_words_average_the_tokens_of_a_word():
    tokens = (
        Token("Lu", -1, entropy=1.0, offset=0, received=0.2, attended=(("x", 1, 0.4),)),
        Token("nd", -1, entropy=3.0, offset=2, received=0.4),
        Token(".", -1, entropy=9.0, offset=4, received=0.9),
    )
    (word,) = scored_words(Generated("Lund.", "stop", tokens=tokens))
    assert (word.text, word.entropy, word.received) == ("Lund", 2.0, pytest.approx(0.3))
    assert word.attended == {("x", 1): 0.2}


def test_query_of_num_words_keeps_the_most_attended():
    response = said(BORN, "Lund")
    words = scored_words(response)
    need = find_need(response, words, 1.0)
    assert query_of(QUESTION, words, need, 2) == "province Ada"
    assert query_of("", words, need, 9) == "Ada Moen"  # The response before the need also counts.


def test_query_of_leaves_out_words_after_the_need():
    response = said(
        "Ada paints Lund near Skane.", "Lund", attended=((" Ada", 9, 0.3), (" Skane", 1, 0.5))
    )
    words = scored_words(response)
    assert query_of("", words, find_need(response, words, 1.0), 9) == "Ada"


def test_dragin_passages_are_ranked_by_their_best_score():
    second = said("It is in Skane.", "Skane", attended=((" born", 1, 0.5),))
    passages = {"born": [PASSAGES[2], PASSAGES[1]], None: PASSAGES[:3]}
    texts = [said(BORN, "Lund"), BORN, second, "It is in Skane.", said(FINAL)]
    assert run(texts, passages=passages)[1].passages == ("p0", "p2", "p1")


def test_dragin_empty_query_is_replaced_with_the_question():
    fakes, result = run([said(BORN, "Lund", attended=()), FINAL])
    assert fakes.received(Retrieve)[0].query == QUESTION
    assert result.parse_errors == {"query_empty": 1}


def test_dragin_empty_rewriting_keeps_the_sentence():
    _, result = run([said(FINAL, "Skane"), " "])
    assert result.answer == "Skane" and result.parse_errors == {"rewriting_empty": 1}


def test_dragin_text_without_answer_is_continued():
    fakes, result = run([said(BORN, finish="stop"), " Skane."])
    assert fakes.received(Generate)[1].messages[-1].text == f"{BORN} So the answer is:"
    assert result.answer == "Skane" and result.parse_errors == {"no_answer_mark": 1}


@pytest.mark.parametrize("settings", [{"max_rounds": 2}, {"max_chars": 14}])
def test_dragin_limits_end_the_text(settings):
    fakes, _ = run([said("She paints."), said("She sings."), " Skane"], **settings)
    last = fakes.received(Generate)[2]
    assert last.messages[-1].text == "She paints. She sings. So the answer is:"


def test_dragin_repeated_or_empty_text_ends_the_rounds():
    _, result = run([said(BORN), said(BORN), "Skane"])
    assert result.parse_errors == {"no_answer_mark": 1, "repeated_sentence": 1}
    _, result = run(["", ""])
    assert result.parse_errors == {"answer_empty": 1, "no_answer_mark": 1, "text_empty": 1}


def test_dragin_reader_reads_the_passages_if_there_are_any():
    responses, settings = [said(BORN, "Lund"), FINAL], {"reader_format": "brief"}
    fakes, result = run(responses, others={"reader": ["Answer: Lund"]}, **settings)
    assert result.answer == "Lund" and "Text 2." in prompt(fakes.received(Generate, "reader")[0])
    assert run([said(FINAL)], **settings)[1].answer == "Skane"
    failed = run(responses, others={"reader": [RequestError("too long")]}, **settings)[1]
    assert failed.error == "too long" and len(failed.passages) == 3


@pytest.mark.parametrize(
    "responses",
    [
        [said("Hence: Skane.")],
        [said(f"Hence: Skane. {BORN}", "Lund"), BORN],
        [said("Hence: Skane.", "Skane"), " "],
    ],
    ids=["continuation", "before the need", "need without rewriting"],
)
def test_dragin_own_mark_of_the_answer_is_read(responses):
    fakes = FakeHandlers({None: PASSAGES[:6]}, {}, {"generator": responses})
    own = {"generator": OwnPrompt("Mine.", (), {"question": "Q:", "answer": "Hence"})}
    program = dragin(Question("q", QUESTION, ()), DraginConfig())
    result = fakes.drive(run_with(own, program))
    assert result.answer == "Skane" and "no_answer_mark" not in result.parse_errors


def test_dragin_rerank_keeps_the_best_passages():
    fakes, result = run([said(BORN, "Lund"), FINAL], {"p5": 2.0}, rerank_from=9, num_passages=1)
    assert len(fakes.received(Rank)) == 1 and result.passages == ("p5",)


@pytest.mark.parametrize("backend", ["openai", "transformers"])
def test_dragin_backend_without_attention_is_refused(backend):
    config = load_config("configs/methods/dragin.py", [f"--config.generator.backend={backend}"])
    with pytest.raises(UserError, match="not support .*attention.*, which config.dragin needs"):
        opening.check(config, DraginConfig().needs)
    opening.check(load_config("configs/methods/dragin.py"), DraginConfig().needs)


def test_dragin_mutated_responses_never_raise():
    outputs = (f"{BORN} {FINAL}", "Ada's so-called 2 towns. Dr. A. was. ", "。Ｌｕｎｄ、Skåne")
    pieces = (".", "\n", "'", "-", "\x00", "\ud800", " " * 40, "…", "。", "\r", "_", "İ", "ß")
    bad = (("�", 3, float("nan")), ("", -1, 1.0), ("Ada", 2, 0.5))
    for seed in range(5):
        for text, rng in mutated_texts(outputs, pieces, seed):
            response = said(text, rng.choice(["", "Ada", "L"]), attended=rng.choice([bad, ()]))
            if rng.random() < 0.3:  # Tokens of another text, or without positions.
                values = rng.choice([None, float("nan"), 9.0])
                token = Token("x", -1, None, (), values, rng.randint(-1, 50), bad, values)
                response = Generated(text, "stop", tokens=(token,))
            words = scored_words(response)
            need = find_need(response, words, 0.2)
            if need is not None:
                query_of(QUESTION, words, need, 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": -1.0}, "threshold"),
        ({"num_query_words": 0}, "num_query_words"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_dragin_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        DraginConfig(**settings)
