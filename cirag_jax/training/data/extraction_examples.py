"""Training examples of the extractor, from reference extractions.

A passage gives two conversations with the prompts of `extraction.extract`. One asks for the named
entities, the other for the triples, given the entities. The loss is on the answer and its end
token.
"""

import collections
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.references import Reference
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.types import Message
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.training.data.examples import Example, chat_examples
from cirag_jax.types import Passage


def extraction_examples(
    tokenizer: ChatTokenizer, references: Sequence[Reference], *, max_length: int
) -> tuple[list[Example], dict[str, int]]:
    """Returns two conversations per passage, and the numbers of dropped items.

    Names are spelled as in the reference, except for repeated spaces. Triples keep their order.
    Entities have the order of `in_order_of_mention`, which is easier to learn than the alphabetical
    order of the files. Conversations of more than ``max_length`` tokens are dropped and not cut,
    because cut passages would teach the model to invent triples, and cut answers to stop early.

    The counts are ``dropped_too_long`` (examples), ``dropped_entities`` and ``dropped_triples``
    (which the parser could not read back) and ``dropped_empty`` (passages without triples).
    """
    examples, reasons = list[Example](), collections.Counter[str]()
    for reference in references:
        passage = reference.passage
        entities, triples = _entities(reference, reasons), _triples(reference, reasons)
        if not triples:
            reasons["dropped_empty"] += 1
            continue
        calls = (
            (prompts.entity_messages(passage), prompts.render_entities(entities)),
            (prompts.triple_messages(passage, entities), prompts.render_triples(triples)),
        )
        for messages, answer in calls:
            turns = [*messages, Message("assistant", answer)]
            example = chat_examples(tokenizer, turns, (len(turns) - 1,), source=passage.id)
            if len(example.tokens_T) <= max_length:
                examples.append(example)
            else:
                reasons["dropped_too_long"] += 1
    return examples, dict(reasons)


def in_order_of_mention(names: Sequence[str], passage: Passage) -> tuple[str, ...]:
    """Sorts names by their first mention in title or text; names without a mention come last."""
    text = f"{passage.title}\n{passage.text}".casefold()
    place: Mapping[str, int] = {name: text.find(name.casefold()) for name in names}
    return tuple(sorted(place, key=lambda name: (place[name] < 0, place[name])))


def _entities(reference: Reference, reasons: collections.Counter[str]) -> tuple[str, ...]:
    """Returns the entities that the parser can read back from an answer."""
    entities = tuple(dict.fromkeys(reference.entities))
    answer = prompts.render_entities(in_order_of_mention(entities, reference.passage))
    parsed, _ = prompts.parse_entities(answer, "stop")
    if len(parsed) < len(entities):
        reasons["dropped_entities"] += len(entities) - len(parsed)
    return parsed


def _triples(reference: Reference, reasons: collections.Counter[str]) -> tuple[prompts.Parts, ...]:
    """Returns the triples that the parser can read back from an answer."""
    triples = tuple(dict.fromkeys((t.head, t.relation, t.tail) for t in reference.triples))
    parsed, _ = prompts.parse_triples(prompts.render_triples(triples), "stop")
    if len(parsed) < len(triples):
        reasons["dropped_triples"] += len(triples) - len(parsed)
    return parsed
