"""Phrasings of facts (passages.toml) and of comparisons (comparisons.toml).

The phrasings of all other questions are in `cirag_jax.datasets.demo.wording`.
"""

import pathlib
import tomllib
from typing import Any


def _read(name: str) -> dict[str, Any]:
    with (pathlib.Path(__file__).parent / name).open("rb") as file:
        return tomllib.load(file)


_passages, _comparisons = _read("passages.toml"), _read("comparisons.toml")

# Type of relation -> its names in triples.
RELATIONS: dict[str, list[str]] = _passages["relations"]
# Kind of entity -> the relations that a sentence needs, and its phrasings.
SENTENCES: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {
    kind: [(tuple(row["relations"]), row["phrasings"]) for row in rows]
    for kind, rows in _passages["sentences"].items()
}
# Relation -> questions for the larger and for the smaller number.
COMPARES: dict[str, tuple[list[str], list[str]]] = {
    relation: (both["larger"], both["smaller"])
    for relation, both in _comparisons["compares"].items()
}
# (Step, relation of the step's tail) -> such questions.
BRIDGE_COMPARES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    (step, relation): (both["larger"], both["smaller"])
    for step, relations in _comparisons["bridge_compares"].items()
    for relation, both in relations.items()
}
