"""Recombined comparison questions, and conclusions of comparisons."""

import dataclasses
import re

import pytest

from cirag_jax.training.data import comparisons, lives
from cirag_jax.types import Dataset, Passage, Question


@pytest.fixture(scope="module")
def recombined():
    dataset = lives.build(600, seed=5)
    return dataset, comparisons.recombine(dataset, dataset.questions, 200, seed=0)


def test_recombine_dates_have_correct_answers(recombined):
    _, questions = recombined
    checked = 0
    for question in questions:
        first, second = (int(re.findall(r"\d{4}", e[2])[0]) for e in question.evidences[-2:]) if (
            "date" in question.evidences[-1][1]
        ) else (0, 0)  # fmt: skip
        if first == second:
            continue
        later = bool(re.search(r"later|younger", question.question))
        subjects = [question.evidences[0][0], question.evidences[1][0]]
        assert question.answers == (subjects[int((second < first) != later)],)
        assert all(subject in question.question for subject in subjects)
        checked += 1
    assert checked > 80


def test_recombine_countries_have_correct_balanced_answers(recombined):
    _, questions = recombined
    answers = []
    for question in questions:
        if question.evidences[-1][1] == "country of citizenship":
            same = question.evidences[-1][2] == question.evidences[-2][2]
            assert question.answers == ("yes" if same else "no",)
            answers.append(same)
    assert 0.35 < sum(answers) / len(answers) < 0.65


def test_recombine_evidence_is_from_two_sources(recombined):
    dataset, questions = recombined
    by_id = {question.id: question for question in dataset.questions}
    for question in questions:
        texts = [dataset.corpus[i].sentences[s] for i, s in question.supporting_sentences]
        assert all(any(fact[2] in text for text in texts) for fact in question.evidences)
        sources = comparisons.sources(question.id)
        assert len(set(sources)) == 2
        facts = [fact for source in sources for fact in by_id[source].evidences]
        assert set(question.evidences) <= set(facts)
    assert len({question.id for question in questions}) == len(questions) == 200
    assert comparisons.sources("2hop__1+2") == ("2hop__1+2",)  # This is not a recombined id.


def test_recombine_adjectives_match_and_unclear_dates_are_dropped():
    def person(index, value, relation="country of citizenship"):
        return Question(
            f"q{index}", "?", (value,), split="train", supporting=(f"p{index}",),
            supporting_sentences=((f"p{index}", 0),), context=(f"p{index}",),
            evidences=((f"Person {index}x", relation, value),),
        )  # fmt: skip

    def recombine(values, relation="country of citizenship"):
        questions = [person(i, v, relation) for i, v in enumerate(values)]
        corpus = {f"p{i}": Passage(f"p{i}", f"Person {i}x", v) for i, v in enumerate(values)}
        dataset = Dataset("made", tuple(questions), corpus, {})
        return comparisons.recombine(dataset, questions, 100, seed=1)

    american = recombine(["United States", "American"] * 20)
    assert {len({tail for _, _, tail in q.evidences or ()}) for q in american} == {1, 2}
    assert {question.answers for question in american} == {("yes",)}
    values = {q.answers[0] for q in recombine(["India", "Indian", "France", "French"] * 2)}
    assert values == {"yes", "no"}
    assert recombine(["1950"] * 8, "date of birth") == []  # Neither date is earlier.
    assert recombine(["unknown"] * 8, "date of birth") == []
    assert recombine(["1950", "12 May 1950"] * 4, "date of birth") == []


def test_recombine_without_annotations_is_empty(recombined):
    dataset, _ = recombined
    bare = [dataclasses.replace(q, evidences=None) for q in dataset.questions[:50]]
    assert comparisons.recombine(dataset, bare, 10, seed=0) == []
    assert comparisons.recombine(dataset, dataset.questions, 0, seed=0) == []


@pytest.mark.parametrize(
    ("facts", "answer", "concluded"),
    [
        (
            [("Bob", "date of birth", "3 May 1949"), ("Ann", "date of birth", "June 1, 1930")],
            "Bob",
            (("1930", "before", "1949"), ("Ann", "before", "Bob"), ("later", "is", "Bob")),
        ),
        (
            [
                ("F", "director", "Ann"), ("G", "director", "Bob"),
                ("Ann", "date of death", "3 May 1949"), ("Bob", "date of death", "5 June 1949"),
            ],
            "F",
            (
                ("3 May 1949", "before", "5 June 1949"), ("Ann", "before", "Bob"),
                ("earlier", "is", "Ann"),
            ),
        ),
        (
            [("Ann", "date of birth", "1930"), ("Bob", "date of birth", "1949")],
            "Cid",  # This is not a subject.
            (("1930", "before", "1949"), ("Ann", "before", "Bob")),
        ),
        (
            [("A", "country", "India"), ("B", "country", "Indian")],
            "yes",
            (("India", "same as", "Indian"),),
        ),
        (
            [("A", "country", "Peru"), ("B", "country", "Iran")],
            "no",
            (("Peru", "other than", "Iran"),),
        ),
        # Neither date is earlier, nothing is compared, or there are more than two dates.
        ([("A", "inception", "1949"), ("B", "inception", "5 June 1949")], "A", ()),
        ([("A", "country", "Peru"), ("B", "country", "Iran")], "Peru", ()),
        ([("A", "father", "B"), ("B", "date of birth", "1900")], "1900", ()),
        (
            [(who, f"date of {what}", year) for who, what, year in (
                ("A", "birth", "1900"), ("B", "birth", "1920"),
                ("A", "death", "1970"), ("B", "death", "1980"),
            )],
            "A",
            (),
        ),
    ],
)  # fmt: skip
def test_conclusion_compares_two_dates_or_countries(facts, answer, concluded):
    question = Question("q", "?", (answer,), evidences=tuple(facts))
    assert comparisons.conclusion(question) == concluded
