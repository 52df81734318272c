"""Says the facts: one short encyclopedic passage per entity, with its triples.

An entity's passage is the sentences of passages.toml whose relations it has,
one phrasing each, chosen by a stable hash.
"""

from cirag_jax.datasets.demo.wording import pick, stable_hash
from cirag_jax.types import Passage, Triple
from experiments.demo_dataset.graph import Entity, Fact, World, with_article
from experiments.demo_dataset.templates import RELATIONS, SENTENCES


def passage_id(entity: Entity) -> str:
    """Id of an entity's passage: short, stable, and free of spaces."""
    return f"{entity.kind}-{stable_hash('passage', entity.key) % 16**10:010x}"


def render(entity: Entity) -> tuple[Passage, tuple[Triple, ...]] | None:
    """The passage of an entity and its triples in sentence order; None if it has nothing to say."""
    identifier = passage_id(entity)
    sentences: list[str] = []
    triples: list[Triple] = []
    said: set[str] = set()
    for needed, phrasings in SENTENCES[entity.kind]:
        relations = [f"{entity.kind}.{what}" for what in needed]
        if said & set(relations) or any(r not in entity.facts for r in relations):
            continue
        said.update(relations)
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
    """One sentence."""
    words = {}
    for what in needed:
        *others, last = (fact.text for fact in entity.facts[f"{entity.kind}.{what}"])
        words[what.replace(" ", "_")] = f"{', '.join(others)} and {last}" if others else last
    text = phrasing.format(name=said_name(entity), **words)
    text = text[:-1] if text.endswith("..") else text
    return text[0].upper() + text[1:]


def said_name(entity: Entity) -> str:
    """An entity's name in a sentence: some countries take an article."""
    return with_article(entity.name) if entity.kind == "country" else entity.name


def find_triple(triples: tuple[Triple, ...], fact: Fact) -> Triple:
    """The triple that states a fact in its entity's passage."""
    names = RELATIONS[fact.relation]
    return next(t for t in triples if t.relation in names and t.tail == fact.value)


def render_world(world: World) -> dict[str, tuple[Passage, tuple[Triple, ...]]]:
    """Passages and triples by entity key."""
    rendered = {key: render(entity) for key, entity in world.entities.items()}
    return {key: value for key, value in rendered.items() if value is not None}
