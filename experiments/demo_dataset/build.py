"""Builds the dataset and the files that the package ships.

`facts` joins the rows of the data packages into a graph, `render` writes a passage about each
entity, and `questions` asks about chains of facts. docs/demo_dataset.md describes the result.
"""

import dataclasses
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cirag_jax.datasets import demo
from cirag_jax.datasets.jsonl import question_record
from cirag_jax.types import Dataset
from experiments.demo_dataset import facts, questions, render
from experiments.demo_dataset.graph import World
from experiments.demo_dataset.questions import Asker, Rendered
from experiments.demo_dataset.templates import RELATIONS


def build_graph() -> tuple[World, Rendered]:
    """Builds the graph of entities, and the passage and triples of each by its key."""
    world = facts.build_world()
    return world, render.render_world(world)


def build_dataset(world: World, rendered: Rendered) -> Dataset:
    """Builds the dataset, which depends only on the versions of the data packages."""
    corpus = {passage.id: passage for passage, _ in rendered.values()}
    triples = {passage.id: stated for passage, stated in rendered.values()}
    return Dataset("demo", questions.build_questions(world, rendered), corpus, triples)


def entity_records(world: World, rendered: Rendered) -> Iterator[demo.EntityRecord]:
    """Yields the shipped record of each entity, in the order of the passages."""
    asker = Asker(world, rendered)
    for key, (passage, triples) in rendered.items():
        entity = world.entities[key]
        by_words = {
            (name, fact.value): fact
            for relation, stated in entity.facts.items()
            for fact in stated
            for name in RELATIONS[relation]
        }
        stated = [by_words[triple.relation, triple.tail] for triple in triples]
        yield demo.EntityRecord(
            passage_id=passage.id,
            key=key,
            spoken_name=render.said_name(entity),
            starts_questions=questions.startable(asker, entity),
            triples=tuple((t.head, t.relation, t.tail) for t in triples),
            triple_sentences=tuple(t.sentence or 0 for t in triples),
            types=tuple(fact.relation for fact in stated),
            targets=tuple(fact.target if fact.target in rendered else None for fact in stated),
        )


def build_files() -> tuple[Dataset, dict[str, bytes]]:
    """Builds the dataset, and the uncompressed data files by name."""
    world, rendered = build_graph()
    dataset = build_dataset(world, rendered)
    records = map(msgspec.to_builtins, entity_records(world, rendered))
    return dataset, {
        demo.QUESTIONS: _lines(map(question_record, dataset.questions)),
        demo.CORPUS: _lines(map(dataclasses.asdict, dataset.corpus.values())),
        demo.ENTITIES: _lines(records),
    }


def compress(content: bytes) -> bytes:
    """Compresses with gzip, without a file name or a time in the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()
