"""The graph of entities and typed facts, and how numbers and names are written in it."""

import dataclasses
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from cirag_jax.datasets.demo.wording import NUMBER_WORDS

# How many entities of the large kinds become passages; the small kinds are taken whole.
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
    """``value`` is the triple's tail, ``text`` the tail as a sentence says it (it holds ``value``).

    ``target`` is the key of the entity that ``value`` names, ``number`` its size for comparisons.
    """

    relation: str
    value: str
    text: str
    target: str | None = None
    number: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Entity:
    """A thing with a passage. ``name`` is what texts call it, ``title`` is unique in the corpus."""

    key: str
    kind: str
    name: str
    title: str
    facts: dict[str, list[Fact]] = dataclasses.field(default_factory=dict)
    unique: bool = True

    def one(self, relation: str) -> Fact | None:
        """The fact of a relation that has exactly one, else None."""
        found = self.facts.get(relation, [])
        return found[0] if len(found) == 1 else None


class World:
    """The graph under construction: entities by key, in the order in which they were added."""

    def __init__(self) -> None:
        """An empty graph."""
        self.entities: dict[str, Entity] = {}

    def add(
        self, kind: str, key: object, name: str, title: str | None = None, **more: Any
    ) -> Entity:
        """Adds an entity, or returns the one of that key."""
        full = f"{kind}:{key}"
        if full not in self.entities:
            self.entities[full] = Entity(full, kind, name, title or name, **more)
        return self.entities[full]

    def fact(
        self,
        entity: Entity,
        what: str,
        value: object,
        text: str | None = None,
        target: str | None = None,
        number: float | None = None,
    ) -> None:
        """Adds ``<entity; what; value>`` unless the value is missing or there already."""
        said = str(value).strip() if value is not None else ""
        relation = f"{entity.kind}.{what}"
        known = entity.facts.setdefault(relation, [])
        if said and all(fact.value != said for fact in known):
            known.append(Fact(relation, said, text or said, target, number))
        if not known:
            del entity.facts[relation]

    def of_kind(self, kind: str) -> list[Entity]:
        """All entities of a kind, in order."""
        return [entity for entity in self.entities.values() if entity.kind == kind]


def count(number: float) -> str:
    """A whole number with commas between thousands."""
    return f"{round(number):,}"


def counted(number: int, one: str, many: str) -> str:
    """A number of things in words up to twelve: ``one country``, ``13 countries``."""
    said = NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else count(number)
    return f"{said} {one if number == 1 else many}"


def with_article(name: str) -> str:
    """A country's name as a sentence says it."""
    return f"the {name}" if name in CORRECTIONS["countries"]["with_article"] else name


def coordinates(latitude: float, longitude: float) -> str:
    """Degrees with two decimals and the hemisphere."""
    north = "N" if latitude >= 0 else "S"
    east = "E" if longitude >= 0 else "W"
    return f"{abs(latitude):.2f}° {north}, {abs(longitude):.2f}° {east}"


def number_of(text: str) -> float | None:
    """A number written in digits, else None."""
    return float(text) if text.replace(".", "", 1).isdigit() else None
