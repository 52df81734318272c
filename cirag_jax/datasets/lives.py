"""Made-up lives: families, their works, and questions about them; a dataset to train readers on.

Real passages state a birth beside a death, a father beside a mother, and a model that has read few
of them takes one for the other. Here is any number of them, with every fact annotated. Nothing in
it is true, so that a reader cannot know the answers and has to read them. All questions are of the
split ``train``.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.types import Dataset, Passage, Question

_WOMEN = [
    "Alma",
    "Beata",
    "Clara",
    "Dorit",
    "Edda",
    "Flora",
    "Greta",
    "Hedda",
    "Ilse",
    "Jana",
    "Karin",
    "Lena",
    "Marta",
    "Nora",
    "Olga",
    "Petra",
    "Rosa",
    "Selma",
    "Thea",
    "Ulla",
    "Vera",
    "Wanda",
    "Yara",
    "Zita",
    "Amina",
    "Leila",
    "Chiara",
    "Noriko",
    "Mei",
    "Ines",
]
_MEN = [
    "Anton",
    "Bruno",
    "Carl",
    "Dario",
    "Emil",
    "Felix",
    "Gustav",
    "Henrik",
    "Igor",
    "Jonas",
    "Karel",
    "Leon",
    "Matti",
    "Nils",
    "Oskar",
    "Pavel",
    "Rasmus",
    "Simon",
    "Tomas",
    "Ulf",
    "Viktor",
    "Walter",
    "Yusuf",
    "Zoltan",
    "Hassan",
    "Kenji",
    "Ravi",
    "Pedro",
    "Liam",
    "Piero",
]
_STARTS = [
    "Al",
    "Bar",
    "Cal",
    "Dor",
    "Er",
    "Fen",
    "Gar",
    "Hol",
    "Ist",
    "Jor",
    "Kal",
    "Lin",
    "Mor",
    "Nor",
    "Os",
    "Per",
    "Quin",
    "Ros",
    "Sol",
    "Tal",
]
_ENDS = [
    "berg",
    "dale",
    "den",
    "feld",
    "gard",
    "ham",
    "holt",
    "king",
    "lund",
    "man",
    "mark",
    "ner",
    "rak",
    "sen",
    "stone",
    "ton",
    "vani",
    "wick",
]
# Country, its adjective, and towns of it.
_COUNTRIES = (
    ("Norway", "Norwegian", ("Bergen", "Tromsø", "Stavanger")),
    ("Italy", "Italian", ("Turin", "Parma", "Bari")),
    ("Japan", "Japanese", ("Nagoya", "Sapporo", "Kobe")),
    ("Brazil", "Brazilian", ("Recife", "Manaus", "Belém")),
    ("India", "Indian", ("Pune", "Mysore", "Kochi")),
    ("Canada", "Canadian", ("Halifax", "Calgary", "Winnipeg")),
    ("Egypt", "Egyptian", ("Aswan", "Luxor", "Suez")),
    ("Poland", "Polish", ("Lublin", "Gdańsk", "Poznań")),
    ("Mexico", "Mexican", ("Puebla", "Mérida", "Oaxaca")),
    ("France", "French", ("Lyon", "Rouen", "Toulouse")),
    ("England", "English", ("Leeds", "Exeter", "York")),
    ("Germany", "German", ("Bremen", "Ulm", "Dresden")),
    ("Ireland", "Irish", ("Cork", "Sligo", "Galway")),
    ("Turkey", "Turkish", ("Bursa", "Konya", "Izmir")),
    ("Australia", "Australian", ("Perth", "Hobart", "Darwin")),
    ("Spain", "Spanish", ("Cádiz", "Bilbao", "Toledo")),
)
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_TITLES = (
    ("The", "Beyond the", "Under the", "From the"),
    [
        "Silver",
        "Broken",
        "Last",
        "Hidden",
        "Crimson",
        "Quiet",
        "Distant",
        "Iron",
        "Golden",
        "Winter",
        "Seventh",
        "Blue",
    ],
    [
        "Garden",
        "Mirror",
        "Bridge",
        "Station",
        "Orchard",
        "Letter",
        "Tide",
        "Crown",
        "Valley",
        "Window",
        "Lantern",
        "Voyage",
    ],
)
# How a passage says it, its maker in the last sentence, and the annotated relation.
_WORKS = (
    (("{title} is a {year} film directed by {maker}.",), "director"),
    (("Directed by {maker}, the film {title} was released in {year}.",), "director"),
    (("{title} is a song by {maker}, released in {year}.",), "performer"),
    (("{title} is an opera composed by {maker} in {year}.",), "composer"),
    (("{title} is a novel that {maker} published in {year}.",), "author"),
    (("{title} is a company.", "{maker} founded it in {year}."), "founded by"),
)

# Sentences about a person, and the relations that they state.
_OPENINGS = (
    (
        "{name} ({born} – {died}) was {a_nation} {job}.",
        ("date of birth", "date of death", "country of citizenship"),
    ),
    (
        "{name} (born {born} in {birthplace}; died {died} in {deathplace}) was {a_nation} {job}.",
        ("date of birth", "place of birth", "date of death", "place of death"),
    ),
    ("{name} was {a_nation} {job}.", ("country of citizenship",)),
)
_BIRTHS = (
    ("{Short} was born in {birthplace}.", ("place of birth",)),
    (
        "{Short} was born in {birthplace} in {birth_year} and died in {deathplace}.",
        ("place of birth", "place of death"),
    ),
    (
        "Born in {birthplace}, {short} grew up in {elsewhere} and died in {deathplace}.",
        ("place of birth", "place of death"),
    ),
    (
        "{Short} was born on {born} in {birthplace} and died in {deathplace} on {died}.",
        ("date of birth", "place of birth", "place of death", "date of death"),
    ),
    (
        "{Short} died in {deathplace} on {died}, far from {birthplace}, where {short} was born.",
        ("place of birth", "place of death", "date of death"),
    ),
)
_PARENTS = (
    ("{Short} was the only child of {father} and {mother}.", ("father", "mother")),
    ("{Possessive} father was {father}, {possessive} mother {mother}.", ("father", "mother")),
    ("{Short} was the {child} of the merchant {father} and the painter {mother}.",
     ("father", "mother")),
    ("{Possessive} mother, {mother}, came from {elsewhere}.", ("mother",)),
    ("{Short} was the {child} of {father}.", ("father",)),
)  # fmt: skip
_SPOUSES = (
    ("{Short} married {spouse} in {elsewhere}.", ("spouse",)),
    ("{Short} was the {partner} of {spouse}.", ("spouse",)),
)
_FILLERS = (
    "{Short} studied in {elsewhere} for some years.",
    "Friends remembered {possessive} patience.",
    "{Short} travelled to {elsewhere} in {later_year}.",
    "A street in {elsewhere} is named after {name}.",
    "{Possessive} letters were printed in {later_year}.",
)
# How a person is asked about; relations that are not here are asked with `who_is`.
_ASKS = {
    "place of birth": ("Where was {} born?", "In which town was {} born?",
                       "What is the place of birth of {}?"),
    "place of death": ("Where did {} die?", "What is the place of death of {}?",
                       "In which town did {} die?"),
    "date of birth": ("When was {} born?", "What is the date of birth of {}?"),
    "date of death": ("When did {} die?", "What is the date of death of {}?"),
    "country of citizenship": ("What is the nationality of {}?", "What nationality is {}?"),
    "father": ("Who is the father of {}?", "Who was the father of {}?"),
    "mother": ("Who is the mother of {}?", "Who was the mother of {}?"),
    "spouse": ("Who is the spouse of {}?", "Whom did {} marry?"),
}  # fmt: skip
_MAKER = {
    "director": "the director of the film {}",
    "performer": "the performer of the song {}",
    "composer": "the composer of the opera {}",
    "author": "the author of the novel {}",
    "founded by": "the founder of {}",
}


class _Fact(NamedTuple):
    relation: str
    tail: str
    place: tuple[str, int]


class _Page(NamedTuple):
    """A passage with the facts that it states."""

    passage: Passage
    facts: tuple[_Fact, ...]


@functools.lru_cache(maxsize=2)
def build(num_questions: int = 2000, seed: int = 0) -> Dataset:
    """The dataset: three passages a family, one a work, one question of two facts each.

    Args:
      num_questions: how many; there are a third as many families.
      seed: of everything that is drawn.

    Returns:
      Questions with evidences, supporting sentences and a context of ten passages.
    """
    rng = np.random.default_rng(seed)
    pages: dict[str, _Page] = {}
    starts: list[str] = []  # Passages that a question may begin at.
    used: set[str] = set()
    for family in range((num_questions + 2) // 3):
        people = _family(rng, used)
        for person in people:
            pages[person["id"]] = _life(person, rng, used)
        starts.append(people[0]["id"])
        maker = people[int(rng.integers(len(people)))]
        work = _work(f"work-{family:05d}", maker, rng, used)
        pages[work.passage.id] = work
        starts.append(work.passage.id)
    by_title = {page.passage.title: page for page in pages.values()}
    every = list(pages)
    questions: list[Question] = []
    while len(questions) < num_questions:
        first = pages[starts[int(rng.integers(len(starts)))]]
        found = _question(f"lives-{len(questions):05d}", first, by_title, every, rng)
        if found is not None:
            questions.append(found)
    corpus = {key: page.passage for key, page in pages.items()}
    return Dataset("lives", tuple(questions), corpus, {})


def _question(
    key: str, first: _Page, by_title: Mapping[str, _Page], every: list[str], rng: Any
) -> Question | None:
    """From a passage to one that it names, and what is asked about that; None: it names none."""
    links = [fact for fact in first.facts if fact.tail in by_title]
    if not links:
        return None
    link = _pick(links, rng)
    second = by_title[link.tail]
    asked = [fact for fact in second.facts if fact.relation in _ASKS]
    last = _pick(asked, rng)
    title = first.passage.title
    if link.relation in _MAKER:
        who = _MAKER[link.relation].format(title)
    else:
        who = _pick((f"the {link.relation} of {title}", f"{title}'s {link.relation}"), rng)
    gold = (first.passage.id, second.passage.id)
    others = [every[i] for i in rng.integers(len(every), size=10) if every[i] not in gold]
    return Question(
        key,
        _pick(_ASKS[last.relation], rng).format(who),
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


# -------------------------------------------------------------------------------------------- pages


def _family(rng: Any, used: set[str]) -> list[dict[str, Any]]:
    """A child, its father and its mother, born a generation earlier."""
    surname = _surname(rng)
    woman = bool(rng.integers(2))
    year = int(rng.integers(1860, 1975))
    father = _person(_name(_MEN, surname, rng, used), False, year - int(rng.integers(20, 45)), rng)
    mother = _person(
        _name(_WOMEN, _surname(rng), rng, used), True, year - int(rng.integers(18, 40)), rng
    )
    child = _person(_name(_WOMEN if woman else _MEN, surname, rng, used), woman, year, rng)
    child |= {"father": father["name"], "mother": mother["name"]}
    father["spouse"], mother["spouse"] = mother["name"], father["name"]
    return [child, father, mother]


def _person(name: str, woman: bool, year: int, rng: Any) -> dict[str, Any]:
    country, nation, towns = _pick(_COUNTRIES, rng)
    death = year + int(rng.integers(31, 90))
    _, _, others = _pick(_COUNTRIES, rng)
    return {
        "id": "person-" + "-".join(name.lower().split()),
        "name": name,
        "woman": woman,
        "country": country,
        "nation": nation,
        "a_nation": f"{'an' if nation[0] in 'AEIOU' else 'a'} {nation}",
        "birthplace": _pick(towns, rng),
        "deathplace": _pick(others, rng),
        "born": _date(year, rng),
        "birth_year": year,
        "died": _date(death, rng),
        "later_year": death + 3,
    }


def _life(person: dict[str, Any], rng: Any, used: set[str]) -> _Page:
    """The passage of a person, in one of many wordings."""
    woman = person["woman"]
    if "father" not in person:
        person["father"] = _name(_MEN, _surname(rng), rng, used)
        person["mother"] = _name(_WOMEN, _surname(rng), rng, used)
    person.setdefault("spouse", _name(_MEN if woman else _WOMEN, _surname(rng), rng, used))
    short = _pick(("she" if woman else "he", person["name"], person["name"].split()[-1]), rng)
    said = person | {
        "short": short,
        "Short": short[0].upper() + short[1:],
        "possessive": "her" if woman else "his",
        "Possessive": "Her" if woman else "His",
        "child": "daughter" if woman else "son",
        "partner": "wife" if woman else "husband",
        "job": _pick(("writer", "engineer", "painter", "singer", "film director", "doctor"), rng),
    }
    values = {
        "date of birth": person["born"],
        "date of death": person["died"],
        "place of birth": person["birthplace"],
        "place of death": person["deathplace"],
        "country of citizenship": person["nation"],
        **{name: person[name] for name in ("father", "mother", "spouse")},
    }
    body = [_pick(_BIRTHS, rng), _pick(_PARENTS, rng), _pick(_SPOUSES, rng)]
    body += [(text, ()) for text in rng.choice(_FILLERS, int(rng.integers(0, 3)), replace=False)]
    order = rng.permutation(len(body))
    chosen = [_pick(_OPENINGS, rng), *(body[i] for i in order[: int(rng.integers(2, 5))])]
    sentences, facts = [], []
    for index, (text, stated) in enumerate(chosen):
        elsewhere = _pick(_pick(_COUNTRIES, rng)[2], rng)
        sentences.append(text.format(**said, elsewhere=elsewhere))
        known = {fact.relation for fact in facts}
        place = (person["id"], index)
        facts += [_Fact(r, str(values[r]), place) for r in stated if r not in known]
    passage = Passage(person["id"], person["name"], " ".join(sentences), tuple(sentences))
    return _Page(passage, tuple(facts))


def _work(key: str, maker: dict[str, Any], rng: Any, used: set[str]) -> _Page:
    """The passage of a work, which names its maker in its first sentences."""
    told, relation = _pick(_WORKS, rng)
    title = _fresh(lambda: " ".join(_pick(words, rng) for words in _TITLES), used, rng)
    year = maker["birth_year"] + int(rng.integers(22, 60))
    sentences = [text.format(title=title, maker=maker["name"], year=year) for text in told]
    place = (key, len(sentences) - 1)
    sentences.append(f"It is known beyond {_pick(_pick(_COUNTRIES, rng)[2], rng)}.")
    passage = Passage(key, title, " ".join(sentences), tuple(sentences))
    facts = (_Fact(relation, maker["name"], place), _Fact("publication date", str(year), place))
    return _Page(passage, facts)


# -------------------------------------------------------------------------------------------- names


def _pick(options: Any, rng: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _date(year: int, rng: Any) -> str:
    day, month = int(rng.integers(1, 29)), _pick(_MONTHS, rng)
    return _pick((f"{day} {month} {year}", f"{month} {day}, {year}"), rng)


def _surname(rng: Any) -> str:
    return _pick(_STARTS, rng) + _pick(_ENDS, rng)


def _name(firsts: Any, surname: str, rng: Any, used: set[str]) -> str:
    return _fresh(lambda: f"{_pick(firsts, rng)} {surname}", used, rng)


def _fresh(draw: Any, used: set[str], rng: Any) -> str:
    """A name that nobody has yet; after some tries with an initial or a number in it."""
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
