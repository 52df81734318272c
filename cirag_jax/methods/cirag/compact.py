"""The compact format of integration: numbered candidates in, their numbers and a question out.

Ours, not the paper's. A decision has two lines, ``Keep: 2 5`` (or ``none``) and ``Next: ...`` (or
``done``), so that "nothing helps here" and "nothing is missing" are different words, and a fact
costs a number instead of a copy. Triples are shown as they were extracted, sentences as an aligner
reads them.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.decisions import Decision, Section
from cirag_jax.types import Sentence, Step, Triple, Unit

Units = Literal["triple", "sentence"]

NONE, DONE = "none", "done"
KEEP, ENDS = "Keep:", f"Next: {DONE}"  # How a decision begins, and how the last one ends.

_INSTRUCTION = """\
You collect facts until a question can be answered. Each round shows numbered facts{form}. Reply \
with two lines:
Keep: the numbers of the facts that help to answer the question, or none
Next: one short question that asks for what is still missing, naming what was found; or done, if \
the facts kept so far answer the question"""
_FORMS = {"triple": "", "sentence": ", each of them a sentence after the title of its page"}
STOP = ("\nFacts:", "\nQuestion:")
SECTIONS = (
    Section(KEEP, ("\n",), "\n", 24),
    Section("Next:", ("\n",), "", 40),
)

# Bold closes right after the colon; an asterisk further on is the text's own.
_LINE = re.compile(r"^[ \t*#-]*(keep|next)[ \t*]*:\**[ \t]*(.*)$", re.IGNORECASE)
_NOTHING = ([DONE], [NONE], ["no", "question"], ["nothing"])
_MOST_DIGITS = 6  # A longer number is no candidate's, and int() is quadratic.
_QUESTION = "Question: "


def messages(
    question: str, steps: Sequence[Step], candidates: Sequence[Unit], units: Units = "triple"
) -> list[Message]:
    """The conversation before the decision on ``candidates``; see `methods.cirag.prompts`."""
    made = [Message("system", _INSTRUCTION.format(form=_FORMS[units]))]
    for index, facts in enumerate([*(step.candidates for step in steps), candidates]):
        head = f"{_QUESTION}{_inert(question)}\n\n" if index == 0 else ""
        made.append(Message("user", head, _numbered(facts)))
        if index < len(steps):
            made.append(Message("assistant", render_decision(steps[index])))
    return made


def _numbered(facts: Sequence[Unit]) -> str:
    lines = [f"{number}. {line(fact)}" for number, fact in enumerate(facts, 1)]
    return "\n".join(["Facts:", *(lines or [NONE])])


def line(fact: Unit) -> str:
    """A candidate as it is shown: a triple, a sentence with its text, or a line itself."""
    match fact:
        case Triple():
            return " | ".join(_inert(part).replace("|", "/") for part in fact[:3])
        case Sentence():
            return _inert(fact.text or "")
    return _inert(fact)


def _inert(text: str) -> str:
    """One line, which can begin no other."""
    return " ".join(text.split())


def render_decision(step: Step) -> str:
    """A round's decision; kept triples that are no candidates cannot be named, and are not."""
    numbers = [str(n) for n, fact in enumerate(step.candidates, 1) if fact in step.kept]
    query = DONE if step.next_query is None else _inert(step.next_query)
    return f"{KEEP} {' '.join(numbers) or NONE}\nNext: {query}"


def read_conversation(
    messages: Sequence[Message],
) -> tuple[list[tuple[str, tuple[str, ...]]], str, tuple[str, ...]]:
    """The rounds of a conversation as it was shown, each its query and the lines that were kept.

    Returns:
      The rounds before this one, this one's query and the lines of its candidates. A worked example
      in front is skipped.
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
    """The conversation that asks once more for a missing second line."""
    reminder = (
        'Your reply has no line "Next:". Write that line alone, with the next question, or '
        f'"Next: {DONE}" if the facts kept so far answer the question.'
    )
    return (*messages, Message("assistant", response), Message("user", reminder))


def parse_decision(text: str, candidates: Sequence[Any], *, truncated: bool = False) -> Decision:
    """Reads a response; never fails.

    Args:
      text: the response.
      candidates: what the numbers stand for.
      truncated: whether generation ended at its token limit.

    Returns:
      The decision; what stands outside of the two lines is its thought. Kinds of parse errors:
      ``truncated``, ``empty``, ``no_facts``, ``no_question``, ``repeated_header``,
      ``not_a_candidate`` (a number that no candidate has).
    """
    errors = ["truncated"] if truncated else []
    if not text.strip():
        return Decision("", (), None, False, (*errors, "empty"))
    found: dict[str, str] = {}
    rest = []
    for written in text.splitlines():
        match = _LINE.match(written)
        if match is None:
            rest.append(written.strip())
        elif match[1].lower() in found:
            errors.append("repeated_header")
        else:
            found[match[1].lower()] = match[2].strip()
    kept: dict[Any, None] = {}
    for number in re.findall(r"\d+", found.get("keep", "")):
        place = int(number) if len(number) <= _MOST_DIGITS else 0
        if 1 <= place <= len(candidates):
            kept[candidates[place - 1]] = None
        else:
            errors.append("not_a_candidate")
    if "keep" not in found:
        errors.append("no_facts")
    # An empty line that was cut off says nothing.
    has_question = "next" in found and bool(found["next"] or not truncated)
    if not has_question:
        errors.append("no_question")
    query = parse_query(found.get("next", ""))
    return Decision(" ".join(filter(None, rest)), tuple(kept), query, has_question, tuple(errors))


def parse_query(text: str) -> str | None:
    """The question of a line ``Next:``; None where it is empty or says that nothing is missing."""
    words = re.findall(r"\w+", text.lower())
    return None if not words or words in _NOTHING else " ".join(text.split())


def parse_reply(text: str, *, truncated: bool = False) -> Decision:
    """Reads the reply to `ask_for_question`: its line, or one bare question; never fails."""
    decision = parse_decision(text, (), truncated=truncated)
    errors = ("truncated",) if truncated else ()
    if decision.has_question:
        return Decision("", (), decision.next_query, True, errors)
    bare = text.strip()
    if len(bare.splitlines()) == 1 and (bare.endswith("?") or bare.lower().strip(" .") == DONE):
        return Decision("", (), parse_query(bare), True, (*errors, "question_without_header"))
    return Decision("", (), None, False, (*errors, "no_question"))
