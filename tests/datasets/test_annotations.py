"""Annotations of all benchmarks, converted to hops."""

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


def test_hops_head_equal_to_earlier_tail_becomes_reference():
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


def test_hops_of_bridge_comparison_form_two_independent_chains():
    question = two_wiki(
        "Which film has the director who died later, Red Sand or Blue Sand?",
        (
            ("Red Sand", "director", "André de Toth"), ("Blue Sand", "director", "Robert Stemm"),
            ("Andre DeToth", "date of death", "1975"), ("Robert Stemm", "date of death", "1987"),
        ),
    )  # fmt: skip
    hops = hops_of(question, {})
    assert [hop.parents for hop in hops] == [(), (), (0,), (1,)]
    # A head that is spelled differently refers to the only unused tail.
    assert [hop.sub_question for hop in hops[2:]] == ["When did #1 die?", "When did #2 die?"]


def test_hops_of_decomposition_keep_its_wording():
    performer, born, lies = hops_of(QUESTION, {})
    assert performer.sub_question == "Who performed Night Tide?"
    assert (born.sub_question, born.noun, born.parents) == ("Where was #1 born?", "", (0,))
    assert lies.parents == (1,) and lies.answers == ("Sogn", "the Sogn region")
    assert born.keywords == "#1 born"


def test_hops_of_sentences_start_at_the_passage_the_question_names():
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
    # Without sentences, the hops are passages; without annotations, there are none.
    bare = dataclasses.replace(question, supporting_sentences=None)
    assert [hop.places for hop in hops_of(bare, corpus)] == [(("a", None),), (("b", None),)]
    assert hops_of(dataclasses.replace(bare, supporting=None), corpus) == ()


def test_sub_question_any_relation_gives_a_question():
    for relation in ("director", "circulates in", "is on", "atomic number", "directed by"):
        asks = relations.sub_question(relation, "Vik {0} #1")
        assert "Vik {0} #1" in asks and asks.endswith("?")
    assert relations.noun_phrase("stays on", "Vik") == ""
    assert relations.sub_question("directed by", "x") == relations.sub_question("director", "x")


def test_hops_head_refers_to_nearest_tail_and_any_supporting_sentence():
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
    # A passage without annotated sentences may state the hop in any sentence.
    assert {hop.places for hop in hops} == {(("film", 1), ("city", None))}


def test_hops_of_passages_end_at_the_answer_unless_compared():
    corpus = {
        "a": Passage("a", "Vik", "Vik lies in Sogn.", None),
        "b": Passage("b", "Night Tide", "Night Tide is of Vik.", None),
    }
    question = Question("h", "Where was Night Tide made?", ("Sogn",), supporting=("a", "b"))
    assert [hop.parents for hop in hops_of(question, corpus)] == [(), (0,)]
    assert [hop.answers for hop in hops_of(question, corpus)] == [("Vik",), ("Sogn",)]
    compared = dataclasses.replace(question, type="comparison")
    assert [hop.parents for hop in hops_of(compared, corpus)] == [(), ()]


def test_words_ignore_accents_and_stop_words():
    assert words("The Façade of Łódź, 1920") == {"facade", "łodz", "1920"}
    assert words("The Who") == {"the", "who"}
