"""C2RAG's prompts and parsers: planning, reading a name from text, answering.

The paper publishes no prompts. The purposes and fields are the paper's (sections 3.2 and 3.4); the
wording and examples are ours. Responses are untrusted: they are parsed, never evaluated, and each
kind of malformed output is counted under its own name.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import example_turns, object_schema
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.refusals import refuses
from cirag_jax.methods.common.short_answers import parse_short_answer
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.triples.normalization import name_key

# Names consist of capitalized words or numbers, with small words between. A possessive ends a name.
_WORD = r"(?:[A-Z0-9][\w.&/-]*(?:'(?!s\b)\w+)?)"
_NAME = re.compile(rf"\b{_WORD}(?:,? (?:(?:of|the|and|for|de|la|van|von) ){{0,2}}{_WORD})*")
# First words of questions, which are not names although they are capitalized.
_FIRST_WORDS = frozenset(
    {
        "who", "whom", "whose", "what", "which", "where", "when", "why", "how", "in", "on", "at",
        "of", "to", "by", "from", "for", "until", "since", "after", "before", "during", "the", "a",
        "an", "is", "are", "was", "were", "did", "does", "do", "has", "have", "had", "can", "name"
    }
)  # fmt: skip

MAX_ITEMS = 100  # Maximum number of constraints that are parsed in a response.
MAX_CHARS = 200  # Maximum length of a name or a relation.
_KEYS = ("constraints", "triples")  # Our key, and the key of the released code.
_VARIANTS = ("variants", "relation_variants")


PLANNER = Prompt(
    "planner",
    labels={"question": "Question:"},
    keys=("constraints", "head", "relation", "tail", "variants"),
)
FILLER = Prompt(
    "planner.fill",
    labels={"passages": "Passages:", "fact": "Fact:"},
    placeholders=("variable",),
)
READER = Prompt("reader.blocks", labels={"question": "Question:"}, written={"answer": "Answer:"})


class Constraint(NamedTuple):
    """A triple pattern tau = (h, r, t) (Eq. 1).

    Unknowns begin with "?" and are named after their type. ``variants`` are other wordings of the
    relation. A constraint from `textual` has only a relation, the text of a question.
    """

    head: str
    relation: str
    tail: str
    variants: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The unknowns, without repeats."""
        return tuple(dict.fromkeys(end for end in (self.head, self.tail) if is_variable(end)))

    @property
    def entities(self) -> tuple[str, ...]:
        """The ends that are names, not unknowns."""
        return tuple(end for end in (self.head, self.tail) if end and not is_variable(end))

    @property
    def relations(self) -> tuple[str, ...]:
        """The relation and its variants, without repeats."""
        return tuple(dict.fromkeys((self.relation, *self.variants)))


class Plan(NamedTuple):
    """A parsed plan P.

    Attributes:
      constraints: the constraints in order.
      problem: why the plan is unusable, as a sentence for the planner; empty if it is usable.
      parse_errors: kinds of malformed output, one entry per occurrence.
    """

    constraints: tuple[Constraint, ...]
    problem: str
    parse_errors: tuple[str, ...]


def is_variable(end: str) -> bool:
    """Returns whether an end of a constraint is an unknown."""
    return end.startswith("?")


def textual(question: str) -> Constraint:
    """Converts a question to a constraint that is looked up only in text."""
    return Constraint("", question, "")


def linearise(constraint: Constraint, relation: str | None = None) -> str:
    """Returns a constraint as a line of text, Lin(tau); ``relation`` overrides its relation."""
    relation = constraint.relation if relation is None else relation
    return " — ".join(filter(None, (constraint.head, relation, constraint.tail)))


_TASK = """\
Turn a question into a plan: the facts that one must look up, one after the other, to answer it. \
Every fact is a constraint with a head, a relation and a tail.
- Heads and tails are names from the question, or unknowns. An unknown begins with ? and is named \
for what it is: ?person, ?city, ?year. The same unknown keeps its name in all constraints, two \
different ones never share a name.
- Begin with a constraint that has a name from the question; let each further one lead from an \
unknown that an earlier one finds. The last ones lead to what is asked.
- Take as few constraints as the question needs, at most {most}, and put at least one unknown into \
each.
- A relation is a short phrase that can be understood by itself.{variants}
Write one JSON object and nothing else: {shape}"""
_VARIANTS_TASK = " Add {count} other wordings of it as variants."

_EXAMPLES: tuple[tuple[str, tuple[Constraint, ...]], ...] = (
    (
        EXAMPLE_QUERY,
        (
            Constraint("Mira Solheim", "born in", "?town", ("birthplace", "native of")),
            Constraint("?town", "located in country", "?country", ("town in", "country")),
        ),
    ),
    (
        "Which river flows through both Halvik and the capital of Ostria?",
        (
            Constraint("?capital", "capital of", "Ostria", ("seat of government of", "capital")),
            Constraint("?river", "flows through", "Halvik", ("runs through", "river in")),
            Constraint("?river", "flows through", "?capital", ("runs through", "river in")),
        ),
    ),
    (
        "When was the founder of the publisher of The Salt Garden married?",
        (
            Constraint("The Salt Garden", "published by", "?publisher", ("publisher", "issued by")),
            Constraint("?publisher", "founded by", "?founder", ("founder", "established by")),
            Constraint("?founder", "married in", "?year", ("date of marriage", "wedding")),
        ),
    ),
)
NUM_EXAMPLES = len(_EXAMPLES)


def plan_messages(
    question: str, *, num_variants: int, max_constraints: int, num_examples: int
) -> tuple[Message, ...]:
    """Returns the planner's conversation, with at most `NUM_EXAMPLES` worked examples."""
    shape = render_plan([Constraint("...", "...", "...", ("...",))], num_variants)
    variants = _VARIANTS_TASK.format(count=num_variants - 1) if num_variants > 1 else ""
    task = _TASK.format(most=max_constraints, variants=variants, shape=shape)
    examples = (
        (f"Question: {example}", render_plan(constraints, num_variants))
        for example, constraints in _EXAMPLES[:num_examples]
    )
    turn = Message("user", f"Question: {question}")
    return PLANNER.conversation(task, example_turns(*examples), turn)


def ask_again(messages: Sequence[Message], response: str, problem: str) -> tuple[Message, ...]:
    """Returns the conversation that requests an unusable plan again."""
    reminder = f"This plan cannot be used: {problem} Write the whole plan again."
    return (*messages, Message("assistant", response), Message("user", reminder))


def render_plan(constraints: Iterable[Constraint], num_variants: int) -> str:
    """Returns a plan as JSON."""
    rows = []
    for constraint in constraints:
        row: dict[str, Any] = dict(zip(("head", "relation", "tail"), constraint, strict=False))
        if num_variants > 1:
            row["variants"] = list(constraint.variants[: num_variants - 1])
        rows.append(row)
    return json.dumps({"constraints": rows}, ensure_ascii=False)


def plan_schema(question: str, *, num_variants: int, max_constraints: int) -> Mapping[str, Any]:
    """Returns a JSON schema of plans, for models that do not follow the format without a schema.

    Every constraint must have an unknown. If `names_in` finds names in the question, no other names
    are allowed.
    """
    text = {"type": "string", "minLength": 1, "maxLength": 60}
    unknown = {"type": "string", "pattern": r"^\?[a-z]{2,14}$"}
    names = names_in(question)
    name = {"type": "string", "enum": list(names)} if names else text
    more: dict[str, Any] = {}
    if num_variants > 1:
        more["variants"] = {"type": "array", "items": text, "maxItems": num_variants - 1}
    rows = [
        object_schema({"head": head, "relation": text, "tail": tail, **more})
        for head, tail in ((name, unknown), (unknown, name), (unknown, unknown))
    ]
    plan = {"type": "array", "items": {"anyOf": rows}, "minItems": 1, "maxItems": max_constraints}
    return PLANNER.schema(object_schema({"constraints": plan}))


def names_in(question: str) -> tuple[str, ...]:
    """Returns likely names: runs of capitalized words and numbers, with small words between them.

    The first word of the question is ignored if questions often begin with it, such as "who".
    """
    runs = (match.group().removesuffix("'s").strip() for match in _NAME.finditer(question))
    first = (question.split(maxsplit=1) or [""])[0].rstrip(",.?")
    names = (
        name.removeprefix(first).strip()
        if first.lower() in _FIRST_WORDS and question.lstrip().startswith(name)
        else name
        for name in runs
    )
    return tuple(dict.fromkeys(name for name in names if name))


def parse_plan(
    text: str, question: str, *, num_variants: int, max_constraints: int, truncated: bool = False
) -> Plan:
    """Parses a plan; never fails.

    Also accepts the field names of the released code, rows that are lists of three, and a single
    row. Drops rows that are not constraints, and constraints with two equal ends. Counts, but
    keeps, constraints without an unknown and unknowns that no propagation can bind. A plan is
    unusable if it has more than ``max_constraints`` constraints, or no constraint with an unknown
    and a name from the question.
    """
    rows, errors = _rows(PLANNER.read(text), truncated)
    constraints: dict[Constraint, None] = {}
    for row in rows[:MAX_ITEMS]:
        constraint = _constraint(row, num_variants)
        if constraint is None:
            errors.append("plan_not_a_constraint")
        elif constraint.head == constraint.tail:
            errors.append("plan_cycle")
        else:
            constraints[constraint] = None
    plan = tuple(constraints)
    question_words = set(name_key(question, "unicode").split())
    not_in_question = [e for c in plan for e in c.entities if question_words.isdisjoint(_words(e))]
    errors += ["plan_unnamed_entity"] * len(not_in_question)
    errors += ["plan_no_variable" for constraint in plan if not constraint.variables]
    errors += ["plan_unbound_variable"] * len(unreachable(plan))
    problem = ""
    if not plan:
        problem = "it holds no constraint in the format asked for."
    elif len(plan) > max_constraints:
        problem = f"it has more than {max_constraints} constraints."
        errors.append("plan_too_long")
    elif not any(c.variables and set(c.entities) - set(not_in_question) for c in plan):
        problem = "no constraint has both a name from the question and an unknown."
    return Plan(plan, problem, tuple(errors))


def unreachable(plan: Sequence[Constraint]) -> tuple[str, ...]:
    """Returns the unknowns that no chain of constraints connects with a name."""
    reachable: set[str] = set()
    while True:
        new = {v for c in plan if c.entities or reachable & set(c.variables) for v in c.variables}
        if new <= reachable:
            break
        reachable |= new
    return tuple(dict.fromkeys(v for c in plan for v in c.variables if v not in reachable))


def _rows(text: str, truncated: bool) -> tuple[list[Any], list[str]]:
    for key in _KEYS:
        value, problem = find_json(text, key, truncated=truncated)
        if isinstance(value, dict):
            rows = value[key]
            break
    else:  # The list, or its only constraint, may lack the object around it.
        rows, problem = find_json(text, truncated=truncated)
    errors = [f"plan_{problem}"] if problem is not None else []
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        return [], errors or ["plan_wrong_shape"]
    if len(rows) == 3 and all(isinstance(part, str) for part in rows):
        rows = [rows]
    return rows, errors


def _constraint(row: Any, num_variants: int) -> Constraint | None:
    if isinstance(row, dict):
        parts = [row.get(name) for name in ("head", "relation", "tail")]
        variants = next((row[name] for name in _VARIANTS if name in row), ())
    else:
        parts, variants = row if isinstance(row, list) else [], ()
    if len(parts) != 3:
        return None
    head, relation, tail = map(_plain, parts)
    if not (_words(head) and relation and _words(tail)):
        return None
    others = map(_plain, variants if isinstance(variants, list) else ())
    wordings = tuple(dict.fromkeys(o for o in others if o and o != relation))
    return Constraint(_end(head), relation, _end(tail), wordings[: num_variants - 1])


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return one_line(str(value))[:MAX_CHARS]


def _end(text: str) -> str:
    """Returns an end of a constraint; unknowns get a canonical spelling."""
    return "?" + "_".join(_words(text)) if is_variable(text) else text


def _words(text: str) -> list[str]:
    return name_key(text.lstrip("?"), "unicode").split()


def fill_messages(
    constraint: Constraint, variable: str, texts: Sequence[str]
) -> tuple[Message, ...]:
    """Returns the conversation that requests the name of an unknown, given texts."""
    task = (
        "Read the passages and say what {variable} is in the fact below. Write its name, date or "
        "number alone, as the passages write it; write none if they do not say."
    )
    ending = f"\n\nFact: {linearise(constraint)}"
    turn = Message("user", "Passages:\n", "\n\n".join(texts), ending)
    return FILLER.conversation(task, (), turn, variable=variable)


def parse_fill(text: str) -> str | None:
    """Returns the name of an unknown, or None if the texts do not state it; never fails."""
    value = parse_short_answer(text)[:MAX_CHARS].strip(" .")
    return None if not _words(value) or is_variable(value) or refuses(value) else value


Block = tuple[str, Sequence[str]]  # Lin(tau_i) and its texts.

_ANSWER = """\
Answer the question from the evidence alone. The question was split into facts to look up, written \
as head — relation — tail: what begins with ? is unknown, and the wording of a relation is \
approximate. Under each fact stand the texts found for it. Find the unknowns one after the other, \
then give the answer alone: a name, a date, a number or a short phrase, without any other words."""


def answer_messages(question: str, blocks: Sequence[Block]) -> tuple[Message, ...]:
    """Returns the reader's conversation about the evidence blocks of a question (Eq. 16)."""
    facts = []
    for number, (line, texts) in enumerate(blocks, 1):
        numbered = (f"[{i}] {one_line(text)}" for i, text in enumerate(texts, 1))
        facts.append("\n".join([f"Fact {number}: {line}", *numbered]))
    return READER.conversation(
        _ANSWER,
        (),
        Message(
            "user", f"Question: {question}\n\n", "\n\n".join(facts), f"\n\nQuestion: {question}"
        ),
    )
