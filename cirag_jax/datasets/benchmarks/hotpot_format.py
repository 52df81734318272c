"""The record format of HotpotQA, which 2WikiMultihopQA shares."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import passage_of, texts
from cirag_jax.datasets.records import Record
from cirag_jax.types import Passage


def context_features() -> dict[str, Any]:
    """Features of question, context and supporting facts; sentences lie flat (see `base`)."""
    text = tfds.features.Text
    return {
        "id": text(),
        "question": text(),
        "present": tfds.features.Sequence(text()),
        "answer": text(),
        "type": text(),
        "supporting_facts": tfds.features.Sequence({"title": text(), "sentence": np.int32}),
        "context_titles": tfds.features.Sequence(text()),
        "context_lengths": tfds.features.Sequence(np.int32),
        "context_sentences": tfds.features.Sequence(text()),
    }


def encode_context(record: Record) -> dict[str, Any]:
    """The values of `context_features`, except ``present``."""
    titles, lengths, sentences = [], [], []
    for i, paragraph in enumerate(record.required("context", list)):
        place = f"context[{i}]"
        if len(record.check(place, paragraph, list)) != 2:
            raise record.error(place, "must be a pair of title and sentences")
        titles.append(record.check(f"{place}[0]", paragraph[0], str))
        own = record.check_each(f"{place}[1]", record.check(f"{place}[1]", paragraph[1], list), str)
        lengths.append(len(own))
        sentences.extend(own)
    facts = record.text_index_pairs("supporting_facts") or ()
    return {
        "id": record.text("_id", filled=True),
        "question": record.text("question", filled=True),
        "answer": record.maybe_text("answer") or "",
        "type": record.maybe_text("type") or "",
        "supporting_facts": [{"title": t, "sentence": s} for t, s in facts],
        "context_titles": titles,
        "context_lengths": lengths,
        "context_sentences": sentences,
    }


def decode_context(example: Mapping[str, Any]) -> dict[str, Any]:
    """The official fields that `encode_context` stored; absent ones are None."""
    present = set(texts(example["present"]))
    facts = example["supporting_facts"]
    sentences = iter(texts(example["context_sentences"]))
    record = {
        "_id": example["id"].decode(),
        "question": example["question"].decode(),
        "answer": example["answer"].decode(),
        "type": example["type"].decode(),
        "supporting_facts": [
            [title, int(sentence)]
            for title, sentence in zip(texts(facts["title"]), facts["sentence"], strict=True)
        ],
        "context": [
            [title, [next(sentences) for _ in range(length)]]
            for title, length in zip(
                texts(example["context_titles"]), example["context_lengths"], strict=True
            )
        ],
    }
    for name in ("answer", "type", "supporting_facts"):
        if name not in present:
            record[name] = None
    return record


def convert_context(record: Mapping[str, Any]) -> tuple[tuple[Passage, ...], dict[str, Any]]:
    """The passages of the context and the fields of `Question` that refer to them.

    ``supporting`` stays None where the test split hides it, and where a gold title is not in the
    context, as happens in the fullwiki setting: naming only the gold passages that were found
    would make recall look better than it is. Sentence indices out of range are left out.
    """
    passages = tuple(passage_of(title, "", own) for title, own in record["context"])
    fields: dict[str, Any] = {
        "id": record["_id"],
        "question": record["question"],
        "answers": () if record["answer"] is None else (record["answer"],),
        "type": record["type"],
        "context": tuple(passage.id for passage in passages),
    }
    facts = record["supporting_facts"]
    by_title = {passage.title: passage for passage in reversed(passages)}  # the first one wins
    if facts is not None and all(title in by_title for title, _ in facts):
        fields["supporting"] = tuple(dict.fromkeys(by_title[title].id for title, _ in facts))
        fields["supporting_sentences"] = tuple(
            dict.fromkeys(
                (by_title[title].id, sentence)
                for title, sentence in facts
                if sentence < len(by_title[title].sentences or ())
            )
        )
    return passages, fields
