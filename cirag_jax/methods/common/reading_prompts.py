"""The reader's messages and parser: CIRAG's answering cascade (paper, Fig. 12), in our own words.

What a model writes is hostile input: it is searched, never evaluated.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Literal, get_args

from cirag_jax.llm.types import Message
from cirag_jax.methods.common.refusals import refuses

UNANSWERABLE = "Unanswerable"
ReaderFormat = Literal["thought", "chain", "brief"]
FORMATS: tuple[ReaderFormat, ...] = get_args(ReaderFormat)
_ANSWER_MARK = re.compile(r"answer[\s*]*:", re.IGNORECASE)

_READING = """\
You are an experienced reader. Study the {noun} you are given and work out the answer to the query \
from them. Begin with "Thought: " and reason in a few sentences. End with "Answer: " followed by \
the answer alone: a name, a date, a number or a short phrase, without further words."""
_BRIEF = 'Answer the query from the {noun} below. Write "Answer: " and the answer alone.'
_CHAIN = (
    "Answer the query from the {noun} below. First write the facts that lead to the answer, each "
    'on a line of its own: head; relation; tail. Then write "Answer: " and the answer alone.'
)
_INSTRUCTIONS = {"thought": _READING, "chain": _CHAIN, "brief": _BRIEF}
_REFUSAL = ' If the {noun} do not hold the answer, write "Answer: Unanswerable".'

_NOUNS = {"triple": "triples", "sentence": "sentences", "passage": "passages"}

EXAMPLE_QUERY = "In which country is the town where Mira Solheim was born?"
_EXAMPLE_EVIDENCE = {
    "triple": (
        "('mira solheim', 'born in', 'lindvik')",
        "('mira solheim', 'profession', 'cellist')",
        "('lindvik', 'town in', 'norway')",
    ),
    "sentence": (
        "Mira Solheim: Mira Solheim (born in Lindvik) is a cellist.",
        "Lindvik: Lindvik is a small town on the coast of Norway.",
    ),
    "passage": (
        "Mira Solheim\nMira Solheim (born in Lindvik) is a cellist. She has recorded six albums.",
        "Lindvik\nLindvik is a small town on the coast of Norway. It lives from fishing.",
    ),
}
_EXAMPLE_ANSWER = (
    "Thought: Mira Solheim was born in Lindvik, and Lindvik is a town in Norway. So the town of "
    "her birth is in Norway.\nAnswer: Norway"
)


def answer_messages(
    question: str,
    granularity: str,
    evidence: Sequence[str],
    *,
    may_refuse: bool = True,
    reader_format: str = "thought",
) -> tuple[Message, ...]:
    """The reader's conversation at one granularity.

    Args:
      question: the query.
      granularity: ``triple``, ``sentence`` or ``passage``.
      evidence: rendered triples, sentences or passages.
      may_refuse: without it the sufficiency instruction is left out (``force_answer``).
      reader_format: ``thought`` shows a worked example and asks for reasoning before the answer;
        ``chain`` for the facts that lead to it and then the answer, ``brief`` for the answer alone:
        what a trained reader writes.
    """
    noun = _NOUNS[granularity]
    instruction = _INSTRUCTIONS[reader_format] + (_REFUSAL if may_refuse else "")
    example = (
        Message("user", *_reading_turn(EXAMPLE_QUERY, noun, _EXAMPLE_EVIDENCE[granularity])),
        Message("assistant", _EXAMPLE_ANSWER),
    )
    return (
        Message("system", instruction.format(noun=noun)),
        *(example if reader_format == "thought" else ()),
        Message("user", *_reading_turn(question, noun, evidence)),
    )


def render_answer(answer: str | None, chain: Sequence[tuple[str, str, str]] = ()) -> str:
    """What a trained reader writes.

    Args:
      answer: the answer; None: the evidence does not suffice.
      chain: the facts that lead to it (``reader_format=chain``).
    """
    facts = ["; ".join(" ".join(part.split()) for part in fact) for fact in chain]
    last = UNANSWERABLE if answer is None else " ".join(answer.split())
    return "\n".join([*facts, f"Answer: {last}"])


def prompt_digest(reader_format: str) -> str:
    """A hash of how conversations read: what a reader was trained on, it must be asked."""
    shown = [
        [message.role, message.text]
        for granularity in _NOUNS
        for may_refuse in (True, False)
        for message in answer_messages(
            EXAMPLE_QUERY,
            granularity,
            _EXAMPLE_EVIDENCE[granularity],
            may_refuse=may_refuse,
            reader_format=reader_format,
        )
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def _reading_turn(question: str, noun: str, evidence: Sequence[str]) -> tuple[str, str, str]:
    """Heading, evidence (which truncation may drop) and query of a user turn."""
    return f"{noun.capitalize()}:\n", "\n".join(evidence), f"\n\nQuery: {question}"


def answer_start(text: str) -> int:
    """Where the text after the last ``Answer:`` of a response begins; 0 where there is none."""
    return max((mark.end() for mark in _ANSWER_MARK.finditer(text)), default=0)


def parse_answer(
    text: str, *, wide: bool = False, truncated: bool = False
) -> tuple[str, bool, str | None]:
    """Reads a reader's response; never fails.

    Args:
      text: the response.
      wide: also take a refusal in other words (`refusals.refuses`) for one.
      truncated: whether generation ended at its token limit.

    Returns:
      The text after the last ``Answer:`` up to the end of its line (the whole response where there
      is no such mark), whether it answers, and the kind of problem (``empty``, ``truncated``,
      ``no_answer_mark``) or None. Neither an empty answer nor a thought that was cut off before
      its answer answers.
    """
    if not text.strip():
        return "", False, "empty"
    start = answer_start(text)
    marked = start > 0
    lines = [line.strip(" \t*") for line in text[start:].splitlines() if line.strip(" \t*")]
    answer = (lines[0] if lines else "") if marked else " ".join(text.split())
    problem = None if marked else "no_answer_mark"
    if truncated and not (marked and len(lines) > 1):  # a line that others follow is whole
        problem = "truncated"
    if not answer:
        return "", False, problem or "empty"
    said = answer.lower()
    # Half of the word is what the shipped reader writes where it may not refuse.
    half = said.strip(" .'\"") == "unanswer"
    refused = half or "unanswerable" in said or (wide and refuses(answer))
    return answer, not refused and (marked or not truncated), problem
