"""The compact prompt format of integration (ours): the model keeps candidates by their numbers.

A decision has two lines: ``Keep: 2 5`` (or ``none``) and ``Next: ...`` (or ``done``). ``none`` (no
fact helps) and ``done`` (no fact is missing) are different words, and a kept fact costs a number
instead of a copy. Triples are shown as extracted, and sentences after the title of their passage.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.decisions import Decision, Section
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.types import Sentence, Step, Triple, Unit

Units = Literal["triple", "sentence"]

NONE, DONE = "none", "done"
KEEP = "Keep:"  # The beginning of every decision.
LAST_LINE = f"Next: {DONE}"  # The end of the last decision.

PROMPT = Prompt(
    "integrator",
    labels={"query": "Question:", "candidates": "Facts:"},
    written={"keep": KEEP, "next": "Next:"},
    is_inert=True,
)
_INSTRUCTION = """\
You collect facts until a question can be answered. Each round shows numbered facts{form}. Reply \
with two lines:
Keep: the numbers of the facts that help to answer the question, or none
Next: one short question that asks for what is still missing, naming what was found; or done, if \
the facts kept so far answer the question"""
_FORMS = {"triple": "", "sentence": ", each of them a sentence after the title of its page"}
STOP = ("\nFacts:", "\nQuestion:")
SECTIONS = (Section(KEEP, ("\n",), "\n", 24), Section("Next:", ("\n",), "", 40))

# Bold markup ends right after the colon; a later asterisk belongs to the text.
_LINE = re.compile(r"^[ \t*#-]*(keep|next)[ \t*]*:\**[ \t]*(.*)$", re.IGNORECASE)
_NOTHING = ([DONE], [NONE], ["no", "question"], ["nothing"])
_MAX_DIGITS = 6  # No candidate has a longer number, and int() takes quadratic time.
_QUESTION = "Question: "


def messages(
    question: str, steps: Sequence[Step], candidates: Sequence[Unit], units: Units = "triple"
) -> list[Message]:
    """Returns the conversation in which the integrator next decides on ``candidates``."""
    instruction = _INSTRUCTION.format(form=_FORMS[units])
    head = f"{_QUESTION}{one_line(question)}\n\n"
    observations = [_numbered(facts) for facts in (*(s.candidates for s in steps), candidates)]
    return alternating(instruction, head, observations, map(render_decision, steps))


def alternating(
    instruction: str, head: str, observations: Sequence[str], decisions: Iterable[str]
) -> list[Message]:
    """Returns a conversation of alternating observations and decisions, beginning with ``head``."""
    turns = [Message("system", instruction), Message("user", head, observations[0])]
    for decision, observation in zip(decisions, observations[1:], strict=True):
        turns += [Message("assistant", decision), Message("user", "", observation)]
    return turns


def _numbered(facts: Sequence[Unit]) -> str:
    lines = [f"{number}. {line(fact)}" for number, fact in enumerate(facts, 1)]
    return "\n".join(["Facts:", *(lines or [NONE])])


def line(fact: Unit) -> str:
    """Returns a candidate (a triple, a sentence with text, or a line) as a line for prompts."""
    match fact:
        case Triple():
            return " | ".join(one_line(part).replace("|", "/") for part in fact[:3])
        case Sentence():
            return one_line(fact.text or "")
    return one_line(fact)


def render_decision(step: Step) -> str:
    """Returns the decision of a round as text, without kept facts that were not candidates."""
    numbers = [str(n) for n, fact in enumerate(step.candidates, 1) if fact in step.kept]
    query = DONE if step.next_query is None else one_line(step.next_query)
    return f"{KEEP} {' '.join(numbers) or NONE}\nNext: {query}"


def read_conversation(
    messages: Sequence[Message],
) -> tuple[list[tuple[str, tuple[str, ...]]], str, tuple[str, ...]]:
    """Parses a rendered conversation and skips its worked examples.

    Returns:
      The query and the kept lines of each finished round, the query of the current round, and the
      candidate lines of the current round.
    """
    start = max(i for i, message in enumerate(messages) if message.text.startswith(_QUESTION))
    query = messages[start].text.partition("\n")[0].removeprefix(_QUESTION)
    rounds: list[tuple[str, tuple[str, ...]]] = []
    candidates: tuple[str, ...] = ()
    for message in messages[start:]:
        if message.role == "user":
            candidates = tuple(re.findall(r"^\d+\. (.*)$", message.text, re.MULTILINE))
        else:
            decision = parse_decision(message.text, candidates)
            rounds.append((query, decision.kept))
            query = decision.next_query or ""
    return rounds, query, candidates


def ask_for_question(messages: Sequence[Message], response: str) -> tuple[Message, ...]:
    """Returns the conversation that requests a missing ``Next:`` line."""
    reminder = (
        'Your reply has no line "Next:". Write that line alone, with the next question, or '
        f'"Next: {DONE}" if the facts kept so far answer the question.'
    )
    return (*messages, Message("assistant", response), Message("user", PROMPT.write(reminder)))


def parse_decision(text: str, candidates: Sequence[Any], *, truncated: bool = False) -> Decision:
    """Parses a response; never fails.

    All lines except ``Keep:`` and ``Next:`` become the thought. Kinds of parse errors:
    ``truncated``, ``empty``, ``no_facts``, ``no_question``, ``repeated_header``, and
    ``not_a_candidate`` (a number without a candidate).
    """
    errors = ["truncated"] if truncated else []
    text = PROMPT.read(text)
    if not text.strip():
        return Decision("", (), None, False, (*errors, "empty"))
    lines: dict[str, str] = {}
    thought = []
    for text_line in text.splitlines():
        match = _LINE.match(text_line)
        if match is None:
            thought.append(text_line.strip())
        elif match[1].lower() in lines:
            errors.append("repeated_header")
        else:
            lines[match[1].lower()] = match[2].strip()
    kept: dict[Any, None] = {}
    for digits in re.findall(r"\d+", lines.get("keep", "")):
        number = int(digits) if len(digits) <= _MAX_DIGITS else 0
        if 1 <= number <= len(candidates):
            kept[candidates[number - 1]] = None
        else:
            errors.append("not_a_candidate")
    if "keep" not in lines:
        errors.append("no_facts")
    # An empty ``Next:`` line means that nothing is missing, unless the text was cut off there.
    has_question = "next" in lines and bool(lines["next"] or not truncated)
    if not has_question:
        errors.append("no_question")
    query = parse_query(lines.get("next", ""))
    thought = " ".join(filter(None, thought))
    return Decision(thought, tuple(kept), query, has_question, tuple(errors))


def parse_query(text: str) -> str | None:
    """Returns the question of a ``Next:`` line, or None if nothing is missing."""
    words = re.findall(r"\w+", text.lower())
    return None if not words or words in _NOTHING else one_line(text)


def parse_reply(text: str, *, truncated: bool = False) -> Decision:
    """Parses the reply to `ask_for_question`: a ``Next:`` line or only its text. Never fails."""
    decision = parse_decision(text, (), truncated=truncated)
    errors = ("truncated",) if truncated else ()
    if decision.has_question:
        return Decision("", (), decision.next_query, True, errors)
    bare = text.strip()
    if len(bare.splitlines()) == 1 and (bare.endswith("?") or bare.lower().strip(" .") == DONE):
        return Decision("", (), parse_query(bare), True, (*errors, "question_without_header"))
    return Decision("", (), None, False, (*errors, "no_question"))
