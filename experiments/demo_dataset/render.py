"""Writes a short encyclopedic passage about each entity, with its triples.

A passage contains each sentence of passages.toml whose relations the entity has. A stable hash
selects the phrasing.
"""

from cirag_jax.datasets.demo.wording import pick, stable_hash
from cirag_jax.types import Passage, Triple
from experiments.demo_dataset.graph import Entity, Fact, World, with_article
from experiments.demo_dataset.templates import RELATIONS, SENTENCES


def passage_id(entity: Entity) -> str:
    """Returns the id of an entity's passage, which is short, stable and without spaces."""
    return f"{entity.kind}-{stable_hash('passage', entity.key) % 16**10:010x}"


def render(entity: Entity) -> tuple[Passage, tuple[Triple, ...]] | None:
    """Returns an entity's passage, and its triples in sentence order; None without sentences."""
    identifier = passage_id(entity)
    sentences: list[str] = []
    triples: list[Triple] = []
    stated: set[str] = set()
    for needed, phrasings in SENTENCES[entity.kind]:
        relations = [f"{entity.kind}.{what}" for what in needed]
        if stated & set(relations) or any(r not in entity.facts for r in relations):
            continue
        stated.update(relations)
        sentences.append(say(entity, needed, pick(phrasings, entity.key, needed)))
        for relation in relations:
            name = pick(RELATIONS[relation], entity.key, relation)
            for fact in entity.facts[relation]:
                at = len(sentences) - 1
                triples.append(Triple(entity.name, name, fact.value, identifier, at))
    if not sentences:
        return None
    text = " ".join(sentences)
    return Passage(identifier, entity.title, text, tuple(sentences)), tuple(triples)


def say(entity: Entity, needed: tuple[str, ...], phrasing: str) -> str:
    """Returns a sentence about the relations ``needed``."""
    words = {}
    for what in needed:
        *others, last = (fact.text for fact in entity.facts[f"{entity.kind}.{what}"])
        words[what.replace(" ", "_")] = f"{', '.join(others)} and {last}" if others else last
    text = phrasing.format(name=said_name(entity), **words)
    text = text[:-1] if text.endswith("..") else text
    return text[0].upper() + text[1:]


def said_name(entity: Entity) -> str:
    """Returns an entity's name in a sentence; some countries take an article."""
    return with_article(entity.name) if entity.kind == "country" else entity.name


def find_triple(triples: tuple[Triple, ...], fact: Fact) -> Triple:
    """Returns the triple of a fact in its entity's passage."""
    names = RELATIONS[fact.relation]
    return next(t for t in triples if t.relation in names and t.tail == fact.value)


def render_world(world: World) -> dict[str, tuple[Passage, tuple[Triple, ...]]]:
    """Returns the passages and triples by entity key."""
    rendered = {key: render(entity) for key, entity in world.entities.items()}
    return {key: value for key, value in rendered.items() if value is not None}
