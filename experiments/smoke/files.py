"""Writes an invented world in the official file formats of 2WikiMultihopQA, HotpotQA and MuSiQue.

    python experiments/smoke/files.py --workdir=F

Writes F/two_wiki/{train,dev}.json, F/hotpotqa/hotpot_{train_v1.1,dev_distractor_v1}.json and
F/musique/musique_ans_v1.0_{train,dev}.jsonl: 24 training and 16 dev questions about films, their
directors, and towns. F/articles/documents.jsonl has the same facts as articles (GRADE). Every fact
is a sentence of the form "The RELATION of HEAD is TAIL.", which experiments/smoke/server.py reads.
"""

import argparse
import json
import pathlib
import random
import re
import sys
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams, write_json, write_lines

NUM_TRAIN, NUM_DEV, PARAGRAPHS = 24, 16, 6

# Relation names have no "of", so that a chain of relations in a question can be split.
FACT = re.compile(r"\bThe ([a-z ]+?) of (.+?) is ([^.?]+)\.")
QUESTION = re.compile(r"What is the ((?:[a-z ]+? of the )*[a-z ]+?) of (.+?)\?", re.IGNORECASE)

_FILMS = [
    f"{first} {second}"
    for first in ("Amber", "Copper", "Hollow", "Silent", "Winter")
    for second in ("Lantern", "Orchard", "Ferry", "Meridian", "Quarry", "Sparrow", "Tower", "Mile")
]
_FIRST = ("Alma", "Bruno", "Celia", "Dario", "Edda", "Felix", "Greta", "Hugo", "Irma", "Jonas")
_LAST = ("Varn", "Ostrel", "Quillan", "Drovik")
_TOWNS = [f"{a}{b}" for a in ("Bal", "Cor", "Dun", "Fel", "Gar") for b in ("mouth", "stead")]
_COUNTRIES = ("Norland", "Estovia", "Marrow", "Tessaly", "Ulmia")
_CRAFTS = ("potter", "sailor", "weaver", "mason", "tanner", "baker")


class Fact(NamedTuple):
    """A fact, which its head's paragraph states."""

    head: str
    relation: str
    tail: str

    @property
    def sentence(self) -> str:
        """The sentence that states the fact."""
        return f"The {self.relation} of {self.head} is {self.tail}."


class Made(NamedTuple):
    """A question with its facts in reasoning order, and the titles of its paragraphs."""

    id: str
    question: str
    facts: tuple[Fact, ...]
    titles: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The answer to the question."""
        return self.facts[-1].tail


def chain_of(question: str) -> tuple[list[str], str] | None:
    """Parses a question into its relations, the first one to look up first, and its entity."""
    match = QUESTION.search(question)
    if match is None:
        return None
    return match[1].lower().split(" of the ")[::-1], match[2].removeprefix("the film ")


def question_of(relations: list[str], entity: str) -> str:
    """Returns the question that asks for a chain of relations; see `chain_of`."""
    return f"What is the {' of the '.join(relations[::-1])} of {entity}?"


def world(seed: int = 0) -> dict[str, list[Fact]]:
    """Returns the facts of every paragraph by its title."""
    rng = random.Random(seed)
    people = [f"{first} {last}" for last in _LAST for first in _FIRST]
    rng.shuffle(people)
    paragraphs = {}
    for index, (film, person) in enumerate(zip(_FILMS, people, strict=True)):
        paragraphs[film] = [Fact(film, "director", person)]
        paragraphs[person] = [
            Fact(person, "birthplace", rng.choice(_TOWNS)),
            Fact(person, "first trade", rng.choice(_CRAFTS)),
            Fact(person, "birth year", str(1880 + index)),
        ]
    for town in _TOWNS:
        paragraphs[town] = [
            Fact(town, "country", rng.choice(_COUNTRIES)),
            Fact(town, "founding year", str(1200 + 7 * len(paragraphs))),
        ]
    return paragraphs


def made_questions(hops: int, seed: int = 0) -> list[Made]:
    """Returns a question of two or three hops about every film, in a random order."""
    paragraphs, rng = world(seed), random.Random(seed + hops)
    made = []
    for film in rng.sample(_FILMS, len(_FILMS)):
        facts = [paragraphs[film][0]]
        relation = rng.choice(("birthplace", "first trade", "birth year"))
        if hops == 3:
            relation = "birthplace"
        facts += [fact for fact in paragraphs[facts[0].tail] if fact.relation == relation]
        if hops == 3:
            facts += paragraphs[facts[-1].tail][:1]
        gold = [fact.head for fact in facts]
        others = [title for title in paragraphs if title not in gold]
        titles = gold + rng.sample(others, PARAGRAPHS - len(gold))
        rng.shuffle(titles)
        question = question_of([fact.relation for fact in facts], f"the film {film}")
        made.append(Made(f"m{hops}-{len(made)}", question, tuple(facts), tuple(titles)))
    return made[: NUM_TRAIN + NUM_DEV]


def _sentences(title: str, facts: list[Fact]) -> list[str]:
    opening = f"{title} is the subject of a page of {len(facts)} facts."
    return [opening, *(fact.sentence for fact in facts)]


def hotpot_record(made: Made, paragraphs: dict[str, list[Fact]]) -> dict[str, Any]:
    """Returns a question in HotpotQA's format, which 2WikiMultihopQA extends."""
    supporting = [
        [fact.head, 1 + paragraphs[fact.head].index(fact)] for fact in made.facts
    ]  # after the opening sentence
    return {
        "_id": made.id,
        "type": "bridge",
        "level": "medium",
        "question": made.question,
        "context": [[title, _sentences(title, paragraphs[title])] for title in made.titles],
        "supporting_facts": supporting,
        "answer": made.answer,
    }


def two_wiki_record(made: Made, paragraphs: dict[str, list[Fact]]) -> dict[str, Any]:
    """Returns a question in 2WikiMultihopQA's format."""
    record = hotpot_record(made, paragraphs) | {"type": "compositional"}
    del record["level"]
    return {**record, "entity_ids": "", "evidences": [list(fact) for fact in made.facts]}


def musique_record(made: Made, paragraphs: dict[str, list[Fact]]) -> dict[str, Any]:
    """Returns a question in the format of MuSiQue-Ans."""
    steps = []
    for number, fact in enumerate(made.facts):
        entity = f"#{number}" if number else f"the film {fact.head}"
        steps.append(
            {
                "id": number,
                "question": f"What is the {fact.relation} of {entity}?",
                "answer": fact.tail,
                "paragraph_support_idx": made.titles.index(fact.head),
            }
        )
    gold = {fact.head for fact in made.facts}
    return {
        "id": f"{len(made.facts)}hop__{made.id}",
        "paragraphs": [
            {
                "idx": index,
                "title": title,
                "paragraph_text": " ".join(_sentences(title, paragraphs[title])),
                "is_supporting": title in gold,
            }
            for index, title in enumerate(made.titles)
        ],
        "question": made.question,
        "question_decomposition": steps,
        "answer": made.answer,
        "answer_aliases": [],
        "answerable": True,
    }


def articles(paragraphs: dict[str, list[Fact]]) -> list[dict[str, Any]]:
    """Returns the paragraphs as news articles, which state opinions next to facts."""
    return [
        {
            "id": f"a{number}",
            "title": title,
            "text": " ".join(
                [*(fact.sentence for fact in facts), f"I think that {title} deserves more pages."]
            ),
        }
        for number, (title, facts) in enumerate(paragraphs.items())
    ]


def write(folder: pathlib.Path) -> dict[str, Any]:
    """Writes the files; returns the number of questions of each benchmark."""
    paragraphs, counts = world(), {}
    for name, hops, record, files in (
        ("two_wiki", 2, two_wiki_record, ("train.json", "dev.json")),
        (
            "hotpotqa",
            2,
            hotpot_record,
            ("hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"),
        ),
        (
            "musique",
            3,
            musique_record,
            ("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl"),
        ),
    ):
        made = [record(question, paragraphs) for question in made_questions(hops)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, part in zip(files, (made[:NUM_TRAIN], made[NUM_TRAIN:]), strict=True):
            (write_lines if file.endswith("l") else write_json)(folder / name / file, part)
        counts[name] = len(made)
    (folder / "articles").mkdir(exist_ok=True)
    write_lines(folder / "articles" / "documents.jsonl", articles(paragraphs))
    return {"num_questions": counts, "num_passages": len(paragraphs), "complete": True}


if __name__ == "__main__":
    with standard_streams():
        parser = argparse.ArgumentParser(prog="python experiments/smoke/files.py")
        parser.add_argument("--workdir", required=True, type=pathlib.Path)
        print(json.dumps(write(parser.parse_args().workdir)))
