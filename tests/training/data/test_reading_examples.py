"""Examples for the reader: complete and incomplete evidence of each granularity."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from cirag_jax.datasets import jsonl
from cirag_jax.errors import UserError
from cirag_jax.methods.cirag.cascade import cascade
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common.evidence import Evidence
from cirag_jax.runtime.requests import Generated
from cirag_jax.training.data.reading_examples import (
    ReadingSettings,
    make_readings,
    messages_of,
    reading_examples,
)
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple
from tests.distill import by_hand

CORPUS = {
    p.id: p
    for p in (
        Passage("a", "Ada", "", ("Ada is a poet.", "Her father was Byron.")),
        Passage("b", "Byron", "", ("Byron was born in London.", "He wrote poems.")),
        Passage("c", "Charles", "", ("Charles built engines.", "Ada wrote to her father Byron.")),
        Passage("d", "Dover", "", ("Dover is a port.",)),
    )
}
QUESTION = Question(
    "q1",
    "Where was the father of Ada born?",
    ("London",),
    supporting=("a", "b"),
    supporting_sentences=(("a", 1), ("b", 0)),
    context=("a", "b", "c", "d"),
    evidences=(("Ada", "father", "Byron"), ("Byron", "place of birth", "London")),
)
OTHER = Question("q2", "?", ("x",), evidences=(("Dover", "country", "England"),))
DATA = Dataset("d", (QUESTION, OTHER), CORPUS, {})
GOLD = {"Ada: Her father was Byron.", "Byron: Byron was born in London."}


def readings(**fields):
    first_of, num_without_gold = make_readings(DATA, [QUESTION], ReadingSettings(**fields))
    assert num_without_gold == 0
    return first_of[0]


def test_make_readings_mixes_gold_and_nearest_distractors():
    reading = readings(granularities=("sentence",), distractors=1, missing=0.0)
    assert reading.sufficient and reading.granularity == "sentence"
    assert set(reading.evidence) > GOLD and len(reading.evidence) == 3
    (other,) = set(reading.evidence) - GOLD
    # It is one of the two nearest distractors; the others share no words.
    assert other in {"Charles: Ada wrote to her father Byron.", "Ada: Ada is a poet."}


def test_make_readings_distractors_share_the_person_or_the_relation():
    """The question names Ada, but the facts about her father and another birth are near too."""
    corpus = {
        **CORPUS,
        "b": Passage(
            "b", "Byron", "", ("Byron was born in London.", "Byron's father died in Greece.")
        ),
        "c": Passage("c", "Charles", "", ("His father was born in Kent.", "Engines were built.")),
    }
    settings = ReadingSettings(granularities=("sentence",), distractors=1, missing=0.0)
    drawn = set()
    for seed in range(12):
        many, _ = make_readings(
            Dataset("d", (QUESTION,), corpus, {}),
            [QUESTION],
            dataclasses.replace(settings, seed=seed),
        )
        drawn |= set(many[0].evidence) - GOLD
    assert drawn == {
        "Byron: Byron's father died in Greece.",
        "Charles: His father was born in Kent.",
    }


def test_make_readings_refused_evidence_does_not_state_the_answer():
    corpus = {**CORPUS, "c": Passage("c", "Byron's house", "", ("In London.", "Byron wrote."))}
    data, stated = Dataset("d", (QUESTION,), corpus, {}), 0
    for seed in range(24):
        settings = ReadingSettings(granularities=("sentence",), missing=0.999, seed=seed)
        (reading,), _ = make_readings(data, [QUESTION], settings)
        stated += any("London" in line and line not in GOLD for line in reading.evidence)
    assert not stated


@pytest.mark.parametrize("granularity", ["sentence", "passage"])
@pytest.mark.parametrize("is_gold", [True, False])
def test_make_readings_copy_of_gold_passage_is_no_other_evidence(granularity, is_gold):
    copies = {f"{pid}2": dataclasses.replace(CORPUS[pid], id=f"{pid}2") for pid in "ab"}
    assert QUESTION.context and QUESTION.supporting and QUESTION.supporting_sentences
    question = dataclasses.replace(QUESTION, context=(*QUESTION.context, *copies))
    if is_gold:
        question = dataclasses.replace(
            question,
            supporting=(*QUESTION.supporting, *copies),
            supporting_sentences=(*QUESTION.supporting_sentences, ("a2", 1), ("b2", 0)),
        )
    data = Dataset("d", (question, OTHER), {**CORPUS, **copies}, {})
    for seed in range(9):
        settings = ReadingSettings(granularities=(granularity,), missing=0.5, seed=seed)
        (reading,), _ = make_readings(data, [question], settings)
        (expected,), _ = make_readings(DATA, [QUESTION], settings)
        assert len(set(reading.evidence)) == len(reading.evidence)
        assert (reading.sufficient, reading.chain) == (expected.sufficient, expected.chain)
        assert reading.evidence == expected.evidence


def test_make_readings_gold_keeps_order():
    for seed in range(6):
        for granularity in ("triple", "sentence", "passage"):
            reading = readings(granularities=(granularity,), missing=0.0, seed=seed)
            bare = readings(granularities=(granularity,), missing=0.0, distractors=0)
            assert [line for line in reading.evidence if line in bare.evidence] == list(
                bare.evidence
            )
            assert len(reading.evidence) > len(bare.evidence)


def test_make_readings_chain_ends_with_evidence():
    hops, chains = QUESTION.evidences or (), set()
    for seed in range(12):
        assert readings(granularities=("sentence",), missing=0.0, seed=seed).chain == hops
        incomplete = readings(granularities=("sentence",), missing=0.999, distractors=0, seed=seed)
        assert incomplete.chain == (
            hops[:1] if "Byron was born" not in incomplete.evidence[0] else ()
        )
        chains.add(incomplete.chain)
    assert len(chains) == 2


def test_make_readings_order_depends_on_seed():
    orders = {readings(granularities=("sentence",), missing=0.0, seed=s).evidence for s in range(9)}
    assert len(orders) > 3
    assert readings(seed=3) == readings(seed=3)


@pytest.mark.parametrize("granularity", ["triple", "sentence", "passage"])
def test_make_readings_missing_drops_one_passage_or_fact(granularity):
    dropped = set()
    for seed in range(12):
        complete = readings(granularities=(granularity,), missing=0.0, seed=seed)
        incomplete = readings(granularities=(granularity,), missing=0.999, forced=0.0, seed=seed)
        assert complete.sufficient and not incomplete.sufficient and incomplete.may_refuse
        first = set(readings(granularities=(granularity,), missing=0.0, distractors=0).evidence)
        assert len(first) == 2 and first <= set(complete.evidence)
        assert len(first - set(incomplete.evidence)) == 1
        dropped |= first - set(incomplete.evidence)
    assert dropped == first  # Either may be dropped.


def test_make_readings_forced_answers_if_answer_is_stated(tmp_path):
    """With ``forced=1``, incomplete evidence is answered only if it states the answer."""
    tokenizer = by_hand.tiny_tokenizer(tmp_path)
    options: Any = {"granularities": ("sentence",), "distractors": 0, "missing": 0.999}
    kinds = set()
    for seed in range(12):
        reading = readings(**options, forced=1.0, seed=seed)
        (example,), _ = reading_examples(tokenizer, [reading], "brief", max_length=10_000)
        prompt = tokenizer.encode_prompt(messages_of(reading, "brief"))
        output = tokenizer.decode(example.tokens_T[len(prompt) : -1], True)
        assert not reading.sufficient
        kinds.add((reading.evidence, reading.may_refuse, output))
    assert kinds == {
        (("Byron: Byron was born in London.",), False, "Answer: London"),
        (("Ada: Her father was Byron.",), True, "Answer: Unanswerable"),
    }


def test_make_readings_yes_or_no_can_be_forced():
    question = dataclasses.replace(QUESTION, answers=("no",))
    settings = ReadingSettings(granularities=("sentence",), missing=0.999, forced=1.0)
    (reading,), _ = make_readings(DATA, [question], settings)
    assert not reading.sufficient and not reading.may_refuse


def test_make_readings_without_annotation_use_passages():
    bare = Question("q3", "?", ("x",), supporting=("d",))
    many, num_without_gold = make_readings(
        DATA, [bare, OTHER], ReadingSettings(granularities=("triple",))
    )
    assert [m.granularity for m in many] == ["passage", "triple"] and num_without_gold == 0
    many, num_without_gold = make_readings(
        DATA, [Question("q4", "?", ("x",))], ReadingSettings(granularities=("sentence",))
    )
    assert (many, num_without_gold) == ([], 1)


DECOMPOSED = Question(
    "q5",
    "Who rules the county whose port wrote to Ada's father?",
    ("Bess",),
    supporting=("a", "e"),
    context=("a", "b", "c", "d", "e"),
    decomposition=(
        SubQuestion("Ada >> father", "Byron", "a"),
        SubQuestion("who rules where #1 lived ?", "Bess", "e"),
    ),
)
RULES = Passage("e", "Essex", "", ("Essex has ports.", "Bess rules Essex."))


def test_make_readings_decomposition_has_sentences_and_facts():
    data = Dataset("d", (DECOMPOSED,), {**CORPUS, "e": RULES}, {})
    settings = ReadingSettings(granularities=("sentence",), distractors=0, missing=0.0)
    (reading,), _ = make_readings(data, [DECOMPOSED], settings)
    assert reading.granularity == "sentence"
    assert reading.evidence == ("Ada: Her father was Byron.", "Essex: Bess rules Essex.")
    assert reading.chain == (
        ("Ada", "father", "Byron"),
        ("Who rules where Byron lived", "answer", "Bess"),
    )


def test_make_readings_decomposition_without_answer_uses_passages():
    question = dataclasses.replace(DECOMPOSED, answers=("Elizabeth I",))
    data = Dataset("d", (question,), {**CORPUS, "e": RULES}, {})
    many, _ = make_readings(data, [question], ReadingSettings(granularities=("sentence",)))
    assert [one.granularity for one in many] == ["passage"]


@pytest.mark.parametrize("reader_format", ["brief", "chain"])
@pytest.mark.parametrize(("missing", "answer"), [(0.0, "London"), (0.999, "Unanswerable")])
def test_reading_examples_prompts_match_cascade(tmp_path_factory, missing, answer, reader_format):
    tokenizer = by_hand.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    reading = readings(granularities=("sentence",), distractors=0, missing=missing, forced=0.0)
    (example,), reasons = reading_examples(tokenizer, [reading], reader_format, max_length=10_000)
    assert reasons == {} and example.source == "q1"
    prompt = tokenizer.encode_prompt(messages_of(reading, reader_format))
    np.testing.assert_array_equal(example.tokens_T[: len(prompt)], prompt)
    assert not example.weight_T[: len(prompt)].any() and example.weight_T[len(prompt) :].all()
    output = tokenizer.decode(example.tokens_T[len(prompt) : -1], True)
    facts = [f"{'; '.join(fact)}\n" for fact in reading.chain] if reader_format == "chain" else []
    assert (
        output == f"{''.join(facts)}Answer: {answer}"
        and int(example.tokens_T[-1]) in tokenizer.eos_ids
    )

    evidence = Evidence("ascii")
    evidence.add_retrieved(CORPUS.values())
    kept = {line: (p, s) for line, p, s in zip(sorted(GOLD), "ab", (1, 0), strict=True)}
    evidence.keep(Triple(line, "", "", *kept[line]) for line in reading.evidence)
    config = CiragConfig(granularities=("sentence",), reader_format=reader_format)
    program: Any = cascade(QUESTION.question, evidence, (), config, {})
    call = next(program)
    np.testing.assert_array_equal(tokenizer.encode_prompt(call.messages), prompt)
    with pytest.raises(StopIteration) as end:
        program.send(Generated(output, "stop"))
    (attempt,) = end.value.value
    assert (attempt.answer, attempt.sufficient) == ("" if missing else answer, not missing)


@pytest.mark.parametrize("reader_format", ["brief", "chain"])
def test_reading_examples_answer_weight(tmp_path, reader_format):
    tokenizer = by_hand.tiny_tokenizer(tmp_path)
    reading = readings(granularities=("sentence",), missing=0.0)
    (example,), _ = reading_examples(
        tokenizer, [reading], reader_format, max_length=10_000, answer_weight=4.0
    )
    weighs_more = example.weight_T > 1
    assert set(example.weight_T) == ({0.0, 1.0, 4.0} if reader_format == "chain" else {0.0, 4.0})
    output = tokenizer.decode(example.tokens_T[weighs_more][:-1], True)
    assert output.strip() == "Answer: London" and weighs_more[-1]


def test_reading_examples_conclusion_precedes_answer(tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path)
    facts = (("Ada", "date of birth", "1815"), ("Byron", "date of birth", "1788"))
    asked = dataclasses.replace(QUESTION, answers=("Byron",), evidences=facts)
    settings = ReadingSettings(granularities=("triple",), missing=0.0)
    many, _ = make_readings(DATA, [asked], settings)
    (example,), _ = reading_examples(tokenizer, many, "chain", max_length=9999, answer_weight=4.0)
    output = tokenizer.decode(example.tokens_T[example.weight_T > 1][:-1], True)
    assert output.splitlines() == [
        *("1788; before; 1815", "Byron; before; Ada"),
        *("earlier; is; Byron", "Answer: Byron"),
    ]
    facts_T = (example.weight_T > 0) & (example.weight_T <= 1)
    assert "Ada; date of birth; 1815" in tokenizer.decode(example.tokens_T[facts_T], True)
    cut, _ = make_readings(DATA, [asked], dataclasses.replace(settings, missing=0.999))
    assert not any("before" in fact for fact in cut[0].chain)


def test_reading_examples_too_long_is_dropped(tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path)
    assert reading_examples(tokenizer, [readings()], "brief", max_length=9) == (
        [],
        {"dropped_too_long": 1},
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"granularities": ("page",)}, "granularities=.'page',. must be a list of triple"),
        ({"granularities": ()}, "granularities must not be empty"),
        ({"missing": 1.1}, "missing=1.1 must lie between 0 and 1"),
        ({"reader_format": "xml"}, "reader_format='xml' is not one of thought, chain, brief"),
    ],
)
def test_reading_settings_invalid_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        ReadingSettings(**fields)


def test_make_readings_2wiki_questions(shared_data):
    """All 2Wiki training questions have readings, and no reading repeats a line."""
    dataset = jsonl.read_dataset(shared_data / "2wikimultihopqa")
    questions = [q for q in dataset.questions if q.split == "train"][:60]
    many, num_without_gold = make_readings(dataset, questions, ReadingSettings())
    assert num_without_gold == 0 and {m.granularity for m in many} == {
        "triple",
        "sentence",
        "passage",
    }
    assert all(len(set(m.evidence)) == len(m.evidence) for m in many)
    assert 5 < sum(not m.sufficient for m in many) < 30
