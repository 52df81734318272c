"""Generates a dataset about made-up families and works, to train readers.

Passages about people state birth and death, or father and mother, next to each other. A model that
was trained on few such passages confuses the two. This dataset can have any number of such
passages, with all facts annotated. The facts are made up, so a reader cannot know the answers
without reading. All questions belong to the split ``train``.
"""

import functools
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.types import Dataset, Passage, Question

_TEXTS: Mapping[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_suffix(".toml").read_text("utf-8")
)
_NAMES, _SENTENCES, _WORKS = _TEXTS["names"], _TEXTS["sentences"], _TEXTS["works"]
_ASKS: Mapping[str, Sequence[str]] = _TEXTS["asks"]
_MAKERS: Mapping[str, Sequence[str]] = _TEXTS["makers"]
_KIN: Mapping[str, Mapping[str, str]] = _TEXTS["kin"]
_BODY = ("birth", "parents", "spouse", "child", "career")  # Topics of optional sentences.
_COUNTRIES = list(_TEXTS["countries"].items())  # (adjective, towns)


class _Fact(NamedTuple):
    relation: str
    tail: str
    place: tuple[str, int]


class _Page(NamedTuple):
    """A passage with its facts."""

    passage: Passage
    facts: tuple[_Fact, ...]


@functools.lru_cache(maxsize=2)
def build(num_questions: int = 2000, seed: int = 0) -> Dataset:
    """Builds the dataset: per three questions, a family of three people and a work.

    Each question needs two facts, and has evidences, supporting sentences and a context of up to
    twelve passages.
    """
    rng = np.random.default_rng(seed)
    pages: dict[str, _Page] = {}
    starts: list[str] = []  # Ids of the passages that questions start from.
    used: set[str] = set()
    for family in range((num_questions + 2) // 3):
        people = _family(rng, used)
        for person in people:
            pages[person["id"]] = _life(person, rng, used)
        starts += [people[0]["id"], people[1]["id"]]  # A child and a parent.
        maker = people[int(rng.integers(len(people)))]
        work = _work(f"work-{family:05d}", maker, rng, used)
        pages[work.passage.id] = work
        starts.append(work.passage.id)
    by_title = {page.passage.title: page for page in pages.values()}
    ids = list(pages)
    questions: list[Question] = []
    while len(questions) < num_questions:
        first = pages[_pick(starts, rng)]
        question = _question(f"lives-{len(questions):05d}", first, by_title, ids, rng)
        if question is not None:
            questions.append(question)
    corpus = {key: page.passage for key, page in pages.items()}
    return Dataset("lives", tuple(questions), corpus, {})


def _question(
    key: str, first: _Page, by_title: Mapping[str, _Page], ids: list[str], rng: Any
) -> Question | None:
    """Returns a question about a passage that ``first`` links to.

    Returns None if ``first`` has no links or is itself the answer.
    """
    links = [fact for fact in first.facts if fact.tail in by_title]
    if not links:
        return None
    link = _pick(links, rng)
    second = by_title[link.tail]
    kin = _KIN.get(link.relation, {})
    related = [fact for fact in second.facts if fact.relation in kin]
    if related and rng.random() < 0.4:
        last = _pick(related, rng)
        asks, name = ("Who is the {} of {}?", "Who is {1}'s {0}?"), kin[last.relation]
        text = _pick(asks, rng).format(name, first.passage.title)
    else:
        last = _pick([fact for fact in second.facts if fact.relation in _ASKS], rng)
        text = _pick(_ASKS[last.relation], rng).format(_named(link.relation, first, rng))
    title = first.passage.title
    if last.tail == title:
        return None
    gold = (first.passage.id, second.passage.id)
    others = [ids[i] for i in rng.integers(len(ids), size=10) if ids[i] not in gold]
    return Question(
        key,
        text,
        (last.tail,),
        type="compositional",
        hops=2,
        split="train",
        supporting=gold,
        supporting_sentences=(link.place, last.place),
        context=(*gold, *dict.fromkeys(others)),
        evidences=(
            (title, link.relation, link.tail),
            (second.passage.title, last.relation, last.tail),
        ),
    )


def _named(relation: str, page: _Page, rng: Any) -> str:
    """Returns a description of a person, such as "the mother of" and the title of ``page``."""
    title = page.passage.title
    if relation in _MAKERS:
        return _pick(_MAKERS[relation], rng).format(title)
    return _pick((f"the {relation} of {title}", f"{title}'s {relation}"), rng)


def _family(rng: Any, used: set[str]) -> list[dict[str, Any]]:
    """Returns three people: a child, the father and the mother."""
    woman, year = bool(rng.integers(2)), int(rng.integers(1860, 1975))
    paternal, maternal = _surname(rng), _surname(rng)
    father = _person(False, paternal, year - int(rng.integers(20, 45)), rng, used)
    mother = _person(True, maternal, year - int(rng.integers(18, 40)), rng, used)
    child = _person(woman, paternal, year, rng, used)
    child |= {"father": father["name"], "mother": mother["name"]}
    father |= {"spouse": mother["name"], "offspring": child["name"]}
    mother |= {"spouse": father["name"], "offspring": child["name"]}
    return [child, father, mother]


def _person(woman: bool, surname: str, year: int, rng: Any, used: set[str]) -> dict[str, Any]:
    name = _new_name(woman, rng, used, surname)
    nation, towns = _pick(_COUNTRIES, rng)
    death = year + int(rng.integers(31, 90))
    return {
        "id": "person-" + "-".join(name.lower().split()),
        "name": name,
        "surname": surname,
        "woman": woman,
        "nation": nation,
        "a_nation": f"{'an' if nation[0] in 'AEIOU' else 'a'} {nation}",
        "birthplace": _pick(towns, rng),
        "deathplace": _town(rng),
        "born": _date(year, rng),
        "birth_year": year,
        "died": _date(death, rng),
        "later_year": death + 3,
        "marriage_year": year + int(rng.integers(20, 30)),
        "school": _pick(_NAMES["schools"], rng).format(_town(rng)),
        "cause": _pick(_NAMES["causes"], rng),
        "award": _pick(_NAMES["awards"], rng),
    }


def _life(person: dict[str, Any], rng: Any, used: set[str]) -> _Page:
    """Returns the passage about a person, with randomly chosen sentences."""
    woman = person["woman"]
    for role, female, surname in (
        ("father", False, person["surname"]), ("mother", True, None), ("spouse", not woman, None),
        ("sibling", woman, person["surname"]), ("in_law", False, None), ("offspring", True, None),
    ):  # fmt: skip
        person.setdefault(role, _new_name(female, rng, used, surname))
    short = _pick(("she" if woman else "he", person["name"], person["name"].split()[-1]), rng)
    slots = person | {
        "short": short,
        "Short": short[0].upper() + short[1:],
        "possessive": "her" if woman else "his",
        "Possessive": "Her" if woman else "His",
        "child": "daughter" if woman else "son",
        "partner": "wife" if woman else "husband",
        "parent": "mother" if woman else "father",
        "brother": "sister" if woman else "brother",
        "child_in_law": "son" if woman else "daughter",
        "job": _pick(_NAMES["jobs"], rng),
    }
    values = {
        "date of birth": person["born"],
        "date of death": person["died"],
        "place of birth": person["birthplace"],
        "place of death": person["deathplace"],
        "country of citizenship": person["nation"],
        "child": person["offspring"],
        "educated at": person["school"],
        "cause of death": person["cause"],
        "award received": person["award"],
        **{name: person[name] for name in ("father", "mother", "spouse")},
    }
    body = [_pick(_SENTENCES[kind], rng) for kind in _BODY]
    body += list(rng.choice(_SENTENCES["filler"], int(rng.integers(0, 3)), replace=False))
    order = rng.permutation(len(body))
    templates = [_pick(_SENTENCES["opening"], rng), *(body[i] for i in order[: rng.integers(2, 6)])]
    sentences, facts = [], []
    for index, template in enumerate(templates):
        sentences.append(template["text"].format(**slots, elsewhere=_town(rng)))
        stated = {fact.relation for fact in facts}
        place = (person["id"], index)
        facts += [_Fact(r, str(values[r]), place) for r in template["states"] if r not in stated]
    passage = Passage(person["id"], person["name"], " ".join(sentences), tuple(sentences))
    return _Page(passage, tuple(facts))


def _work(key: str, maker: dict[str, Any], rng: Any, used: set[str]) -> _Page:
    """Returns the passage about a work; its first sentences name the maker."""
    work = _pick(_WORKS, rng)
    title = _unused(lambda: " ".join(_pick(words, rng) for words in _NAMES["titles"]), used, rng)
    year = maker["birth_year"] + int(rng.integers(22, 60))
    added = {name: _new_name(bool(rng.integers(2)), rng, used) for name in ("other", "another")}
    sentences = [
        text.format(title=title, maker=maker["name"], year=year, nation=maker["nation"], **added)
        for text in work["sentences"]
    ]
    place = (key, len(sentences) - 1)
    sentences.append(f"It is known beyond {_town(rng)}.")
    passage = Passage(key, title, " ".join(sentences), tuple(sentences))
    facts = (
        _Fact(work["relation"], maker["name"], place),
        _Fact("publication date", str(year), place),
    )
    return _Page(passage, facts)


def _pick(options: Any, rng: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _town(rng: Any) -> str:
    return _pick(_pick(_COUNTRIES, rng)[1], rng)


def _date(year: int, rng: Any) -> str:
    day, month = int(rng.integers(1, 29)), _pick(_NAMES["months"], rng)
    return _pick((f"{day} {month} {year}", f"{month} {day}, {year}"), rng)


def _surname(rng: Any) -> str:
    return _pick(_NAMES["starts"], rng) + _pick(_NAMES["ends"], rng)


def _new_name(woman: bool, rng: Any, used: set[str], surname: str | None = None) -> str:
    firsts, surname = _NAMES["women" if woman else "men"], surname or _surname(rng)
    return _unused(lambda: f"{_pick(firsts, rng)} {surname}", used, rng)


def _unused(draw: Any, used: set[str], rng: Any) -> str:
    """Draws an unused name; after 20 attempts, adds an initial or a suffix."""
    for _ in range(20):
        name = draw()
        if name not in used:
            break
    else:
        first, _, rest = draw().rpartition(" ")
        name = f"{first} {_pick('ABCDEFGHJKLMNPRSTVW', rng)}. {rest}"
        while name in used:
            name = f"{name} {_pick(('II', 'III', 'IV', 'Jr', 'Sr'), rng)}"
    used.add(name)
    return name
