"""KiRAG's prompts and parsers."""

import random

import pytest

from cirag_jax.methods.kirag import prompts
from cirag_jax.types import Passage, Question, SubQuestion

BORN = "<Ada Moen; born in; Lund>"
TOWN = "<Lund; province; Skane>"
TALL = "<Ada Moen; height; 172 cm>"
CANDIDATES = [TALL, TOWN, BORN]
QUESTION = "In which province was Ada Moen born?"


def parse(text, chain=(), kind="triple", candidates=CANDIDATES, **settings):
    return prompts.parse_completion(text, candidates, chain, kind, **settings)


def test_constructor_messages_end_with_the_chain():
    messages = prompts.constructor_messages(QUESTION, CANDIDATES, [BORN], "triple")
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "knowledge triples" in messages[0].text and prompts.FINAL in messages[0].text
    assert messages[2].text.endswith(f"{prompts.FINAL}: Norway.")  # A complete chain.
    asked = messages[3]
    assert asked.observation == "\n".join(CANDIDATES)  # Truncation may drop it.
    assert asked.ending.endswith(f"Question: {QUESTION}")
    assert messages[4].text == f"Thought: {BORN}"


def test_constructor_messages_chain_in_user_turn_with_opening():
    last = prompts.constructor_messages(QUESTION, CANDIDATES, [BORN], "triple", continues=False)[-1]
    assert last.role == "user" and last.text.endswith(f"Question: {QUESTION}\nThought: {BORN}")
    for chain, begun in (([], "Thought: <"), ([BORN], f"Thought: {BORN}, <")):
        made = prompts.constructor_messages(QUESTION, CANDIDATES, chain, "triple", opening=True)
        assert made[-1].text == begun


@pytest.mark.parametrize("kind", ["sentence", "passage"])
def test_render_chain_each_sentence_or_passage_is_one_line(kind):
    made = prompts.constructor_messages(QUESTION, ["A:  one\ntwo."], ["B: three."], kind)
    assert made[3].observation == "A: one two." and made[-1].text == "Thought:\nB: three.\n"
    assert f"\n{prompts.FINAL}: Norway." in made[2].text


def test_shown_inner_brackets_are_replaced():
    assert prompts.shown("<a <b>; is; c>", "triple") == "<a (b); is; c>"
    text = prompts.shown("<a <b>; is; c>", "triple")
    assert parse(text, candidates=["<a <b>; is; c>"]).candidate == 0


def test_demonstration_uses_annotated_chains():
    evidences = (("Ada Moen", "born in", "Lund"), ("Lund", "province", "Skane"))
    annotated = Question("q", QUESTION, ("Skane",), supporting=("p",), evidences=evidences)
    shown = prompts.demonstration(annotated)
    assert shown is not None and shown[0].text == f"Question: {QUESTION}"
    assert shown[1].text == f"Thought: {BORN}, {TOWN}. {prompts.FINAL}: Skane."
    messages = prompts.constructor_messages(
        QUESTION, CANDIDATES, [], "triple", demonstrations=[shown]
    )
    assert messages[1:3] == shown and "Norway" not in "".join(m.text for m in messages)
    steps = (
        SubQuestion("Ada Moen >> birthplace", "Lund"),
        SubQuestion("What is the province of #1 ?", "Skane"),
    )
    decomposed = Question("q", QUESTION, ("Skane",), decomposition=steps)
    turns = prompts.demonstration(decomposed)
    assert turns is not None
    assert "<Ada Moen; birthplace; Lund>, <province Lund; is; Skane>" in turns[1].text
    assert prompts.demonstration(Question("q", "Who?", ("x",), supporting=("p",))) is None


@pytest.mark.parametrize(
    ("text", "chain", "candidate", "answer", "errors"),
    [
        (f" {BORN}, {TOWN}. So the answer is: Skane.", [], 2, "Skane", ()),
        (f"{BORN}, {TOWN}. So the answer is Skane", [BORN], 1, "Skane", ()),  # The first new one.
        (". So the answer is: Skane.\nQuestion: and", [BORN, TOWN], None, "Skane", ()),
        ("<ada moen; Born in; Lund.>", [], 2, None, ()),  # Equal in normal form.
        (f"<Ada; was; here>, {TOWN}", [], 1, None, ("not_a_candidate",)),
        (
            "<Lund; province; Skane. So the answer is Skane",
            [],
            1,
            "Skane",
            (),
        ),  # Unclosed.
        ("", [], None, None, ("empty",)),
        ("I cannot say.", [], None, None, ("no_unit",)),
        (BORN, [BORN], None, None, ("no_unit",)),
        (f"So the answer is: Skane, by {BORN}", [], None, f"Skane, by {BORN}", ()),
        ("<;;>", [], None, None, ("no_unit",)),
        ("< >" * 9 + "<x>" * 99, [], None, None, ("too_many_units", *["not_a_candidate"] * 20)),
    ],
)
def test_parse_completion_first_new_triple_counts(text, chain, candidate, answer, errors):
    completion = parse(text, chain)
    assert (completion.candidate, completion.answer, completion.parse_errors) == (
        candidate,
        answer,
        errors,
    )


def test_parse_completion_cutoff_matches_similar_candidate():
    near = "<Ada Moen; was born in; Lund>"
    assert parse(near).candidate is None and parse(near).written == near
    assert parse(near, cutoff=0.8).candidate == 2
    assert parse("<Bo Ek; lives in; Rome>", cutoff=0.8).candidate is None
    # Units of the chain are not matched.
    assert parse(near, [BORN], cutoff=0.8).candidate is None


def test_parse_completion_truncated_triple_matches_prefix():
    assert parse("<Ada Moen; born", truncated=True).candidate == 2
    assert parse("<Ada Moen; born").candidate is None
    lost = parse("<Ada Moen; died", truncated=True)
    assert lost.candidate is None and lost.parse_errors == ("truncated",)
    # A triple that is followed by another one is complete.
    assert parse("<Ada Moen; died>, <Lund; pro", truncated=True).candidate == 1


def test_parse_completion_opening_precedes_the_text():
    assert parse("Ada Moen; born in; Lund>, <x", opening=True).candidate == 2
    assert parse("Ada Moen; born in; Lund>").candidate is None


def test_parse_completion_no_unit_takes_first_sentence():
    assert parse("Ada Moen is tall. She is a judge.").written == "Ada Moen is tall."
    assert parse(" So the answer is: Skane.").written == "So the answer is: Skane."
    # A period ends the last unit of the chain, before the answer.
    assert parse(". So the answer is: Skane.").written == "So the answer is: Skane."
    assert parse(" ., ;\nSo it is.").written == "So it is."
    assert parse(" .").written == ""


LINES = ["Ada: The answer is 42, she said.", "Lund: A town in Skane."]


@pytest.mark.parametrize(
    ("text", "candidate", "answer"),
    [
        ("- Lund: A town in Skane.\nSo the answer is: Skane.", 1, "Skane"),
        ("Lund: A town in Skane. So the answer is Skane.", 1, "Skane"),
        ("Ada: The answer is 42, she said.\n", 0, None),  # A candidate contains "answer is".
        ("So the answer is:\nSkane", None, "Skane"),
        ("The final answer is Skane.", None, "Skane"),
        ("Lund: A town", None, None),
    ],
)
def test_parse_completion_lines_are_matched(text, candidate, answer):
    completion = parse(text, kind="sentence", candidates=LINES)
    assert (completion.candidate, completion.answer) == (candidate, answer)


def test_parse_completion_truncated_line_matches_prefix():
    assert parse("Lund: A to", kind="sentence", candidates=LINES, truncated=True).candidate == 1


def test_parsers_any_output_never_raises():
    draw = random.Random(0)
    good = f"Thought: {BORN}, {TOWN}. So the answer is: Skane.\n- Lund: A town in Skane.\n"
    pieces = [*good.split(" "), "<", ">", ";", "\n", "\x00", "the answer is", "Answer:", "\ud800"]
    for _ in range(2_000):
        text = " ".join(draw.choices(pieces, k=draw.randrange(12)))
        cut = text[: draw.randrange(len(text) + 1)]
        for kind, candidates in (("triple", CANDIDATES), ("sentence", LINES)):
            completion = parse(
                cut,
                draw.sample(candidates, 1),
                kind,
                candidates,
                cutoff=draw.choice([0.0, 0.8, 1.0]),
                opening=draw.random() < 0.5,
                truncated=draw.random() < 0.5,
            )
            assert completion.candidate is None or 0 <= completion.candidate < len(candidates)
        assert "\n" not in prompts.parse_answer(cut)


def test_reading_messages_number_documents():
    passages = [Passage("p", "Lund", "A town."), Passage("q", "Skane", "A province.")]
    _, asked = prompts.reading_messages(QUESTION, passages)
    assert asked.observation == (
        "1. title: Lund, text: A town.\n2. title: Skane, text: A province."
    )
    assert asked.ending == f"\n\nQuestion: {QUESTION}\nThe answer is:"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Skane", "Skane"),
        ("\n  \nSkane.\nBecause", "Skane"),
        ("The answer is: Skane", "Skane"),
        ("So the final answer is Skane", "Skane"),
        ("Answer: **Skane**", "Skane"),
        ("Answering Machine", "Answering Machine"),
        ("The answer is:\nSkane", "Skane"),
        ("", ""),
        ("***", ""),
    ],
)
def test_parse_answer_returns_first_line(text, answer):
    assert prompts.parse_answer(text) == answer
