"""An answer with its evidence and steps, as plain text for a terminal."""

import json
import textwrap
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.io import one_line, visible
from cirag_jax.types import Passage, Prediction, Sentence, Step, Triple, Unit

WIDTH = 100  # columns
_MOST = 10  # maximum number of listed passages per step, and of listed items of evidence


def render(prediction: Prediction, passages: Mapping[str, Passage]) -> str:
    """Returns the answer, the evidence with its sources, and the steps.

    Lines have at most `WIDTH` characters, and no control characters (see `plain`). Passages that
    are missing from ``passages`` are shown by their ids.
    """
    lines = _paragraph("Answer: ", prediction.answer or "(none)")
    lines += [_origin(prediction), "", "Evidence"]
    lines += _evidence(prediction, passages) or ["  (none)"]
    for number, step in enumerate(prediction.steps, 1):
        lines += ["", *_step(number, step, passages)]
    if prediction.parse_errors:
        counts = ", ".join(f"{kind} {count}" for kind, count in prediction.parse_errors.items())
        lines += ["", *_paragraph("Parse errors: ", counts)]
    return "\n".join(line.rstrip() for line in lines)


def plain(text: str) -> str:
    """Returns a text on one line, with invisible characters escaped."""
    return visible(one_line(text))


def _origin(prediction: Prediction) -> str:
    attempts = [attempt.granularity for attempt in prediction.attempts]
    if attempts == ["default"]:
        return "        from the reader, without evidence"
    if not prediction.answer:
        return "        the evidence does not state an answer"
    if prediction.granularity == "default":
        return f"        last output, after refusals from {' and '.join(attempts) or 'no'} evidence"
    refused = f", after refusals from {' and '.join(attempts[:-1])}" if attempts[1:] else ""
    return f"        from {prediction.granularity} evidence{refused}"


def _evidence(prediction: Prediction, passages: Mapping[str, Passage]) -> list[str]:
    """Lists the kept facts, or else the sentences, or else the passages."""
    core = list(dict.fromkeys(unit for step in prediction.steps for unit in step.kept))
    lines = []
    quoted: set[str] = set()
    for number, unit in enumerate(core, 1):
        lines += _paragraph(f"  {number:2}. ", _unit(unit, passages))
        if isinstance(unit, Triple) and (source := passages.get(unit.passage_id or "")):
            quote = _quote(source, unit.sentence)
            place = f"{_place(source, unit.sentence)} (quoted above)"
            lines += _paragraph("      ", place if quote in quoted else quote)
            quoted.add(quote)
    if not core:
        for number, place in enumerate(prediction.sentences[:_MOST], 1):
            lines += _paragraph(f"  {number:2}. ", _unit(Sentence(*place), passages))
    if not lines:
        for number, passage_id in enumerate(prediction.passages[:_MOST], 1):
            lines += _paragraph(f"  {number:2}. ", _title(passage_id, passages))
    return lines


def _step(number: int, step: Step, passages: Mapping[str, Passage]) -> list[str]:
    lines = _paragraph(f"Step {number}: ", step.query)
    lines += [line for query in step.more_queries for line in _labeled("also", [query])]
    titles = [_title(passage_id, passages) for passage_id in step.passages[:_MOST]]
    more = len(step.passages) - _MOST
    titles += [f"{more} more"] if more > 0 else []
    lines += _labeled("found", titles)
    lines += _labeled("thought", [step.thought] if step.thought.strip() else [])
    lines += _labeled("kept", [_unit(unit, passages) for unit in step.kept])
    if step.candidates and not step.kept:
        lines += _labeled("kept", [f"none of {len(step.candidates)} candidates"])
    for name, note in step.notes.items():
        lines += _labeled("note", [f"{name}: {json.dumps(note, ensure_ascii=False)}"])
    return lines + _labeled("next", [step.next_query] if step.next_query else [])


def _labeled(label: str, items: Sequence[str]) -> list[str]:
    return _paragraph(f"  {label:8}", "; ".join(items)) if items else []


def _unit(unit: Unit, passages: Mapping[str, Passage]) -> str:
    match unit:
        case Triple():
            return f"<{unit.head}; {unit.relation}; {unit.tail}>"
        case Sentence():
            source = passages.get(unit.passage_id)
            unknown = f"{unit.passage_id}, sentence {unit.index + 1}"
            return _quote(source, unit.index) if source else unknown
    return _title(unit, passages)


def _title(passage_id: str, passages: Mapping[str, Passage]) -> str:
    passage = passages.get(passage_id)
    return passage.title.strip() or passage_id if passage else passage_id


def _quote(passage: Passage, sentence: int | None) -> str:
    """Returns the title of a passage, and a sentence with its number."""
    sentences, place = sentences_of(passage), _place(passage, sentence)
    if sentence is None or not 0 <= sentence < len(sentences):
        return place
    return f"{place}: {sentences[sentence].strip()}"


def _place(passage: Passage, sentence: int | None) -> str:
    title = passage.title.strip() or passage.id
    return f"in {title}" if sentence is None else f"in {title}, sentence {sentence + 1}"


def _paragraph(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        plain(text) or "-",
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )
