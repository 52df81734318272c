"""Builds a graph of entities with typed facts, which may point to other entities.

Relations of facts are named ``<kind>.<what>``. `experiments.demo_dataset.render` writes sentences
about them, and `experiments.demo_dataset.questions` asks for them. Every fact is read from a data
package or is a count over its rows. The tables at the top of the modules of each domain list
corrections of spelling, and facts that are omitted because a source is wrong or disputed.
"""

import dataclasses
from collections import Counter

from experiments.demo_dataset import films, places, things
from experiments.demo_dataset.graph import World


def build_world() -> World:
    """Builds the graph; the result depends only on the versions of the packages."""
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
    """Removes pointers to missing entities, and makes every title unique."""
    titles: Counter[str] = Counter()
    for entity in world.entities.values():
        titles[entity.title] += 1
        if titles[entity.title] > 1:
            entity.title = f"{entity.title} ({entity.kind})"
        for relation, facts in entity.facts.items():
            entity.facts[relation] = [
                fact
                if fact.target is None or fact.target in world.entities
                else dataclasses.replace(fact, target=None)
                for fact in facts
            ]
