"""The graph of entities and typed facts, and the formatting of its numbers and names."""

import dataclasses
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from cirag_jax.datasets.demo.wording import NUMBER_WORDS

# Maximum numbers of entities of the large kinds; small kinds have no limit.
LIMITS = {
    "film": 780,
    "airport": 280,
    "namesake airport": 40,
    "town": 120,
    "station": 100,
    "county": 80,
    "namesake city": 60,
    "subdivision": 30,
}
_FILE = pathlib.Path(__file__).parent / "corrections.toml"
CORRECTIONS: Mapping[str, Any] = tomllib.loads(_FILE.read_text("utf-8"))
HOME_NATIONS = {"England": "GB-ENG", "Scotland": "GB-SCT"}

COUNTRIES = ("country or territory", "countries and territories")


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A fact of an entity.

    Attributes:
      value: the triple's tail.
      text: the tail in a sentence; contains ``value``.
      target: key of the entity that ``value`` names.
      number: size for comparisons.
    """

    relation: str
    value: str
    text: str
    target: str | None = None
    number: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Entity:
    """An entity with a passage; ``name`` is used in texts, ``title`` is unique in the corpus."""

    key: str
    kind: str
    name: str
    title: str
    facts: dict[str, list[Fact]] = dataclasses.field(default_factory=dict)
    unique: bool = True

    def one(self, relation: str) -> Fact | None:
        """Returns the fact of a relation if there is exactly one."""
        facts = self.facts.get(relation, [])
        return facts[0] if len(facts) == 1 else None


class World:
    """The graph under construction; ``entities`` are in insertion order."""

    def __init__(self) -> None:
        self.entities: dict[str, Entity] = {}

    def add(
        self, kind: str, key: object, name: str, title: str | None = None, **more: Any
    ) -> Entity:
        """Adds an entity, or returns the existing one with the same key."""
        full_key = f"{kind}:{key}"
        if full_key not in self.entities:
            self.entities[full_key] = Entity(full_key, kind, name, title or name, **more)
        return self.entities[full_key]

    def fact(
        self,
        entity: Entity,
        what: str,
        value: object,
        text: str | None = None,
        target: str | None = None,
        number: float | None = None,
    ) -> None:
        """Adds ``<entity; what; value>`` unless the value is missing or already present."""
        tail = str(value).strip() if value is not None else ""
        relation = f"{entity.kind}.{what}"
        facts = entity.facts.setdefault(relation, [])
        if tail and all(fact.value != tail for fact in facts):
            facts.append(Fact(relation, tail, text or tail, target, number))
        if not facts:
            del entity.facts[relation]

    def of_kind(self, kind: str) -> list[Entity]:
        """Returns all entities of a kind, in order."""
        return [entity for entity in self.entities.values() if entity.kind == kind]


def count(number: float) -> str:
    """Rounds a number, and writes it with commas between thousands."""
    return f"{round(number):,}"


def amount(number: int, one: str, many: str) -> str:
    """Writes a number and its noun, up to twelve in words: ``one country``, ``13 countries``."""
    text = NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else count(number)
    return f"{text} {one if number == 1 else many}"


def with_article(name: str) -> str:
    """Returns a country's name as written inside a sentence."""
    return f"the {name}" if name in CORRECTIONS["countries"]["with_article"] else name


def coordinates(latitude: float, longitude: float) -> str:
    """Writes degrees with two decimals and the hemisphere."""
    north = "N" if latitude >= 0 else "S"
    east = "E" if longitude >= 0 else "W"
    return f"{abs(latitude):.2f}° {north}, {abs(longitude):.2f}° {east}"


def number_of(text: str) -> float | None:
    """Parses a number in digits; returns None for other texts."""
    return float(text) if text.replace(".", "", 1).isdigit() else None
