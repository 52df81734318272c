"""KiRAG's messages and parsers: constructor (its Figure 7) and reader (Figure 8), in our own words.

A reasoning chain is a thought whose steps are units copied from the context: triples in angle
brackets one after the other, sentences or passages a line each. What a model writes is hostile
input: it is searched, never evaluated, and what is wrong with it is named so that it is counted.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.annotations import fill, hops_of
from cirag_jax.datasets.chains import UnitKind, triple_text
from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Passage, Question, Triple

FINAL = "So the answer is"
THOUGHT = "Thought:"
NOUNS: Mapping[str, str] = {
    "triple": "knowledge triples",
    "sentence": "sentences",
    "passage": "passages",
}
# A model that runs past its own turn begins the next question.
STOP = ("\nQuestion:", "\nContext:")

_INSTRUCTION = (
    "Work the question out step by step, as the examples do. The steps of your thought are "
    "{noun} of the context, copied word for word, each on its way from what the question names to "
    f'what it asks for. When they suffice, write "{FINAL}" and the answer.'
)
_EXAMPLE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # context, and the chain
    "triple": (
        (
            "<Mira Solheim; profession; cellist>",
            "<Lindvik; town in; Norway>",
            "<Mira Solheim; born in; Lindvik>",
        ),
        ("<Mira Solheim; born in; Lindvik>", "<Lindvik; town in; Norway>"),
    ),
    "sentence": (
        (
            "Mira Solheim: She has recorded six albums.",
            "Lindvik: Lindvik is a small town on the coast of Norway.",
            "Mira Solheim: Mira Solheim (born in Lindvik) is a cellist.",
        ),
        (
            "Mira Solheim: Mira Solheim (born in Lindvik) is a cellist.",
            "Lindvik: Lindvik is a small town on the coast of Norway.",
        ),
    ),
    "passage": (
        (
            "Lindvik. Lindvik is a small town on the coast of Norway. It lives from fishing.",
            "Mira Solheim. Mira Solheim (born in Lindvik) is a cellist.",
        ),
        (
            "Mira Solheim. Mira Solheim (born in Lindvik) is a cellist.",
            "Lindvik. Lindvik is a small town on the coast of Norway. It lives from fishing.",
        ),
    ),
}
_EXAMPLE_ANSWER = "Norway"

# A triple, as long as its brackets are; or the words that end a chain, outside of any triple.
_PIECE = re.compile(
    r"<(?P<unit>[^<>\n]*)(?P<closed>>?)|(?P<mark>\bthe (?:final )?answer is\b)", re.IGNORECASE
)
_MARK = re.compile(r"(?:\b(?:so|thus|therefore),? )?\bthe (?:final )?answer is\b", re.IGNORECASE)
_LABEL = re.compile(
    r"^(?:.*?\bthe (?:final )?answer is\b|(?:final )?answer\s*(?=:))", re.IGNORECASE
)

_MAX_UNITS = 20  # of one response that are looked at; each may cost a search for the closest
_MAX_CHARS = 500  # of a unit that are compared: difflib is quadratic


# ------------------------------------------------------------------------------------- constructor


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
    """The constructor's conversation, which ends inside of its own turn: it completes the chain.

    Args:
      question: what is asked.
      candidates: texts of the candidate units, best first.
      chain: texts of the units found so far.
      kind: what they are.
      demonstrations: of `demonstration`; without any, a worked example of ours.
      opening: also write the bracket that begins the next triple.
      continues: False: the chain stands at the end of the user's turn instead, for servers that
        cannot go on with an assistant's.
    """
    context, end = _context(candidates, kind), f"\n\nQuestion: {question}"
    asked = (
        Message("system", _INSTRUCTION.format(noun=NOUNS[kind])),
        *(message for turns in demonstrations or (_worked_example(kind),) for message in turns),
    )
    written = render_chain(chain, kind, opening=opening)
    if continues:
        return (
            *asked,
            Message("user", "Context:\n", context, end),
            Message("assistant", written),
        )
    return (*asked, Message("user", "Context:\n", context, f"{end}\n{written}"))


def render_chain(
    chain: Sequence[str], kind: UnitKind, *, answer: str | None = None, opening: bool = False
) -> str:
    """A thought: the units of a chain, and the answer where there is one."""
    units = [shown(text, kind) for text in chain]
    if kind != "triple":
        lines = [THOUGHT, *units, *([] if answer is None else [f"{FINAL}: {answer}."])]
        return "\n".join(lines) + ("\n" if answer is None else "")
    text = " ".join([THOUGHT, ", ".join(units)]).rstrip()
    if opening:
        return f"{text}{',' if units else ''} <"
    return text if answer is None else f"{text}. {FINAL}: {answer}."


def shown(text: str, kind: UnitKind) -> str:
    """A unit as the model sees it and copies it: on one line, its brackets no part of it."""
    text = " ".join(text.split())
    if kind != "triple" or not text.startswith("<"):  # A sentence may stand in a chain of triples.
        return text
    return f"<{text.removeprefix('<').removesuffix('>').replace('<', '(').replace('>', ')')}>"


def _context(candidates: Sequence[str], kind: UnitKind) -> str:
    return "\n".join(shown(text, kind) for text in candidates)


def _worked_example(kind: UnitKind) -> tuple[Message, ...]:
    context, chain = _EXAMPLE[kind]
    return (
        Message("user", f"Context:\n{_context(context, kind)}\n\nQuestion: {EXAMPLE_QUERY}"),
        Message("assistant", render_chain(chain, kind, answer=_EXAMPLE_ANSWER)),
    )


def demonstration(question: Question) -> tuple[Message, ...] | None:
    """A training question with its chain of triples; None where its annotations name none.

    2WikiMultihopQA annotates triples. A sub-question of MuSiQue gives one of its keywords and its
    answer; HotpotQA gives none.
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
    return (
        Message("user", f"Question: {question.question}"),
        Message("assistant", render_chain(texts, "triple", answer=question.answers[0])),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """How a constructor goes on with a chain.

    Attributes:
      candidate: place of the first new unit among the candidates; None where it names none.
      written: the first new unit as it stands there, candidate or not; without any, the first
        sentence. Empty where it wrote nothing.
      has_unit: whether it wrote a new unit, candidate or not.
      answer: what follows "the answer is"; None where that is not said.
      parse_errors: ``empty``, ``truncated`` (before the first unit ended), ``not_a_candidate`` (one
        each), ``no_unit`` (neither a unit nor an answer), ``too_many_units``.
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
    """Reads what the constructor adds to a chain; never fails.

    Args:
      text: the response.
      candidates: what it could choose from.
      chain: what it had found before; a unit of it is not new.
      kind: of units.
      cutoff: least similarity (difflib's ratio) at which a unit that is no candidate after
        normalisation is taken for the closest one; 1: none is.
      opening: whether the bracket of the first triple was written for it.
      truncated: whether generation ended at its token limit; a unit that was cut off is compared
        with the beginnings of the candidates.
    """
    if not text.strip():
        return Completion(None, "", False, None, ("empty",))
    keys = [_key(candidate) for candidate in candidates]
    read = _triples if kind == "triple" else _lines
    units, answer = read(f"<{text}" if opening else text, keys)
    parse_errors = ["too_many_units"] if len(units) > _MAX_UNITS else []
    known = {_key(step) for step in chain}
    written, is_cut = "", False
    for place, (unit, is_whole) in enumerate(units[:_MAX_UNITS]):
        if not _key(unit) or _key(unit) in known:
            continue
        is_cut = truncated and answer is None and place == len(units) - 1 and not is_whole
        written = written or unit
        found = _match(_key(unit), keys, known, cutoff, is_cut)
        if found is not None:
            return Completion(found, written, True, answer, tuple(parse_errors))
        parse_errors.append("truncated" if is_cut else "not_a_candidate")
    if not written and answer is None:
        parse_errors.append("no_unit")
    sentence = next((s.strip() for s in split_sentences(text.strip()) if s.strip()), "")
    return Completion(None, written or sentence, bool(written), answer, tuple(parse_errors))


def _triples(text: str, _: Sequence[str]) -> tuple[list[tuple[str, bool]], str | None]:
    """The triples before the answer, with whether each is whole, and the answer."""
    units: list[tuple[str, bool]] = []
    for piece in _PIECE.finditer(text):
        if piece["mark"]:
            return units, parse_answer(text[piece.end() :])
        unit = piece["unit"]
        mark = None if piece["closed"] else _MARK.search(unit)
        if mark is not None:  # its bracket was forgotten
            unit = unit[: mark.start()].rstrip(" .,")
        if unit.strip():
            units.append((f"<{unit.strip()}>", bool(piece["closed"] or mark)))
        if mark is not None:
            return units, parse_answer(text[piece.start("unit") + mark.end() :])
    return units, None


def _lines(text: str, keys: Sequence[str]) -> tuple[list[tuple[str, bool]], str | None]:
    """The lines before the answer; one that is a candidate may speak of an answer itself."""
    units: list[tuple[str, bool]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        line = line.strip(" \t-*")
        mark = None if _key(line) in keys else _MARK.search(line)
        unit = line if mark is None else line[: mark.start()].strip()
        if unit:
            units.append((unit, mark is not None or number < len(lines) - 1))
        if mark is not None:
            rest = "\n".join([line[mark.end() :], *lines[number + 1 :]])
            return units, parse_answer(rest)
    return units, None


def _match(
    key: str, keys: Sequence[str], known: set[str], cutoff: float, is_cut: bool
) -> int | None:
    """The place of the candidate that a unit stands for, one that is not in the chain yet."""
    if not is_cut and key in keys:
        return keys.index(key)
    if cutoff >= 1.0 and not is_cut:
        return None
    key = key[:_MAX_CHARS]
    length = len(key) if is_cut else _MAX_CHARS
    places = {other[:length]: place for place, other in enumerate(keys) if other not in known}
    close = difflib.get_close_matches(key, places, n=1, cutoff=cutoff)
    return places[close[0]] if close else None


def _key(text: str) -> str:
    """What two units have in common that say the same in the same words."""
    return normalise(text, "unicode")


def answer_in(text: str) -> str | None:
    """What a text says the answer is; None where it says none."""
    mark = _MARK.search(text)
    return None if mark is None else parse_answer(text[mark.end() :])


# ------------------------------------------------------------------------------------------ reader


def reading_messages(question: str, passages: Sequence[Passage]) -> tuple[Message, ...]:
    """The reader's conversation about the passages ranked first."""
    documents = "\n".join(
        f"{number}. title: {passage.title}, text: {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
    return (
        Message(
            "system",
            "You are given a context and a question. Write the answer to the question, and "
            "nothing else.",
        ),
        Message("user", "Context:\n", documents, f"\n\nQuestion: {question}\nThe answer is:"),
    )


def parse_answer(text: str) -> str:
    """The first line that holds something, without "the answer is" and a colon before it."""
    for line in text.splitlines():
        line = _LABEL.sub("", line.strip(" \t*"), count=1)
        line = line.strip(" \t*:").removesuffix(".").strip()
        if line:
            return line
    return ""
