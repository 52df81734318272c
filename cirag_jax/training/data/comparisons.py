"""Makes new comparison questions from annotated facts, and states the results of comparisons.

Half of the questions of 2WikiMultihopQA compare two dates or two countries. From a few hundred such
questions, a small reader learns the form but not the comparison. New pairs of their facts give many
more questions about the same sentences. The training target also states the result of the
comparison before the answer, so that the reader does not have to compare and answer in one token.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import dateutil.parser
import numpy as np

from cirag_jax.datasets.annotations import names, words
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.types import Dataset, Passage, Question

# Relations in the facts that state a conclusion.
BEFORE, SAME, OTHER, IS = "before", "same as", "other than", "is"

# Separates the two source ids and the number in the id of a new question.
_JOINT = "+"

_EARLIER, _LATER = "earlier", "later"
# Relation -> (wording of the question, which date answers it).
_DATES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "date of birth": (
        ("was born first", _EARLIER),
        ("was born earlier", _EARLIER),
        ("is older", _EARLIER),
        ("was born later", _LATER),
        ("is younger", _LATER),
    ),
    "date of death": (("died first", _EARLIER), ("died earlier", _EARLIER), ("died later", _LATER)),
    "publication date": (
        ("came out first", _EARLIER),
        ("was released earlier", _EARLIER),
        ("came out later", _LATER),
    ),
    "inception": (("was founded first", _EARLIER), ("was established later", _LATER)),
}
_COUNTRIES = ("country of citizenship", "country of origin", "country")
# Adjectives whose first four letters differ from the name of the country.
_OF_COUNTRY = {
    "american": "United States",
    "british": "United Kingdom",
    "danish": "Denmark",
    "dutch": "Netherlands",
    "finnish": "Finland",
    "french": "France",
    "irish": "Ireland",
    "polish": "Poland",
    "spanish": "Spain",
    "turkish": "Turkey",
}
# Maker -> noun for the work, as in "Which film has the director who ...".
_THINGS = {"director": "film", "performer": "song", "composer": "work", "author": "book"}


class _Leg(NamedTuple):
    """One side of a comparison: a subject, and one or two facts that lead to the compared value."""

    subject: str
    facts: tuple[tuple[str, str, str], ...]
    places: tuple[tuple[str, int], ...]
    source: Question

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(relation for _, relation, _ in self.facts)

    @property
    def value(self) -> str:
        return self.facts[-1][2]


def recombine(
    dataset: Dataset, questions: Sequence[Question], count: int, seed: int
) -> list[Question]:
    """Draws new comparison questions over the facts of ``questions``.

    Questions without evidences or supporting sentences are ignored. The number of new questions is
    limited by ``count`` and by the number of comparable facts. A new question has an id that joins
    two source ids (see `sources`), evidences, supporting sentences, and the contexts of both
    sources.
    """
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, ...], list[_Leg]] = {}
    for question in questions:
        for leg in _legs(question, dataset.corpus):
            groups.setdefault(leg.path, []).append(leg)
    groups = {path: legs for path, legs in sorted(groups.items()) if len(legs) >= 8}
    if not groups:
        return []
    paths, count = list(groups), min(count, sum(map(len, groups.values())))
    share = np.array([min(len(groups[path]), 60) for path in paths], float)
    new: dict[str, Question] = {}
    for _ in range(20 * count):
        if len(new) == count:
            break
        legs = groups[paths[rng.choice(len(paths), p=share / share.sum())]]
        first, second = (legs[i] for i in rng.choice(len(legs), 2, replace=False))
        if first.path[-1] in _COUNTRIES and rng.random() < 0.5:  # Balances yes and no.
            same = [leg for leg in legs if _same_country(leg.value, first.value)]
            second = same[int(rng.integers(len(same)))]
        question = _compare(first, second, rng)
        if question is not None:
            new.setdefault(question.id, question)
    return list(new.values())


def sources(question_id: str) -> tuple[str, ...]:
    """Returns the two source ids of a recombined question, or the id of any other question."""
    parts = question_id.split(_JOINT)
    return tuple(parts[:-1]) if len(parts) == 3 and parts[-1].isdigit() else (question_id,)


def conclusion(question: Question) -> tuple[tuple[str, str, str], ...]:
    """Returns the conclusions of a comparison question, as additional facts of its chain.

    For two dates, they are the order of the dates, the order of the subjects, and the subject that
    answers the question: ``1930; before; 1949``, ``Ann; before; Bob`` and ``later; is; Bob``. For
    two countries, one fact states whether they are the same. Other questions have no conclusions.
    """
    facts = question.evidences or ()
    dates = [fact for fact in facts if fact[1] in _DATES]
    if len(dates) == 2 and dates[0][1] == dates[1][1]:
        sign = _compare_dates(dates[0][2], dates[1][2])
        if sign is None:
            return ()
        first, second = dates if sign < 0 else dates[::-1]
        years = [re.findall(r"\b\d{3,4}\b", fact[2])[-1:] for fact in (first, second)]
        values = [fact[2] for fact in (first, second)]
        if all(years) and years[0] != years[1]:
            values = [year for (year,) in years]
        order = ((values[0], BEFORE, values[1]), (first[0], BEFORE, second[0]))
        earlier, later = (_leads_to(question, fact[0]) for fact in (first, second))
        if earlier == later:
            return order
        return (*order, (_EARLIER, IS, first[0]) if earlier else (_LATER, IS, second[0]))
    places = [fact[2] for fact in facts if fact[1] in _COUNTRIES]
    if len(places) == 2 and question.answers[0] in ("yes", "no"):
        return ((places[0], SAME if question.answers[0] == "yes" else OTHER, places[1]),)
    return ()


def _leads_to(question: Question, name: str) -> bool:
    """Returns whether the answer is ``name`` or a work by ``name``."""
    answer = words(question.answers[0])
    works = (fact[0] for fact in question.evidences or () if words(fact[2]) == words(name))
    return any(words(text) == answer for text in (name, *works))


def _legs(question: Question, corpus: Mapping[str, Passage]) -> list[_Leg]:
    """Returns a question's comparable facts, each alone and after a fact that leads to it."""
    evidences = question.evidences or ()
    legs = []
    for index, fact in enumerate(evidences):
        if fact[1] not in _DATES and fact[1] not in _COUNTRIES:
            continue
        before = [e for e in evidences[:index] if e[1] in _THINGS and words(e[2]) == words(fact[0])]
        for facts in ((fact,), *((earlier, fact) for earlier in before[:1])):
            places = [_place(question, corpus, step) for step in facts]
            if None not in places:
                distinct = tuple(dict.fromkeys(place for place in places if place))
                legs.append(_Leg(facts[0][0], facts, distinct, question))
    return legs


def _place(
    question: Question, corpus: Mapping[str, Passage], fact: tuple[str, str, str]
) -> tuple[str, int] | None:
    """Returns the supporting sentence about the head that shares the most words with the tail."""
    tail = words(fact[2])
    ranked = [
        (len(tail & words(sentences_of(corpus[i])[s])), (i, s))
        for i, s in question.supporting_sentences or ()
        if i in corpus and names(corpus[i].title, fact[0]) and s < len(sentences_of(corpus[i]))
    ]
    return max(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _compare(first: _Leg, second: _Leg, rng: np.random.Generator) -> Question | None:
    """Returns a question that compares two legs, or None if the answer is unclear."""
    if words(first.subject) == words(second.subject) or first.source.id == second.source.id:
        return None
    relation = first.path[-1]
    if relation in _COUNTRIES:
        text = _ask_same(first, second, rng)
        answer = "yes" if _same_country(first.value, second.value) else "no"
    else:
        order = _compare_dates(first.value, second.value)
        if order is None:
            return None
        wording, which_date = _DATES[relation][int(rng.integers(len(_DATES[relation])))]
        text = _ask_which(first, second, wording, rng)
        answer = (first if (order < 0) == (which_date == _EARLIER) else second).subject
    bridges = [leg.facts[0] for leg in (first, second) if len(leg.facts) > 1]
    places = tuple(dict.fromkeys((*first.places, *second.places)))
    passages = tuple(dict.fromkeys(passage for passage, _ in places))
    context = dict.fromkeys(
        (*passages, *(first.source.context or ()), *(second.source.context or ()))
    )
    return Question(
        _JOINT.join((first.source.id, second.source.id, str(int(rng.integers(1 << 30))))),
        text,
        (answer,),
        type="bridge_comparison" if bridges else "comparison",
        split=first.source.split,
        supporting=passages,
        supporting_sentences=places,
        context=tuple(context),
        evidences=(*bridges, first.facts[-1], second.facts[-1]),
    )


def _ask_which(first: _Leg, second: _Leg, ask: str, rng: np.random.Generator) -> str:
    pair = f"{first.subject} or {second.subject}"
    if len(first.path) == 1:
        who = "Which" if first.path[0] in ("publication date", "inception") else "Who"
        return (f"{who} {ask}, {pair}?", f"{who} {ask}: {pair}?")[int(rng.integers(2))]
    thing, maker = _THINGS[first.path[0]], first.path[0]
    return (
        f"Which {thing} has the {maker} who {ask}, {pair}?",
        f"Which {thing} whose {maker} {ask}, {pair}?",
    )[int(rng.integers(2))]


def _ask_same(first: _Leg, second: _Leg, rng: np.random.Generator) -> str:
    pair = f"{first.subject} and {second.subject}"
    if len(first.path) == 1:
        return (
            (f"Are {pair} of the same nationality?", f"Do {pair} have the same nationality?")
            if first.path[0] == "country of citizenship"
            else (f"Are {pair} from the same country?", f"Are both {pair} of the same country?")
        )[int(rng.integers(2))]
    thing, maker = _THINGS[first.path[0]], first.path[0]
    return (
        f"Do both {maker}s of {pair} have the same nationality?",
        f"Are the {maker}s of the {thing}s {pair} from the same country?",
    )[int(rng.integers(2))]


def _same_country(a: str, b: str) -> bool:
    """Returns whether two values, such as "India" and "Indian", name the same country."""
    keys = [words(_OF_COUNTRY.get(value.casefold(), value)) for value in (a, b)]
    stems = [{word[:4] for word in key} for key in keys]
    return stems[0] == stems[1]


def _compare_dates(a: str, b: str) -> int | None:
    """Returns -1 if the first date is earlier, 1 if it is later, and None if it is unclear."""
    try:
        (first, first_end), (second, second_end) = (
            [
                dateutil.parser.parse(value, default=datetime.datetime(2000, *day))
                for day in ((1, 1), (12, 28))
            ]
            for value in (a, b)
        )
    except (ValueError, OverflowError):
        return None
    if first_end < second:
        return -1
    return 1 if second_end < first else None
