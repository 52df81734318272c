"""From the packages' rows to a graph: entities, and typed facts that may point to other entities.

A fact's relation is named ``<kind>.<what>``; `experiments.demo_dataset.render` knows how to say
it and `experiments.demo_dataset.questions` how to ask for it. Every fact is read from a package
or counted over one; the few corrections of spelling, and the facts left out because a source is
wrong or disputed, are the tables at the top of the modules of each domain.
"""

import dataclasses
from collections import Counter

from experiments.demo_dataset import films, places, things
from experiments.demo_dataset.graph import World


def build_world() -> World:
    """Builds the whole graph; deterministic for given versions of the packages."""
    world = World()
    gazetteer = places.Gazetteer()
    places.add_countries(world, gazetteer)
    places.add_regions(world)
    films.add_languages(world)
    films.add_films(world)
    things.add_elements(world)
    places.add_states(world, gazetteer)
    places.add_airports(world, gazetteer)
    places.add_namesake_cities(world, gazetteer)
    places.add_cities(world, gazetteer)
    places.add_subdivisions(world, gazetteer)
    things.add_metro(world)
    things.add_towns(world)
    things.add_cars(world)
    finish(world)
    return world


def finish(world: World) -> None:
    """Drops pointers to entities without a passage and makes every title unique."""
    seen: Counter[str] = Counter()
    for entity in world.entities.values():
        seen[entity.title] += 1
        if seen[entity.title] > 1:
            entity.title = f"{entity.title} ({entity.kind})"
        for relation, facts in entity.facts.items():
            entity.facts[relation] = [
                fact
                if fact.target is None or fact.target in world.entities
                else dataclasses.replace(fact, target=None)
                for fact in facts
            ]
