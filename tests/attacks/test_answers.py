"""Hostile answers: empty golds, reasoning text, too long prompts, and odd server variants."""

import json
from typing import Any

import pytest

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.metrics import answer_scores
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.io import replace_surrogates
from cirag_jax.llm import openai_format as wire
from cirag_jax.llm.chat import ChatTokenizer, PromptTooLong, fit_prompt
from cirag_jax.llm.thoughts import drop_thoughts
from cirag_jax.llm.types import Generate, Generated, Message
from cirag_jax.types import Prediction, Question
from tests import tiny_decoder
from tests.attacks.hostile import TEXTS, attack, attempt, st
from tests.llm.faulty_server import completion

PROFILES = st.sampled_from(sorted(answers.PROFILES))
# Words that normalization removes, and others.
GOLDS = st.lists(
    st.sampled_from(["", " ", "The", "a an", "The The", "!!!", ".", "\u200b", "Cork", "yes"])
    | TEXTS,
    max_size=4,
)


@attack(150, GOLDS, PROFILES)
def test_scores_missing_answer_earns_nothing(golds, profile):
    question = attempt(lambda: Question("q", "?", tuple(golds)))
    assert question is not None and all(gold.strip() for gold in question.answers)
    for prediction in (None, Prediction("", "default"), Prediction(" \n", "passage")):
        scores = answer_scores([AnsweredQuestion(question, prediction)], Scoring(profile))
        for ratio in scores.values():
            assert ratio.bottom_Q.tolist() == [bool(question.answers)]
            assert not ratio.top_Q.any()


@attack(150, GOLDS, PROFILES)
def test_scores_gold_as_answer_is_right(golds, profile):
    for gold in Question("q", "?", tuple(golds)).answers:
        attempt(lambda: None)
        assert answers.exact_match(gold, [gold], profile) == 1
        assert answers.accuracy(gold, [gold], profile) == 1
        assert answers.f1(gold, [gold], profile) == 1
        assert answers.exact_match("", [gold], profile) == 0


TAGS = st.sampled_from(
    [
        ("<think>", "</think>"), ("", "</think>"), ("<thinking>", "</thinking>"),
        ("<THINK>\n", "\n</THINK>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ]
)  # fmt: skip
_MARKS = ("think", "thought", "reason", "reflect", "scratch", "<|")
WORDS_ONLY = TEXTS.filter(lambda text: not any(mark in text.lower() for mark in _MARKS))


@attack(200, TAGS, WORDS_ONLY, WORDS_ONLY)
def test_thoughts_of_any_text_never_are_the_answer(tags, thoughts, answer):
    opening, closing = tags
    text = f"{opening}{thoughts}{closing}{answer}"
    response = attempt(lambda: drop_thoughts(Generated(text, "stop")))
    assert response is not None and response.text.strip() == answer.strip()
    assert response.usage.thoughts == 1
    if opening:
        cut = attempt(lambda: drop_thoughts(Generated(opening + thoughts, "length")))
        assert cut is not None and cut.text == ""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.load(tiny_decoder.folder(tmp_path_factory.mktemp("decoder"), "llama"))


_PASSAGES = st.lists(TEXTS.filter(lambda text: "[omitted]" not in text), max_size=5)


@attack(60, _PASSAGES, st.integers(1, 400), st.integers(0, 80))
def test_prompt_of_any_evidence_fits_and_keeps_the_question(tokenizer, passages, limit, room):
    evidence = "\n".join(passages)
    messages = (
        Message("system", "Read.", evidence),
        Message("user", "where?", evidence, " Query: the mill"),
    )
    fitted = attempt(
        lambda: fit_prompt(tokenizer, messages, limit, "truncate", room=room), PromptTooLong
    )
    if fitted is None:
        return
    ids, count = fitted
    shown = tokenizer.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert len(ids) <= limit and 0 <= count <= 2
    assert "where?" in shown and " Query: the mill" in shown
    if not count:
        assert len(ids) == len(tokenizer.encode_prompt(messages))


_REASONS = st.none() | st.sampled_from(
    ["stop", "eos", "end_turn", "eos_token", "length", "max_tokens", "COMPLETE", ""]
)
_CONTENTS = (
    st.none() | TEXTS | st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
)
_COUNTS: Any = st.none() | st.integers() | st.floats() | TEXTS | st.booleans()


@attack(
    150,
    _CONTENTS,
    _REASONS,
    st.dictionaries(
        st.sampled_from(["prompt_tokens", "completion_tokens", "prompt_tokens_details"]), _COUNTS
    ),
)
def test_completion_of_any_server_variant_is_read(content, reason, usage):
    usage.pop("prompt_tokens_details", None)
    body = json.dumps({**completion(content, reason), "usage": usage}).encode()
    request = Generate((Message("user", "who?"),), role="reader", max_tokens=5)
    completed = attempt(lambda: wire.read_completion(body, request))
    assert completed is not None and completed.finish_reason in ("stop", "length")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    assert completed.text == replace_surrogates("".join(part["text"] for part in parts))
    assert (completed.finish_reason == "length") >= (reason in ("length", "max_tokens"))
