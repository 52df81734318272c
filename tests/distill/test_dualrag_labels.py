"""Labels of DualRAG-FT: rules of the three roles, on rounds written by hand."""

import json

import pytest

from cirag_jax.distill import dualrag_labels as labels
from cirag_jax.errors import UserError
from cirag_jax.methods.dualrag import prompts
from cirag_jax.methods.dualrag.settings import DualragConfig
from cirag_jax.types import Passage, Question, Step

ADA = Passage("a", "Ada Moen", "Ada was born in Lund. She paints.", ("Ada was born in Lund.", "x"))
LUND = Passage("l", "Lund", "Lund is in Skane.")
NOISE = Passage("n", "Adam", "Adam is a name.")
CORPUS = {p.id: p for p in (ADA, LUND, NOISE)}
QUESTION = Question(
    "q", "Where?", ("Skane",), supporting=("a", "l", "gone"), supporting_sentences=(("a", 0),)
)
TITLES = {"Ada Moen": ADA, "Lund": LUND}
# Scores of entities for the two titles; the threshold is 0.
SCORES = {
    "Ada": (2.0, -1.0), "A. Moen": (1.0, -1.0), "Lund": (-3.0, 4.0), "Skane": (-2.0, 0.0),
    "else": (-1.0, -1.0), "Town": (-1.0, 1.0),
}  # fmt: skip


def titles():
    scores = {name: dict(zip(TITLES, pair, strict=True)) for name, pair in SCORES.items()}
    return labels.Titles(TITLES, scores, 0.0)


def step(queries, learnt=(), read=(), flag=True, thought="So."):
    response = json.dumps({"thought": thought, "need_retrieve": flag})
    notes = {"queries": queries, "learnt": dict(learnt), "read": dict(read)} if queries else {}
    return Step("", thought=thought, response=response, notes=notes)


def made(*steps, role=None):
    found = labels.labels_of(QUESTION, steps, titles(), CORPUS)
    return [e for e in found if role in (None, e.role)]


FIRST = step({"Ada": ["ada", "born"]}, {"Ada": "In Lund."}, {"Ada": ["a"]}, thought="One.")
SECOND = step({"Lund": ["lund"]}, {"Lund": "In Skane."}, {"Lund": ["l"]}, thought="Two.")
LAST = step({}, flag=False, thought="Three.")


def test_labels_of_perfect_rounds_are_the_teachers():
    found = made(FIRST, SECOND, LAST)
    assert [(e.role, e.source["label"]) for e in found] == [
        ("reasoner", "kept"), ("entity_identifier", "kept"), ("summarizer", "teacher"),
        ("reasoner", "kept"), ("entity_identifier", "kept"), ("summarizer", "teacher"),
        ("reasoner", "kept"),
    ]  # fmt: skip
    assert {e.question_id for e in found} == {"q"}
    outline = prompts.render_outline({"Ada": ["In Lund."]})
    assert found[3].messages == prompts.reasoning_messages(
        outline, "Where?", ["One."], few_shot=False
    )
    assert found[3].target == '{"thought": "Two.", "need_retrieve": true}'
    assert found[4].messages == prompts.entity_messages(
        outline, "Where?", ["One.", "Two."], ["Ada"], few_shot=False
    )
    assert found[4].target == '{"entities": [{"entity": "Lund", "keywords": ["lund"]}]}'
    assert found[5].messages == prompts.summary_messages(
        "Where?", ["One.", "Two."], "Lund", ["lund"], [LUND]
    )
    assert found[5].target == "In Skane."
    assert json.loads(found[6].target)["need_retrieve"] is False


def test_reasoner_that_retrieves_although_all_is_known_is_a_candidate():
    third = step({"Skane": ["skane"]}, thought="Three.")
    kinds = [e.source["label"] for e in made(FIRST, SECOND, third, LAST, role="reasoner")]
    assert kinds == ["kept", "kept", "candidate", "kept"]  # The mixture has all of them.


def test_reasoner_without_readable_flag_has_no_label():
    unreadable = Step("", thought="So.", response="So.", notes=FIRST.notes)
    assert made(unreadable, role="reasoner") == []


@pytest.mark.parametrize(
    ("entities", "mapping"),
    [
        (["Ada", "Lund"], {}),
        (["Lund"], {}),  # Not every title needs an entity.
        (["Ada", "Skane"], {"Skane": None}),  # A score of 0 is no match.
        (["A. Moen", "Ada", "Lund"], {"A. Moen": "Ada", "Ada": "Ada"}),
        (["Ada", "Lund", "Ada"], {"Ada": "Ada"}),
        (["else", "Town", "Lund"], {"else": None, "Town": "Lund", "Lund": "Lund"}),
    ],
)
def test_rewrites_drop_unmatched_and_collapse_duplicates(entities, mapping):
    assert labels.rewrites(entities, titles()) == mapping


def test_identifier_is_rewritten_in_target_and_outline():
    first = step({"A. Moen": ["moen"], "Skane": ["s"]}, {"A. Moen": "Old.", "Skane": "Noise."})
    second = step({"Ada": ["ada"], "Lund": ["lund"]}, {"Ada": "New."}, thought="Two.")
    third = step({"Skane": ["again"]}, thought="Three.")
    found = made(first, second, third, role="entity_identifier")
    # "A. Moen" and "Skane" are dropped, so that the first and the third round have no entity.
    assert [e.source["label"] for e in found] == ["rewritten"]
    entities = json.loads(found[0].target)["entities"]
    assert [entity["entity"] for entity in entities] == ["Ada", "Lund"]
    assert found[0].messages == prompts.entity_messages(
        prompts.render_outline({"Ada": ["Old."]}), "Where?", ["So.", "Two."], ["Ada"],
        few_shot=False,
    )  # fmt: skip
    assert prompts.render_outline({"A. Moen": ["Old."], "Skane": ["Noise."]}) in (
        made(first, second, role="reasoner")[1].messages[-1].text
    )


def test_summarizer_labels_depend_on_match_and_read_documents():
    queries = {name: ["x"] for name in ("Ada", "Lund", "Skane", "Town")}
    read = {"Ada": ["a", "n"], "Lund": ["l"], "Skane": ["n"], "Town": ["n"]}
    found = made(step(queries, {"Skane": "A guess."}, read), role="summarizer")
    assert [(e.target, e.source["label"]) for e in found] == [
        ("Ada was born in Lund.", "gold"),  # the annotated sentence
        ("Lund is in Skane.", "gold"),  # no sentence is annotated
        ("None", "unmatched"),
        ("None", "none"),
    ]
    assert "Adam is a name." in found[0].messages[-1].text


def test_gold_passages_of_unknown_ids_are_left_out():
    assert labels.gold_passages(QUESTION, CORPUS) == TITLES


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_entities", False), ("entities", "named"), ("summarizer", "sentences")],
)
def test_check_rounds_without_labels_are_refused(field, value):
    labels.check(DualragConfig())
    with pytest.raises(UserError, match=rf"config\.dualrag\.{field}={value} has no labels"):
        labels.check(DualragConfig(**{field: value}))
