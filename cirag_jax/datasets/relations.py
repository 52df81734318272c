"""Turns annotated relations into sub-questions, and into noun phrases for a rationale.

Benchmarks use Wikidata's names of relations ("place of birth"); the built-in dataset uses phrases
from sentences ("directed by"). The wording of a relation without a template depends on its grammar.
"""

import pathlib
import re
import tomllib
from collections.abc import Mapping

from cirag_jax.io import one_line

_FILE = pathlib.Path(__file__).with_suffix(".toml")
# Relation -> question for its tail, and noun phrase for its tail; ``{}`` is the head.
_TEMPLATES: Mapping[str, tuple[str, str]] = {
    name: (group["asks"], group["noun"])
    for group in tomllib.loads(_FILE.read_text("utf-8"))["relations"]
    for name in group["names"]
}
_PERSONS = frozenset({"father", "mother", "child", "sibling", "publisher", "presenter"})
_VERB = re.compile(
    r"(belongs|borders|circulates|comes|competed|contains|covers|has|is|lies|observes|reaches|runs|"
    r"serves|was)\b"
)
_ENDS_IN_PREPOSITION = re.compile(r"\b(as|at|by|for|from|in|into|of|on|to|with)$")


def sub_question(relation: str, head: str) -> str:
    """Returns a question that asks for the tail of ``<head; relation; ?>``."""
    relation = one_line(relation)
    if relation in _TEMPLATES:
        return _TEMPLATES[relation][0].format(head)
    if relation in _PERSONS:
        return f"Who is the {relation} of {head}?"
    if _VERB.match(relation):
        return f"{head} {relation} what?"
    if _ENDS_IN_PREPOSITION.search(relation):
        return f"What is {head} {relation}?"
    return f"What is the {relation} of {head}?"


def is_listed(relation: str) -> bool:
    """Returns whether a relation has a template."""
    relation = one_line(relation)
    return relation in _TEMPLATES or relation in _PERSONS


def noun_phrase(relation: str, head: str) -> str:
    """Returns a noun phrase for the tail of ``<head; relation; ?>``; "" if there is none."""
    relation = one_line(relation)
    if relation in _TEMPLATES:
        return _TEMPLATES[relation][1].format(head)
    if _VERB.match(relation) or _ENDS_IN_PREPOSITION.search(relation):
        return ""
    return f"the {relation} of {head}"
