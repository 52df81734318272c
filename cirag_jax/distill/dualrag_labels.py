"""Training labels of DualRAG-FT (paper, section 3.2), by the rules of its released code.

The teacher's rounds on a question are compared with the titles of the gold passages. A ranker
matches names of entities to titles; a match needs a score above a threshold (0 for logits). Prompts
have no worked examples.

- Reasoner: the teacher's thought and flag. A round that retrieves although all gold titles are
  known is labelled ``candidate``, the others ``kept``; the released mixture has both.
- Entity identifier: the teacher's entities, if each matches another gold title (``kept``).
  Otherwise, in all rounds (``rewritten``), entities that match no title are dropped, and of several
  that match one title, only the best is kept; the outline is rewritten in the same way.
- Summarizer: the teacher's summary if the entity matches a gold title (``teacher``), otherwise
  "None" (``unmatched``). If the teacher wrote "None" although the entity matches, the label is the
  gold sentence, or the passage if no sentence is annotated (``gold``), if the passage was read;
  otherwise "None" (``none``).

Two differences from the code: a title counts once even if several of its sentences are gold, and
rounds without an entity after rewriting are dropped, because the parser rejects an empty list.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.distill.examples import RoleExample
from cirag_jax.errors import UserError
from cirag_jax.methods.dualrag import prompts
from cirag_jax.methods.dualrag.settings import DualragConfig
from cirag_jax.types import Passage, Question, Step

ROLES = ("reasoner", "entity_identifier", "summarizer")
NOTHING = "None"
Outline = dict[str, list[str]]


class Titles(NamedTuple):
    """Matches names of entities to titles of gold passages.

    Attributes:
      passages: title -> gold passage.
      scores: name of an entity -> title -> score of the ranker.
      threshold: a match has a higher score.
    """

    passages: Mapping[str, Passage]
    scores: Mapping[str, Mapping[str, float]]
    threshold: float

    def match(self, entity: str, titles: Sequence[str]) -> str | None:
        """Returns the best of ``titles`` for an entity, or None."""
        scores = self.scores[entity]
        best = max(titles, key=scores.__getitem__, default=None)
        return best if best is not None and scores[best] > self.threshold else None


def check(config: DualragConfig) -> None:
    """Raises `UserError` if the rounds lack what the labels need."""
    needed = {
        "use_reasoner": True, "use_entities": True, "use_outline": True, "use_reranker": True,
        "entities": "free", "summarizer": "model",
    }  # fmt: skip
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"config.dualrag.{name}={getattr(config, name)} has no labels of DualRAG-FT; set "
                f"{value}."
            )


def gold_passages(question: Question, corpus: Mapping[str, Passage]) -> dict[str, Passage]:
    """Returns title -> gold passage; empty without annotations."""
    found = (corpus[i] for i in question.supporting or () if i in corpus)
    passages: dict[str, Passage] = {}
    for passage in found:
        passages.setdefault(passage.title, passage)
    return passages


def entities_of(steps: Sequence[Step]) -> list[str]:
    """Returns the entities of all rounds, repeated ones included."""
    return [entity for step in steps for entity in step.notes.get("queries", {})]


def labels_of(
    question: Question, steps: Sequence[Step], titles: Titles, corpus: Mapping[str, Passage]
) -> list[RoleExample]:
    """Returns the examples of one question, in the order of the rounds.

    ``steps`` are the teacher's rounds, and ``corpus`` has the passages that the summarizer read.
    """
    mapping = rewrites(entities_of(steps), titles)
    examples, outline, thoughts = [], Outline(), list[str]()
    for step in steps:
        earlier, thoughts = thoughts, [*thoughts, step.thought] if step.thought else thoughts
        rendered = (
            *_reasoner(question, step, outline, earlier, titles),
            *_identifier(question, step, _rewritten(outline, mapping), thoughts, mapping),
            *_summarizer(question, step, thoughts, titles, corpus),
        )
        for role, messages, target, label in rendered:
            source = {"label": label}
            examples.append(RoleExample(role, question.id, messages, target, source))
        for entity, fragment in step.notes.get("learnt", {}).items():
            outline.setdefault(entity, []).append(fragment)
    return examples


def rewrites(entities: Sequence[str], titles: Titles) -> dict[str, str | None]:
    """Returns entity -> the entity that replaces it, or None if it is dropped.

    The result is empty if each entity matches a title that no earlier one has; otherwise, entities
    that are missing from it stay.
    """
    left = list(titles.passages)
    for entity in entities:
        title = titles.match(entity, left)
        if title is None:
            break
        left.remove(title)
    else:
        return {}
    groups: dict[str | None, list[str]] = {}
    for entity in entities:
        groups.setdefault(titles.match(entity, list(titles.passages)), []).append(entity)
    mapping: dict[str, str | None] = dict.fromkeys(groups.pop(None, ()))
    for title, group in groups.items():
        best = max(group, key=lambda entity: titles.scores[entity][str(title)])
        mapping |= dict.fromkeys(group, best) if len(group) > 1 else {}
    return mapping


def _rewritten(outline: Outline, mapping: Mapping[str, str | None]) -> Outline:
    """Returns the outline without dropped entities, and with the fragments of equal ones joined."""
    rewritten = {entity: list(fragments) for entity, fragments in outline.items()}
    for entity, fragments in outline.items():
        new = mapping.get(entity, entity)
        if new == entity:
            continue
        del rewritten[entity]
        if new is not None:
            known = rewritten.setdefault(new, [])
            known += [fragment for fragment in fragments if fragment not in known]
    return rewritten


_Rendered = tuple[str, Any, str, str]  # role, messages, target, label


def _reasoner(
    question: Question, step: Step, outline: Outline, thoughts: Sequence[str], titles: Titles
) -> Iterator[_Rendered]:
    needs_retrieval = prompts.parse_thought(step.response).need_retrieve
    if not step.thought or needs_retrieval is None:
        return
    known = {titles.match(entity, list(titles.passages)) for entity in outline}
    is_candidate = needs_retrieval and {*titles.passages} <= known
    messages = prompts.reasoning_messages(
        prompts.render_outline(outline), question.question, thoughts, few_shot=False
    )
    target = {"thought": step.thought, "need_retrieve": needs_retrieval}
    yield ROLES[0], messages, _json(target), "candidate" if is_candidate else "kept"


def _identifier(
    question: Question,
    step: Step,
    outline: Outline,
    thoughts: Sequence[str],
    mapping: Mapping[str, str | None],
) -> Iterator[_Rendered]:
    queries = step.notes.get("queries", {})
    kept = [entity for entity in queries if mapping.get(entity, entity) == entity]
    if not kept:
        return
    messages = prompts.entity_messages(
        prompts.render_outline(outline),
        question.question,
        thoughts,
        [entity for entity in outline if entity != prompts.ELSE],
        few_shot=False,
    )
    entities = [{"entity": entity, "keywords": list(queries[entity])} for entity in kept]
    yield ROLES[1], messages, _json({"entities": entities}), "rewritten" if mapping else "kept"


def _summarizer(
    question: Question,
    step: Step,
    thoughts: Sequence[str],
    titles: Titles,
    corpus: Mapping[str, Passage],
) -> Iterator[_Rendered]:
    queries, learnt = step.notes.get("queries", {}), step.notes.get("learnt", {})
    for entity, ids in step.notes.get("read", {}).items():
        documents = [corpus[i] for i in ids]
        title = titles.match(entity, list(titles.passages))
        if title is None:
            target, label = NOTHING, "unmatched"
        elif entity in learnt:
            target, label = learnt[entity], "teacher"
        elif title in (document.title for document in documents):
            target, label = _gold_text(question, titles.passages[title]), "gold"
        else:
            target, label = NOTHING, "none"
        messages = prompts.summary_messages(
            question.question, thoughts, entity, queries[entity], documents
        )
        yield ROLES[2], messages, target, label


def _gold_text(question: Question, passage: Passage) -> str:
    """Returns the first gold sentence of a passage, or the passage without annotated sentences."""
    indices = [index for i, index in question.supporting_sentences or () if i == passage.id]
    sentences = sentences_of(passage)
    return sentences[indices[0]] if indices and indices[0] < len(sentences) else passage.text


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
