"""How facts are said (passages.toml) and asked (questions.toml); the comments there say how."""

import pathlib
import tomllib
from typing import Any


def _read(name: str) -> dict[str, Any]:
    with (pathlib.Path(__file__).parent / name).open("rb") as file:
        return tomllib.load(file)


_passages, _questions = _read("passages.toml"), _read("questions.toml")

RELATIONS: dict[str, list[str]] = _passages["relations"]
# Kind of entity -> the relations that a sentence needs, and its phrasings.
SENTENCES: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {
    kind: [(tuple(row["relations"]), row["phrasings"]) for row in rows]
    for kind, rows in _passages["sentences"].items()
}
STARTS: dict[str, list[str]] = _questions["starts"]
STEPS: dict[str, list[str]] = _questions["steps"]
ASKS: dict[str, list[str]] = _questions["asks"]
# Relation of a step -> facts whose passages do not give it away although they link the same names.
HARMLESS: dict[str, list[str]] = _questions["harmless"]
# Relation -> questions for the larger and for the smaller number.
COMPARES: dict[str, tuple[list[str], list[str]]] = {
    relation: (both["larger"], both["smaller"]) for relation, both in _questions["compares"].items()
}
# The same by step and relation of its tail.
BRIDGE_COMPARES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    (step, relation): (both["larger"], both["smaller"])
    for step, relations in _questions["bridge_compares"].items()
    for relation, both in relations.items()
}
