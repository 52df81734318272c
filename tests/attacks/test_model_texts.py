"""Hostile model outputs, which every parser must accept."""

import dataclasses

import pytest

from cirag_jax.commands import corrupt
from cirag_jax.evaluation import grounding
from cirag_jax.evaluation import judge_prompts as judge
from cirag_jax.grade import prompts as grade
from cirag_jax.io import replace_surrogates
from cirag_jax.llm.types import Generated
from cirag_jax.methods.baselines import decomposition, flare, metarag, search_r1
from cirag_jax.methods.baselines import genground as genground
from cirag_jax.methods.c2rag import prompts as c2rag
from cirag_jax.methods.cirag import compact
from cirag_jax.methods.cirag import prompts as cirag
from cirag_jax.methods.common import (
    dialects,
    extraction_prompts,
    reading_prompts,
    refusals,
    short_answers,
    writing,
    written_answers,
)
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.methods.dualrag import prompts as dualrag
from cirag_jax.methods.kirag import prompts as kirag
from cirag_jax.runtime import codec
from cirag_jax.types import Passage, Sentence, Triple
from tests.attacks.hostile import TEXTS, attack, attempt, st

_TRIPLES = (Triple("Ada", "born in", "London", "p", 0), Triple("London", "is", "a city", "p", 1))
_SENTENCES = (Sentence("p", 0, "Ada: She was born."), Sentence("p", 1, "Ada: She wrote."))
_PASSAGE = Passage("p", "Ada", "Ada was born in London. London is a city.")
_NAMES = ("Ada", "Ada Lovelace", "London")


def _finish(truncated: bool) -> str:
    return "length" if truncated else "stop"


PARSERS = {
    "find_json": lambda t, cut: find_json(t, None, cut),
    "find_json.key": lambda t, cut: find_json(t, "fact", cut),
    "cirag": lambda t, cut: cirag.parse_decision(t, _TRIPLES, truncated=cut),
    "cirag.one_turn": lambda t, cut: cirag.parse_decision(
        t, _TRIPLES, prompt_format="paper", truncated=cut
    ),
    "cirag.reply": lambda t, cut: cirag.parse_reply(t, truncated=cut),
    "cirag.question": lambda t, cut: cirag.parse_question(t),
    "compact": lambda t, cut: compact.parse_decision(t, _SENTENCES, truncated=cut),
    "compact.query": lambda t, cut: compact.parse_query(t),
    "compact.reply": lambda t, cut: compact.parse_reply(t, truncated=cut),
    "kirag.triple": lambda t, cut: kirag.parse_completion(
        t, ("<a; b; c>", "<d; e; f>"), ("<a; b; c>",), "triple", cutoff=0.6, truncated=cut
    ),
    "kirag.sentence": lambda t, cut: kirag.parse_completion(
        t, ("Ada wrote.", "London."), (), "sentence", opening=True, truncated=cut
    ),
    "kirag.answer": lambda t, cut: kirag.parse_answer(t),
    "dualrag.thought": lambda t, cut: dualrag.parse_thought(t, truncated=cut),
    "dualrag.entities": lambda t, cut: dualrag.parse_entities(t, 3, 3, truncated=cut),
    "dualrag.summary": lambda t, cut: dualrag.parse_summary(t),
    "dualrag.names": lambda t, cut: dualrag.names_in(t),
    "c2rag.plan": lambda t, cut: c2rag.parse_plan(
        t, "Where was Ada born?", num_variants=2, max_constraints=4, truncated=cut
    ),
    "c2rag.fill": lambda t, cut: c2rag.parse_fill(t),
    "c2rag.names": lambda t, cut: c2rag.names_in(t),
    "decomposition": lambda t, cut: decomposition.parse_queries(t, 3, truncated=cut),
    "flare.question": lambda t, cut: flare.parse_question(t),
    "genground.deduction": lambda t, cut: genground.parse_deduction(t, truncated=cut),
    "genground.grounding": lambda t, cut: genground.parse_grounding(t),
    "extraction.entities": lambda t, cut: extraction_prompts.parse_entities(t, _finish(cut)),
    "extraction.triples": lambda t, cut: extraction_prompts.parse_triples(t, _finish(cut)),
    "written_answers": lambda t, cut: written_answers.written_answer(t),
    "writing.sentence": lambda t, cut: writing.sentence_of(Generated(t, _finish(cut))),
    "metarag.answer": lambda t, cut: metarag.parse_answer(t, truncated=cut),
    "metarag.check": lambda t, cut: metarag.parse_check(t, truncated=cut),
    "metarag.query": lambda t, cut: metarag.parse_query(t),
    "metarag.verdict": lambda t, cut: metarag.parse_verdict(t),
    "grade.verdict": lambda t, cut: grade.parse_verdict(t, "yes", "no"),
    "grade.claim": lambda t, cut: grade.parse_claim(t),
    "grade.triples": lambda t, cut: grade.parse_triples(t, _finish(cut), 2),
    "grade.groups": lambda t, cut: grade.parse_groups(t, _finish(cut), _NAMES),
    "grade.question": lambda t, cut: grade.parse_question(t),
    "first_sentence": lambda t, cut: written_answers.first_sentence(t),
    "corrupt.fact": lambda t, cut: corrupt.parse_fact(t),
    "corrupt.numbers": lambda t, cut: corrupt.parse_numbers(t, 3),
    "judge": lambda t, cut: judge.parse_verdict(t, "dualrag", truncated=cut),
    "grounding.statements": lambda t, cut: grounding.parse_statements(t, cut),
    "grounding.support": lambda t, cut: grounding.parse_support(t, 1, cut),
    "grounding.questions": lambda t, cut: grounding.parse_questions(t, cut),
    "rag": lambda t, cut: short_answers.parse_short_answer(t),
    "search_r1": lambda t, cut: search_r1.parse_action(t, cut),
    "reading": lambda t, cut: reading_prompts.parse_answer(t, wide=True, truncated=cut),
    "refusals": lambda t, cut: refusals.refuses(t),
    **{
        f"dialects.{name}": lambda t, cut, name=name: dialects.parse(
            t, _finish(cut), name, _PASSAGE
        )
        for name in dialects.DIALECTS
    },
}

# Parts of the formats that prompts request.
_MARKS = (
    *("[[## thought ##]]", "[[## fact ##]]", "[[## question ##]]", "[[## completed ##]]"),
    *("Keep: 1, 2", "Next: Where?", "Answer:", "answer: ", "the answer is", "So the answer is: x"),
    *('{"fact": [["Ada", "born in", "London"]]}', '{"triples": [["a", "b", "c"]]}', "```json\n"),
    *(
        '{"named_entities": ["Ada"]}',
        '{"question": "Who?", "answer": "Ada"}',
        '{"queries": ["Who?", "Where?"]}',
        '{"implies": true}',
        '{"statements": ["x", 1, ["y"]]}',
        '{"supported": [true]}',
        '{"questions": ["Who?"], "noncommittal": false}',
        '{"remove": [1, 2]}',
        "<search> x",
        "</search>",
        "<answer> x </answer>",
        "<think>",
        "</think>",
    ),
    *("<ref>x</ref>", "<revise>y</revise>", "<a; b; c>", "(a; b; c)", "a | b | c", "Step 1:", "1."),
    *('{"entities": ["x"], "keywords": [["y"]]}', '{"constraints": [["?x", "is", "y"]]}', "yes"),
    *("?x", "NO", "<no question>", "Unanswerable", "1, 2; 3", "[[1, 2], [3]]", "Thought:", "Need:"),
)
_WRITTEN = st.lists(st.sampled_from(_MARKS) | TEXTS, max_size=6).map("".join)


@pytest.mark.parametrize("parser", PARSERS)
@attack(40, _WRITTEN, st.booleans())
def test_every_parser_accepts_any_text(parser, text, truncated):
    # Backends replace lone surrogates, but JSON escapes may contain some.
    result = attempt(lambda: PARSERS[parser](replace_surrogates(text), truncated))
    _check_plain(result)


def _check_plain(value) -> None:
    """Checks that a journal can store a result: plain values, without NaN or surrogates."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, frozenset | set):
        value = sorted(value, key=str)
    codec.dump(codec.encode(value)).encode()
