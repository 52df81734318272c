"""Supervised examples of the extractor: reference extractions as the answers to its two calls.

A passage gives two conversations, as `extraction.extract` holds them: one asks for the named
 entities, one for the triples, given the entities. Messages, worked example and chat template
are those of inference; the loss is on the answer and the token that ends it.
"""

import collections
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.references import Reference
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.types import Message
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.training.data.examples import Example, chat_examples
from cirag_jax.types import Passage


def passage_examples(
    tokenizer: ChatTokenizer, reference: Reference, *, max_length: int
) -> tuple[list[Example], dict[str, int]]:
    """The two calls about a passage, the first answered by its entities, the second by its triples.

    Surfaces are the reference's own, but for runs of spaces, which the parser makes one; the
    triples keep their order, the entities come in the order of `in_order_of_mention` (files list
    them by the alphabet, which a model could not know while it reads). A conversation of more than
    ``max_length`` tokens is dropped whole: a passage without its end would teach inventions, an
    answer without its end would teach to stop early.

    Returns at most two examples, whose source is the passage's id, and how often something is not
    trained on: answers ``dropped_too_long``; ``dropped_entities`` and ``dropped_triples`` that the
    parser would not read back; ``dropped_empty`` where nothing of the passage is left.
    """
    reasons: collections.Counter[str] = collections.Counter()
    passage = reference.passage
    entities, triples = _entities(reference, reasons), _triples(reference, reasons)
    if not triples:
        reasons["dropped_empty"] += 1
        return [], dict(reasons)
    calls = (
        (prompts.entity_messages(passage), prompts.render_entities(entities)),
        (prompts.triple_messages(passage, entities), prompts.render_triples(triples)),
    )
    examples = []
    for messages, answer in calls:
        turns = [*messages, Message("assistant", answer)]
        example = chat_examples(tokenizer, turns, (len(turns) - 1,), source=passage.id)
        if len(example.tokens_T) <= max_length:
            examples.append(example)
        else:
            reasons["dropped_too_long"] += 1
    return examples, dict(reasons)


def extraction_examples(
    tokenizer: ChatTokenizer, references: Sequence[Reference], *, max_length: int
) -> tuple[list[Example], dict[str, int]]:
    """The examples of many passages, in their order, and the reasons of all: `passage_examples`."""
    examples: list[Example] = []
    reasons: collections.Counter[str] = collections.Counter()
    for reference in references:
        found, why = passage_examples(tokenizer, reference, max_length=max_length)
        examples += found
        reasons.update(why)
    return examples, dict(reasons)


def in_order_of_mention(names: Sequence[str], passage: Passage) -> tuple[str, ...]:
    """The names as the passage first mentions them, title first; then those it spells otherwise."""
    text = f"{passage.title}\n{passage.text}".casefold()
    place: Mapping[str, int] = {name: text.find(name.casefold()) for name in names}
    return tuple(sorted(place, key=lambda name: (place[name] < 0, place[name])))


def _entities(reference: Reference, reasons: collections.Counter[str]) -> tuple[str, ...]:
    """The entities that the parser reads from the answer which lists them."""
    listed = tuple(dict.fromkeys(reference.entities))
    answer = prompts.render_entities(in_order_of_mention(listed, reference.passage))
    read, _ = prompts.parse_entities(answer, "stop")
    if len(read) < len(listed):
        reasons["dropped_entities"] += len(listed) - len(read)
    return read


def _triples(reference: Reference, reasons: collections.Counter[str]) -> tuple[prompts.Parts, ...]:
    """The triples that the parser reads from the answer which lists them."""
    listed = tuple(dict.fromkeys((t.head, t.relation, t.tail) for t in reference.triples))
    read, _ = prompts.parse_triples(prompts.render_triples(listed), "stop")
    if len(read) < len(listed):
        reasons["dropped_triples"] += len(listed) - len(read)
    return read
