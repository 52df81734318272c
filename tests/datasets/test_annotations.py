"""Annotations of every benchmark as hops."""

import dataclasses

from cirag_jax.datasets import relations
from cirag_jax.datasets.annotations import hops_of, words
from cirag_jax.types import Passage, Question, SubQuestion

QUESTION = Question(
    "q", "Where does the birthplace of the singer of Night Tide lie?", ("Sogn", "the Sogn region"),
    supporting=("song", "singer", "vik"),
    decomposition=(
        SubQuestion("Night Tide >> performer", "Ola Brandt", "song"),
        SubQuestion("where was #1 born", "Vik", "singer"),
        SubQuestion("What lies around #2?", "Sogn", "vik"),
    ),
)  # fmt: skip


def two_wiki(question, evidences, type=None):
    return Question("w", question, ("x",), type=type, supporting=("song",), evidences=evidences)


def test_a_head_that_is_an_earlier_tail_stands_for_its_answer():
    question = two_wiki(
        "Who is the mother of the director of Sleepless?",
        (("Sleepless", "director", "Ann Lee"), ("Ann Lee", "mother", "May Lee")),
    )
    first, second = hops_of(question, {})
    assert (first.sub_question, first.noun) == (
        "Who directed Sleepless?",
        "the director of Sleepless",
    )
    assert (second.sub_question, second.parents) == ("Who is the mother of #1?", (0,))
    assert first.parents == () and second.answers == ("May Lee",)


def test_heads_of_a_comparison_are_independent_and_each_goes_on_by_itself():
    question = two_wiki(
        "Which film has the director who died later, Red Sand or Blue Sand?",
        (
            ("Red Sand", "director", "André de Toth"), ("Blue Sand", "director", "Robert Stemm"),
            ("Andre DeToth", "date of death", "1975"), ("Robert Stemm", "date of death", "1987"),
        ),
    )  # fmt: skip
    hops = hops_of(question, {})
    assert [hop.parents for hop in hops] == [(), (), (0,), (1,)]
    # Another spelling of the name goes on from the answer that nothing else took up.
    assert [hop.sub_question for hop in hops[2:]] == ["When did #1 die?", "When did #2 die?"]


def test_a_decomposition_is_asked_in_its_own_words():
    performer, born, lies = hops_of(QUESTION, {})
    assert performer.sub_question == "Who performed Night Tide?"
    assert (born.sub_question, born.noun, born.parents) == ("Where was #1 born?", "", (0,))
    assert lies.parents == (1,) and lies.answers == ("Sogn", "the Sogn region")
    assert born.keywords == "#1 born"


def test_supporting_sentences_lead_from_the_named_passage_to_the_hidden_one():
    corpus = {
        "a": Passage("a", "Night Tide", "", ("Night Tide is by Ola Brandt.", "It is long.")),
        "b": Passage("b", "Ola Brandt", "", ("Ola Brandt is from Vik.",)),
    }
    question = Question(
        "h", "Where is the singer of Night Tide from?", ("Vik",), supporting=("b", "a"),
        supporting_sentences=(("b", 0), ("a", 0)),
    )  # fmt: skip
    first, second = hops_of(question, corpus)
    assert (first.answers, first.places) == (("Ola Brandt",), (("a", 0),))
    assert (second.parents, second.answers) == ((0,), ("Vik",))
    assert second.sub_question == f"What about #1: {question.question}"
    # Without sentences the passages alone are the hops; without annotations there are none.
    bare = dataclasses.replace(question, supporting_sentences=None)
    assert [hop.places for hop in hops_of(bare, corpus)] == [(("a", None),), (("b", None),)]
    assert hops_of(dataclasses.replace(bare, supporting=None), corpus) == ()


def test_any_relation_becomes_a_question():
    for relation in ("director", "circulates in", "is on", "atomic number", "directed by"):
        asks = relations.sub_question(relation, "Vik {0} #1")
        assert "Vik {0} #1" in asks and asks.endswith("?")
    assert relations.noun_phrase("stays on", "Vik") == ""
    assert relations.sub_question("directed by", "x") == relations.sub_question("director", "x")


def test_a_head_is_the_nearest_of_the_tails_and_a_fact_may_stand_at_any_supporting_sentence():
    question = dataclasses.replace(
        two_wiki(
            "How many live in the capital of the land of Macario?",
            (
                ("Macario", "produced in", "Mexico"), ("Mexico", "capital", "Mexico City"),
                ("Mexico City", "population", "12,294,193"),
            ),
        ),
        supporting=("film", "city"), supporting_sentences=(("film", 1),),
    )  # fmt: skip
    hops = hops_of(question, {})
    assert [hop.about for hop in hops] == ["Macario", "#1", "#2"]
    assert [hop.parents for hop in hops] == [(), (0,), (0, 1)]
    # A passage of which no sentence is named may state it anywhere.
    assert {hop.places for hop in hops} == {(("film", 1), ("city", None))}


def test_places_are_read_towards_the_answer_but_compared_in_any_order():
    corpus = {
        "a": Passage("a", "Vik", "Vik lies in Sogn.", None),
        "b": Passage("b", "Night Tide", "Night Tide is of Vik.", None),
    }
    question = Question("h", "Where was Night Tide made?", ("Sogn",), supporting=("a", "b"))
    assert [hop.parents for hop in hops_of(question, corpus)] == [(), (0,)]
    assert [hop.answers for hop in hops_of(question, corpus)] == [("Vik",), ("Sogn",)]
    compared = dataclasses.replace(question, type="comparison")
    assert [hop.parents for hop in hops_of(compared, corpus)] == [(), ()]


def test_words_are_compared_without_accents_and_stop_words():
    assert words("The Façade of Łódź, 1920") == {"facade", "łodz", "1920"}
    assert words("The Who") == {"the", "who"}
