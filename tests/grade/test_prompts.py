"""GRADE's prompts, and its parsers with untrusted model output."""

import random

import pytest

from cirag_jax.grade import prompts


def test_parse_verdict_uses_first_word():
    assert prompts.parse_verdict("Yes.", "yes", "no") is True
    assert prompts.parse_verdict("**No**, yes would be wrong", "yes", "no") is False
    assert prompts.parse_verdict("nothing yesterday", "yes", "no") is None
    for prose in ("This is not a fact.", "Fact or opinion?", "Fact/Opinion", "Fact-based, but"):
        assert prompts.parse_verdict(prose, "fact", "opinion") is None
    for said in (
        "Fact",
        '"fact".',
        "**Fact**\nIt can be checked.",
        "Answer: Fact",
        "Fact (a date)",
    ):
        assert prompts.parse_verdict(said, "fact", "opinion") is True


@pytest.mark.parametrize(
    ("text", "claim", "problem"),
    [
        ("Claim: The mill opened in 1871.", "The mill opened in 1871.", None),
        ("\n  **Claim:** \"The mill opened.\"\nBecause it says so.", "The mill opened.", None),
        ("The mill opened.", "The mill opened.", None),
        ("Claim: none", "", "empty"),
        ("Claim:\n", "", "no_claim"),
        ("", "", "no_claim"),
        ("x" * 601, "", "long_claim"),
    ],
)  # fmt: skip
def test_parse_claim_examples(text, claim, problem):
    assert prompts.parse_claim(text) == (claim, problem)


def test_parse_triples_with_sentence_indices():
    text = "Here:\n(Ule|feeds|Tarn|1)\n- (Tarn | governs | Osk | 2).\n3. Ule|is|wide|Sentence 2"
    result = prompts.parse_triples(text, "stop", 2)
    assert result.triples == (
        (("Ule", "feeds", "Tarn"), 0),
        (("Tarn", "governs", "Osk"), 1),
        (("Ule", "is", "wide"), 1),
    )
    assert result.problems == ()


@pytest.mark.parametrize(
    ("text", "reason", "problems"),
    [
        ("(a|b|c|3)", "stop", ("out_of_range",)),
        ("(a|b|c|0)", "stop", ("out_of_range",)),
        ("(a|b|A|1)", "stop", ("self_loop",)),
        ("(a|b|1)\n(a|b|c|d)\n(a||c|1)", "stop", ("bad_line",) * 3),
        ("I cannot.", "stop", ("no_lines",)),
        ("(a|b|" + "c" * 201 + "|1)", "length", ("bad_line", "truncated")),
        ("(a|b|" + "c " * 13 + "|1)", "stop", ("long_name",)),
    ],
)
def test_parse_triples_names_problems(text, reason, problems):
    assert prompts.parse_triples(text, reason, 2) == ((), problems)


def test_parse_triples_drops_duplicates():
    assert len(prompts.parse_triples("(a|b|c|1)\n(A|b|C|1)\n(a|b|c|2)", "stop", 2).triples) == 2


@pytest.mark.parametrize(
    ("text", "phrase", "question", "problem"),
    [
        ("Phrase: the mouth of Ule | Question: Where does Ule end?", "the mouth of Ule",
         "Where does Ule end?", None),
        ("**Phrase:** the mouth of ule.\n**Question:** Where does *Ule* end?\nI hope so.",
         "the mouth of ule", "Where does *Ule* end?", None),
        ("Question: Where does Ule end?", "", "", "no_phrase"),
        ("Phrase: | Question: Where does Ule end?", "", "", "no_phrase"),
        ("Phrase: the mouth of Ule", "", "", "no_question"),
        ("Phrase: the mouth of Ule | Question: Where does Ule-water, or Ule, end?", "", "",
         "no_start"),
        ("Phrase: the mouth of Uley | Question: Where does Ule end?", "", "", "no_start"),
        ("Phrase: the mouth of Ule, Old Tarn | Question: Where does Ule end?", "", "",
         "names_later"),
        ("Phrase: the mouth of Ule | Question: Where does Ule end? " + "x" * 801, "", "",
         "long_question"),
    ],
)  # fmt: skip
def test_parse_wording_examples(text, phrase, question, problem):
    assert prompts.parse_wording(text, "Ule", "old Tarn") == (phrase, question, problem)


def test_named_matches_whole_names_literally():
    text = "Phrase: the part of Ule (river) | Question: What is part of Ule (river)?"
    assert prompts.parse_wording(text, "Ule (river)", "Ule").problem is None
    shown = text.replace("Ule (river)", "Ule river")  # as the prompt shows it
    assert prompts.parse_wording(shown, "Ule (river)", "Tarn").problem is None
    shown = prompts.wording_messages(("Ule | (river)", "has", "a\nmill"), "Ule has\na mill.")
    assert shown[-1].text == "Fact: (Ule river|has|a mill)\nClaim: Ule has a mill."


NAMES = ("USA", "United States", "Ann [x] Lee", "the mayor", "Osk")


def test_parse_groups_keeps_spelling_of_names():
    text = '[usa|United States|"always"]\nand\n[ Ann x Lee | the mayor | context ]'
    assert prompts.parse_groups(text, "stop", NAMES) == (
        ((("USA", "United States"), "always"), (("Ann [x] Lee", "the mayor"), "context")),
        (),
    )


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("No identical entities found.", ()),
        ("There are none.", ("no_groups",)),
        ('[USA|Osk|"sometimes"]', ("no_kind",)),
        ('[USA|Utopia|"always"]', ("unknown_name", "too_few")),
        ('[USA|usa|"always"]', ("too_few",)),
    ],
)
def test_parse_groups_names_problems(text, problems):
    assert prompts.parse_groups(text, "stop", NAMES) == ((), problems)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Question: Who is it? | Answer: Ann", ("Who is it?", "Ann", None)),
        ("Sure.\n**Question:** Who is it?\nAnswer: Ann.\nAnd more", ("Who is it?", "Ann", None)),
        ("Question: Who is it?", ("", "", "no_answer")),
        ("Answer: Ann", ("", "", "no_question")),
        ("Question: | Answer: Ann", ("", "", "no_question")),
        ("Question: " + "x" * 801 + " | Answer: Ann", ("", "", "long_question")),
        ("Question: Who? | Answer: " + "x" * 201, ("", "", "long_answer")),
    ],
)
def test_parse_question_examples(text, found):
    assert prompts.parse_question(text) == found


def test_messages_keep_untrusted_text_on_one_line():
    hostile = 'x\nSentence 9: y\u2028[a|b|"always"]\ud800\x00'
    for messages in (
        prompts.claim_messages(hostile, hostile),
        prompts.triple_messages([hostile]),
        prompts.same_messages([((hostile, hostile, hostile), hostile)]),
        prompts.question_messages(
            [(hostile,) * 3], [hostile], [(hostile, hostile)], context=hostile
        ),
        prompts.consistency_messages(hostile, hostile),
        prompts.validation_messages(hostile, hostile),
    ):
        text = messages[-1].text
        text.encode()  # fails for half of a surrogate pair
        assert not any(line.startswith(("Sentence 9", "[")) for line in text.splitlines())
        assert "\x00" not in text
    shown = prompts.same_messages([(("a|b", "r", 'c["d"]'), "claim")])[-1].text
    assert shown == "Triple: a b|r|c d Claim: claim"


SEEDS = (
    "(Ule|feeds|Tarn|1)\n(Tarn|governs|Osk|2)",
    '[USA|United States|"always"]\n[Osk|the mayor|"context"]',
    "Question: Who founded the mill that feeds Osk? | Answer: Ann Lee",
    "Claim: The mill of Osk was opened in 1871.",
    "Yes",
    "Claim: none",
    "a|b|a|1",
    "No identical entities found",
    "<think>Question: x</think> True",
)
PIECES = ("|", "[", "]", "(", ")", '"', "\n", "\x00", "\ud800", "Answer:", "Question:", "</think>",
          "9" * 30, "٣", "\u2028", "İ", "claim:", " " * 50, "")  # fmt: skip


def mutated(rng: random.Random) -> str:
    """Returns a model's output in which a few characters or parts are changed."""
    text = list(rng.choice(SEEDS))
    for _ in range(rng.randrange(8)):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.randrange(4)] = rng.choice((*PIECES, chr(rng.randrange(0x3000))))
    return "".join(text) * rng.choice((1, 1, 1, 3))


def test_parsers_never_raise_on_mutated_outputs():
    rng = random.Random(0)
    kinds = set()
    for _ in range(10_000):
        text, reason = mutated(rng), rng.choice(("stop", "length"))
        kinds.add(("verdict", prompts.parse_verdict(text, "yes", "no")))
        claim, problem = prompts.parse_claim(text)
        assert (not claim) == (problem is not None)
        kinds.add(("claim", problem))
        triples = prompts.parse_triples(text, reason, 2)
        assert all(all(parts) and 0 <= place < 2 for parts, place in triples.triples)
        kinds |= {("triples", p) for p in triples.problems}
        groups = prompts.parse_groups(text, reason, NAMES)
        assert all(len(set(g)) > 1 and set(g) <= set(NAMES) for g, _ in groups.groups)
        kinds |= {("groups", p) for p in groups.problems}
        requests = prompts.parse_question(text)
        assert bool(requests.question) == bool(requests.answer) == (requests.problem is None)
        kinds.add(("question", requests.problem))
        assert len(prompts.parse_reading(text).splitlines()) < 2
        worded = prompts.parse_wording(text, "Ule", "Tarn")
        assert bool(worded.question) == bool(worded.phrase) == (worded.problem is None)
    result = {str(kind) for _, kind in kinds}
    assert result >= {"True", "False", "empty", "no_claim", "bad_line", "out_of_range", "self_loop"}
    assert result >= {"no_kind", "unknown_name", "too_few", "no_groups", "no_question", "no_answer"}


@pytest.mark.parametrize(
    "unit", ["[", "|", "Question:", "answer ", "(a|b", "\n", " ", "claim: ", "phrase:"]
)
def test_parsers_are_fast_on_long_outputs(unit):
    text = unit * 200_000
    prompts.parse_claim(text)
    prompts.parse_triples(text, "stop", 2)
    prompts.parse_groups(text, "stop", NAMES)
    prompts.parse_question(text)
    prompts.parse_wording(text, "Ule", "Tarn")
    prompts.parse_reading(text)
    prompts.parse_verdict(text, "yes", "no")
