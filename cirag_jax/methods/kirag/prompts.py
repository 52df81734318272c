"""KiRAG's constructor prompt (Figure 7) and reader prompt (Figure 8), in our words, with parsers.

The constructor writes a reasoning chain of units copied from the context: triples in angle brackets
on one line, or one sentence or passage per line. Responses are untrusted: they are parsed, never
evaluated, and each kind of malformed output is counted under its own name.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.annotations import fill, hops_of
from cirag_jax.datasets.chains import UnitKind, triple_text
from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import example_turns
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.written_answers import FINAL
from cirag_jax.triples.normalization import normalize
from cirag_jax.types import Passage, Question, Triple

THOUGHT = "Thought:"
NOUNS: Mapping[str, str] = {
    "triple": "knowledge triples",
    "sentence": "sentences",
    "passage": "passages",
}
# These begin the next question, which a model writes if it does not end its turn.
STOP = ("\nQuestion:", "\nContext:")

CONSTRUCTOR = Prompt(
    "constructor",
    labels={"context": "Context:", "question": "Question:"},
    written={"thought": THOUGHT, "answer": FINAL},
)
READER = Prompt(
    "reader.documents",
    labels={"context": "Context:", "question": "Question:", "answer": "The answer is:"},
)
_INSTRUCTION = (
    "Work the question out step by step, as the examples do. The steps of your thought are "
    "{noun} of the context, copied word for word, each on its way from what the question names to "
    f'what it asks for. When they suffice, write "{FINAL}" and the answer.'
)
# The context of the worked example; its chain is the last unit, then the second to last.
_EXAMPLE: Mapping[str, tuple[str, ...]] = {
    "triple": (
        "<Mira Solheim; profession; cellist>",
        "<Lindvik; town in; Norway>",
        "<Mira Solheim; born in; Lindvik>",
    ),
    "sentence": (
        "Mira Solheim: She has recorded six albums.",
        "Lindvik: Lindvik is a small town on the coast of Norway.",
        "Mira Solheim: Mira Solheim (born in Lindvik) is a cellist.",
    ),
    "passage": (
        "Lindvik. Lindvik is a small town on the coast of Norway. It lives from fishing.",
        "Mira Solheim. Mira Solheim (born in Lindvik) is a cellist.",
    ),
}
_EXAMPLE_ANSWER = "Norway"

# A triple, possibly without its closing bracket, or the words that end a chain.
_PIECE = re.compile(
    r"<(?P<unit>[^<>\n]*)(?P<closed>>?)|(?P<mark>\bthe (?:final )?answer is\b)", re.IGNORECASE
)
_MARK = re.compile(r"(?:\b(?:so|thus|therefore),? )?\bthe (?:final )?answer is\b", re.IGNORECASE)
_LABEL = re.compile(
    r"^(?:.*?\bthe (?:final )?answer is\b|(?:final )?answer\s*(?=:))", re.IGNORECASE
)

_TRIPLE = re.compile(r"<[^;<>]*;[^;<>]*;[^<>]*>")

_MAX_UNITS = 20  # Further units of a response are ignored, because matching takes time.
_MAX_CHARS = 500  # Only this many are compared, because difflib takes quadratic time.


def constructor_messages(
    question: str,
    candidates: Sequence[str],
    chain: Sequence[str],
    kind: UnitKind,
    *,
    demonstrations: Sequence[tuple[Message, ...]] = (),
    opening: bool = False,
    continues: bool = True,
) -> tuple[Message, ...]:
    """Returns the constructor's conversation, which ends with the chain to complete.

    Args:
      question: the question.
      candidates: texts of the candidates, best first.
      chain: texts of the chain.
      kind: kind of the units.
      demonstrations: results of `demonstration`; if empty, our worked example is shown. Examples
        of a prompt file replace both.
      opening: also write the bracket that opens the next triple.
      continues: put the chain into an assistant turn; if False, it ends the user turn, for servers
        that cannot continue an assistant turn.
    """
    context, end = _context(candidates, kind), f"\n\nQuestion: {question}"
    thought = render_chain(chain, kind, opening=opening)
    if continues:
        user = Message("user", "Context:\n", context, end)
        turns = (user, Message("assistant", thought))
    else:
        turns = (Message("user", "Context:\n", context, f"{end}\n{thought}"),)
    if CONSTRUCTOR.has_own_examples:
        demonstrations = ()
    return CONSTRUCTOR.conversation(
        _INSTRUCTION.format(noun=NOUNS[kind]),
        _worked_example(kind) if not demonstrations else (),
        *(message for shown in demonstrations for message in shown),
        *turns,
    )


def render_chain(
    chain: Sequence[str], kind: UnitKind, *, answer: str | None = None, opening: bool = False
) -> str:
    """Returns a thought: the units of a chain, then the answer if there is one."""
    units = [shown(text, kind) for text in chain]
    if kind != "triple":
        lines = [THOUGHT, *units, *([] if answer is None else [f"{FINAL}: {answer}."])]
        return "\n".join(lines) + ("\n" if answer is None else "")
    text = " ".join([THOUGHT, ", ".join(units)]).rstrip()
    if opening:
        return f"{text}{',' if units else ''} <"
    return text if answer is None else f"{text}. {FINAL}: {answer}."


def shown(text: str, kind: UnitKind) -> str:
    """Returns a unit as prompts show it: on one line, without inner brackets."""
    text = one_line(text)
    if kind != "triple" or not text.startswith("<"):  # A chain of triples may contain a sentence.
        return text
    return f"<{text.removeprefix('<').removesuffix('>').replace('<', '(').replace('>', ')')}>"


def is_unit(text: str, kind: UnitKind) -> bool:
    """Returns whether a text of the chain has the form of a unit; triples are in brackets."""
    return kind != "triple" or _TRIPLE.fullmatch(text.strip()) is not None


def _context(candidates: Sequence[str], kind: UnitKind) -> str:
    return "\n".join(shown(text, kind) for text in candidates)


def _worked_example(kind: UnitKind) -> tuple[Message, ...]:
    context = _EXAMPLE[kind]
    chain = (context[-1], context[-2])
    turn = f"Context:\n{_context(context, kind)}\n\nQuestion: {EXAMPLE_QUERY}"
    return example_turns((turn, render_chain(chain, kind, answer=_EXAMPLE_ANSWER)))


def demonstration(question: Question) -> tuple[Message, ...] | None:
    """Returns a training question and its chain as messages, or None without an annotated chain.

    2WikiMultihopQA annotates triples. In MuSiQue, the keywords of a sub-question and its answer
    make a triple. HotpotQA annotates no chains.
    """
    hops = hops_of(question, {})
    known = {index: hop.answers[0] for index, hop in enumerate(hops) if hop.answers}
    chain = []
    for index, hop in enumerate(hops):
        if hop.triple is not None:
            chain.append(Triple(*hop.triple))
        elif index in known:
            about, keywords = fill(hop.about, known), fill(hop.keywords, known)
            relation = keywords[len(about) :].strip() if hop.is_entity else "is"
            chain.append(Triple(about if hop.is_entity else keywords, relation, known[index]))
    if len(chain) < len(hops) or not chain or not question.answers:
        return None
    texts = [triple_text(triple) for triple in chain]
    rendered = render_chain(texts, "triple", answer=question.answers[0])
    return example_turns((f"Question: {question.question}", rendered))


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A constructor's completion of a chain.

    Attributes:
      candidate: index of the candidate that is the first new unit, or None.
      written: the first new unit as written, even if it is not a candidate; without a new unit, the
        first sentence.
      has_unit: whether the completion has a new unit, even if it is not a candidate.
      answer: the text after "the answer is", or None.
      parse_errors: kinds of malformed output: ``empty``, ``truncated`` (before the first unit
        ended), ``not_a_candidate`` (once per unit), ``no_unit`` (neither a unit nor an answer),
        ``too_many_units``.
    """

    candidate: int | None
    written: str
    has_unit: bool
    answer: str | None
    parse_errors: tuple[str, ...]


def parse_completion(
    text: str,
    candidates: Sequence[str],
    chain: Sequence[str],
    kind: UnitKind,
    *,
    cutoff: float = 1.0,
    opening: bool = False,
    truncated: bool = False,
) -> Completion:
    """Parses the constructor's completion of a chain; never fails.

    A unit that equals no candidate after normalization is replaced with the most similar candidate,
    if difflib's ratio is at least ``cutoff`` and ``cutoff`` is below 1. With ``truncated``, a unit
    that was cut off is compared with the candidates' beginnings. ``opening`` means that the prompt
    ended with the opening bracket of a triple.
    """
    text = CONSTRUCTOR.read(text)
    if not text.strip():
        return Completion(None, "", False, None, ("empty",))
    keys = [_key(candidate) for candidate in candidates]
    split = _split_triples if kind == "triple" else _split_lines
    units, answer = split(f"<{text}" if opening else text, keys)
    parse_errors = ["too_many_units"] if len(units) > _MAX_UNITS else []
    in_chain = {_key(step) for step in chain}
    written = ""
    for index, (unit, is_whole) in enumerate(units[:_MAX_UNITS]):
        if not _key(unit) or _key(unit) in in_chain:
            continue
        is_cut = truncated and answer is None and index == len(units) - 1 and not is_whole
        written = written or unit
        candidate = _match(_key(unit), keys, in_chain, cutoff, is_cut)
        if candidate is not None:
            return Completion(candidate, written, True, answer, tuple(parse_errors))
        parse_errors.append("truncated" if is_cut else "not_a_candidate")
    if not written and answer is None:
        parse_errors.append("no_unit")
    # A completion may begin with the mark that ends the last unit (removed in the released code).
    sentences = split_sentences(text.lstrip(" \t\n.,;"))
    sentence = next((s.strip() for s in sentences if s.strip()), "")
    return Completion(None, written or sentence, bool(written), answer, tuple(parse_errors))


def _split_triples(text: str, _: Sequence[str]) -> tuple[list[tuple[str, bool]], str | None]:
    """Returns pairs (triple, whether it is complete) before the answer, and the answer."""
    units: list[tuple[str, bool]] = []
    for piece in _PIECE.finditer(text):
        if piece["mark"]:
            return units, parse_answer(text[piece.end() :])
        unit = piece["unit"]
        mark = None if piece["closed"] else _MARK.search(unit)
        if mark is not None:  # The closing bracket is missing.
            unit = unit[: mark.start()].rstrip(" .,")
        if unit.strip():
            units.append((f"<{unit.strip()}>", bool(piece["closed"] or mark)))
        if mark is not None:
            return units, parse_answer(text[piece.start("unit") + mark.end() :])
    return units, None


def _split_lines(text: str, keys: Sequence[str]) -> tuple[list[tuple[str, bool]], str | None]:
    """Returns pairs (line, whether it is complete) before the answer, and the answer."""
    units: list[tuple[str, bool]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        line = line.strip(" \t-*")
        # A candidate may itself contain "the answer is".
        mark = None if _key(line) in keys else _MARK.search(line)
        unit = line if mark is None else line[: mark.start()].strip()
        if unit:
            units.append((unit, mark is not None or number < len(lines) - 1))
        if mark is not None:
            rest = "\n".join([line[mark.end() :], *lines[number + 1 :]])
            return units, parse_answer(rest)
    return units, None


def _match(
    key: str, keys: Sequence[str], in_chain: set[str], cutoff: float, is_cut: bool
) -> int | None:
    """Returns the index of the candidate outside the chain that matches a unit, or None."""
    if not is_cut and key in keys:
        return keys.index(key)
    if cutoff >= 1.0 and not is_cut:
        return None
    key = key[:_MAX_CHARS]
    length = len(key) if is_cut else _MAX_CHARS
    index_of = {other[:length]: i for i, other in enumerate(keys) if other not in in_chain}
    close = difflib.get_close_matches(key, index_of, n=1, cutoff=cutoff)
    return index_of[close[0]] if close else None


def _key(text: str) -> str:
    return normalize(text, "unicode")


def answer_in(text: str) -> str | None:
    """Returns the answer after "the answer is" in a text, or None."""
    mark = _MARK.search(text)
    return None if mark is None else parse_answer(text[mark.end() :])


def reading_messages(question: str, passages: Sequence[Passage]) -> tuple[Message, ...]:
    """Returns the reader's conversation about passages."""
    documents = "\n".join(
        f"{number}. title: {passage.title}, text: {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
    return READER.conversation(
        "You are given a context and a question. Write the answer to the question, and nothing "
        "else.",
        (),
        Message("user", "Context:\n", documents, f"\n\nQuestion: {question}\nThe answer is:"),
    )


def parse_answer(text: str) -> str:
    """Returns the first line with content, without a label such as "the answer is:"."""
    for line in text.splitlines():
        line = _LABEL.sub("", line.strip(" \t*"), count=1)
        line = line.strip(" \t*:").removesuffix(".").strip()
        if line:
            return line
    return ""


def parse_reading(text: str, *, truncated: bool = False) -> tuple[str, bool, str | None]:
    """Parses the reader's response; returns the same values as `reading_prompts.parse_answer`."""
    answer = parse_answer(text)
    return answer, bool(answer), None if answer else "empty"
