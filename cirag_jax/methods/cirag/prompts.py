"""CIRAG's messages and parsers of integration (paper, Fig. 11).

The papers' headers and formats, in our own sentences. What a model writes is hostile input: it is
searched and parsed, never evaluated, and whatever is wrong with it is named, so that it can be
counted.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact
from cirag_jax.methods.cirag.decisions import Decision, Section
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.triples.normalization import Normalization, normalise, triple_key
from cirag_jax.types import Sentence, Step, Triple

PromptFormat = Literal["multi_turn", "paper", "compact"]
NO_QUESTION = "<no question>"
HEADERS = ("thought", "fact_after_filter", "question")
# A model that runs past its own turn starts to write the next observation.
INTEGRATION_STOP = ("[[## fact_before_filter", "[[## historical_context", "[[## Original Query")

_INSTRUCTION = """\
You collect facts, step by step, until a query can be answered. Every step has four sections:
[[## fact_before_filter ##]] holds candidate facts, found for the question of the step before. \
Each fact is a list of subject, relation and object.
[[## thought ##]] is yours: relying on the candidate facts alone, say briefly which of them help \
with the original query and why, whether the query can be answered by now, and, if not, what is \
still missing.
[[## fact_after_filter ##]] is yours: the helpful facts, copied exactly, as JSON of the form \
{"fact": [["subject", "relation", "object"]]}. If none helps, write {"fact": []}.
[[## question ##]] is yours: one short question that asks for the missing information, naming the \
entities already found. If the facts kept so far are enough to answer the original query, write \
<no question> instead, which ends the collection.
Write the thought, fact_after_filter and question sections, in this order and with these headers, \
and nothing else."""

_HEADER = re.compile(
    # Spaces are looked for after a bracket alone: a long run of them must not cost its square.
    r"(?:\[{1,2}[ \t]*)?#{1,3}[ \t]*(thought|fact_after_filter|question)[ \t]*#{1,3}"
    r"[ \t]*\]{0,2}[ \t]*:?",
    re.IGNORECASE,
)

_END_MARK = re.compile(r"<\s*no[ _]?question\s*>", re.IGNORECASE)
_DOUBLED = re.compile(r"([\[\]#])\1+")

Facts = Sequence[Triple]

MAX_FACTS = 500  # of one response that are looked at; each may cost a search for the closest


# ------------------------------------------------------------------------------------- integration


def integration_messages(
    question: str,
    steps: Sequence[Step],
    candidates: Sequence[Any],
    *,
    normalization: Normalization = "ascii",
    prompt_format: str = "multi_turn",
    few_shot: bool = False,
    units: compact.Units = "triple",
) -> tuple[Message, ...]:
    """The integrator's conversation before it decides on ``candidates``.

    Args:
      question: the original query x.
      steps: the rounds so far, with their candidates and decisions.
      candidates: the current candidates, best first.
      normalization: normalisation of the triples' surface.
      prompt_format: ``multi_turn`` alternates observations and decisions, so that a step extends
        the last one's prompt; ``paper`` is the single turn of Fig. 11, the history last;
        ``compact`` is ours (`methods.cirag.compact`).
      few_shot: begin with a worked example, in ``compact`` two (the paper has none).
      units: what the candidates are; sentences, with their texts, in ``compact`` alone.
    """
    shown = _examples(normalization, prompt_format, units) if few_shot else ()
    own = _conversation(question, steps, candidates, normalization, prompt_format, units)
    return (*shown, *own[bool(shown) :])


def _conversation(
    question: str,
    steps: Sequence[Step],
    candidates: Sequence[Any],
    normalization: Normalization,
    prompt_format: str,
    units: compact.Units,
) -> Sequence[Message]:
    if prompt_format == "compact":
        return compact.messages(question, steps, candidates, units)
    if prompt_format == "paper":
        return _single_turn(question, steps, candidates, normalization)
    return _turns(question, steps, candidates, normalization)


def _turns(
    question: str, steps: Sequence[Step], candidates: Facts, normalization: Normalization
) -> tuple[Message, ...]:
    messages = [Message("system", _INSTRUCTION)]
    for index, facts in enumerate([*(step.candidates for step in steps), candidates]):
        head = f"[[## Original Query ##]]\n{question}\n\n" if index == 0 else ""
        messages.append(Message("user", head, _observation(facts, normalization)))
        if index < len(steps):
            messages.append(Message("assistant", render_decision(steps[index], normalization)))
    return tuple(messages)


def _single_turn(
    question: str, steps: Sequence[Step], candidates: Facts, normalization: Normalization
) -> tuple[Message, ...]:
    """Equation 1's input. H_<t holds every round's candidates and decision, but those of this one.

    The paper puts the first candidates beside H and the current ones at its end; here each round's
    stand before their decision. Truncation may drop the history, never query and current facts.
    """
    now = (
        f"[[## Original Query ##]]\n{question}\n\n"
        f"{_observation(candidates, normalization)}\n\n[[## historical_context ##]]\n"
    )
    rounds = (
        f"{_observation(step.candidates, normalization)}\n\n{render_decision(step, normalization)}"
        for step in steps
    )
    return (
        Message("system", _INSTRUCTION),
        Message("user", now, "\n\n".join(rounds) or "none"),
    )


def _observation(candidates: Facts, normalization: Normalization) -> str:
    return f"[[## fact_before_filter ##]]\n{render_facts(candidates, normalization)}"


def prompt_digest(
    normalization: Normalization,
    prompt_format: str,
    few_shot: bool,
    units: compact.Units = "triple",
) -> str:
    """A hash of how conversations read: what a student was trained on, it must be asked."""
    steps = _EXAMPLES[units][0]
    messages = integration_messages(
        EXAMPLE_QUERY,
        steps,
        steps[0].candidates,
        normalization=normalization,
        prompt_format=prompt_format,
        few_shot=few_shot,
        units=units,
    )
    text = json.dumps([[message.role, message.text] for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _examples(
    normalization: Normalization, prompt_format: str, units: compact.Units
) -> tuple[Message, ...]:
    """Worked examples, the instruction in front; the paper's formats, which are long, show one."""
    examples = _EXAMPLES[units] if prompt_format == "compact" else _EXAMPLES[units][:1]
    made: list[Message] = []
    for *before, last in examples:
        query = before[0].query
        turns = _conversation(query, before, last.candidates, normalization, prompt_format, units)
        decision = render_decision(last, normalization, prompt_format)
        made += [*turns[bool(made) :], Message("assistant", decision)]
    return tuple(made)


def render_facts(triples: Iterable[Triple], normalization: Normalization) -> str:
    """Triples as the JSON that the model copies from; normalised text needs no escaping twice."""
    rows = ", ".join(
        "[" + ", ".join(f'"{part}"' for part in _shown(triple, normalization)) + "]"
        for triple in triples
    )
    return f'{{"fact": [{rows}]}}'


def _shown(triple: Triple, normalization: Normalization) -> tuple[str, str, str]:
    """A triple as the model sees it and copies it; what it copies is brought to the same form."""
    head, relation, tail = triple_key(triple, normalization)
    return _inert(head), _inert(relation), _inert(tail)


def _inert(text: str) -> str:
    """Text that neither ends a JSON string nor imitates a header."""
    text = _DOUBLED.sub(r"\1", text.replace("\\", " ").replace('"', "'"))
    return " ".join(text.split())


def render_decision(
    step: Step, normalization: Normalization, prompt_format: str = "multi_turn"
) -> str:
    """A round's decision y_t = (thought, core triples, next query) in the format asked for."""
    if prompt_format == "compact":
        return compact.render_decision(step)
    question = NO_QUESTION if step.next_query is None else step.next_query
    return (
        f"[[## thought ##]]\n{step.thought}\n\n"
        f"[[## fact_after_filter ##]]\n{render_facts(step.kept, normalization)}\n\n"
        f"[[## question ##]]\n{question}"
    )


def sections(prompt_format: str) -> tuple[Section, ...]:
    """Those of a response, in their order."""
    return compact.SECTIONS if prompt_format == "compact" else _SECTIONS_OF_PAPER


def stops(prompt_format: str) -> tuple[str, ...]:
    """Strings that end a response: the model has run past its own turn."""
    return compact.STOP if prompt_format == "compact" else INTEGRATION_STOP


_SECTIONS_OF_PAPER = (
    Section("[[## thought ##]]\n", ("\n", "[["), "\n\n", 64),
    Section('[[## fact_after_filter ##]]\n{"fact": [', ("\n", "]]", "##"), "]]}\n\n", 96),
    Section("[[## question ##]]\n", ("\n", "[["), "", 40),
)


def ask_for_question(
    messages: Sequence[Message], response: str, prompt_format: str = "multi_turn"
) -> tuple[Message, ...]:
    """The conversation that asks once more for a missing question section."""
    if prompt_format == "compact":
        return compact.ask_for_question(messages, response)
    reminder = (
        "Your reply has no [[## question ##]] section. Write that section only: the header, then "
        f"the next question, or {NO_QUESTION} if the facts suffice."
    )
    return (*messages, Message("assistant", response), Message("user", reminder))


def parse_decision(
    text: str,
    candidates: Sequence[Any],
    *,
    normalization: Normalization = "ascii",
    prompt_format: str = "multi_turn",
    cutoff: float = 0.8,
    truncated: bool = False,
) -> Decision:
    """Reads an integration response; never fails.

    Facts are mapped to candidates: equal after normalisation, else the candidate whose text is
    closest by difflib's ratio, if that reaches ``cutoff`` (HippoRAG's rule has no cutoff and maps
    anything); the others are dropped.

    Args:
      text: the response.
      candidates: what the model could choose from.
      normalization: normalisation for the comparison.
      prompt_format: ``compact`` names candidates by number, so that nothing is compared.
      cutoff: least similarity in [0, 1].
      truncated: whether generation ended at its token limit.

    Returns:
      The decision. Kinds of parse errors, all in `PARSE_ERRORS`: ``empty``, ``no_header``,
      ``no_facts``, ``no_question``, ``repeated_header``, ``not_a_triple`` and
      ``not_a_candidate`` (one each), ``truncated``, ``too_many_facts``, and those of `find_json`,
      prefixed by ``facts_``.
    """
    if prompt_format == "compact":
        return compact.parse_decision(text, candidates, truncated=truncated)
    parse_errors = ["truncated"] if truncated else []
    if not text.strip():
        return Decision("", (), None, False, (*parse_errors, "empty"))
    sections, repeated = _sections(text)
    parse_errors += ["repeated_header"] * repeated
    if not sections:
        parse_errors.append("no_header")
    kept: tuple[Triple, ...] = ()
    if "fact_after_filter" in sections or not sections:
        body = sections.get("fact_after_filter", text)
        kept, wrong = _facts(body, candidates, normalization, cutoff, truncated)
        parse_errors += wrong
    else:
        parse_errors.append("no_facts")
    has_question = _has_question(sections, truncated)
    if not has_question:
        parse_errors.append("no_question")
    return Decision(
        sections.get("thought", "").strip(),
        kept,
        parse_question(sections.get("question", "")),
        has_question,
        tuple(parse_errors),
    )


def parse_reply(
    text: str, *, prompt_format: str = "multi_turn", truncated: bool = False
) -> Decision:
    """Reads the reply to `ask_for_question`, which holds a question section alone; never fails.

    A reply without the header is taken where it can mean one thing only: ``<no question>``, or a
    single line that ends in a question mark. Anything else leaves ``has_question`` False: our
    specification ends the rounds there, but the model did not decide to stop.

    Returns:
      The next query. Kinds of parse errors: ``truncated``, and ``question_without_header`` or
      ``no_question``.
    """
    if prompt_format == "compact":
        return compact.parse_reply(text, truncated=truncated)
    parse_errors = ("truncated",) if truncated else ()
    sections, _ = _sections(text)
    bare = text.strip()
    asks = bare.endswith("?") and len(bare.splitlines()) == 1
    if "question" not in sections and (asks or _END_MARK.search(text)):
        parse_errors += ("question_without_header",)
        sections["question"] = text
    if not _has_question(sections, truncated):
        return Decision("", (), None, False, (*parse_errors, "no_question"))
    return Decision("", (), parse_question(sections["question"]), True, parse_errors)


def _has_question(sections: Mapping[str, str], truncated: bool) -> bool:
    """An empty section asks for nothing more; a header where the text was cut off says nothing."""
    return "question" in sections and bool(sections["question"].strip() or not truncated)


def parse_question(text: str) -> str | None:
    """The next query of a question section; None where it is empty or ``<no question>``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or _END_MARK.search(text):
        return None
    bare = normalise(lines[0], "unicode")
    return None if bare in ("", "no question", "none") else " ".join(lines[0].split())


def _sections(text: str) -> tuple[dict[str, str], int]:
    """Text of each section, the first of its name, and how many headers came again."""
    found: dict[str, str] = {}
    repeated = 0
    marks = list(_HEADER.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=False):  # no mark at all leaves the one end
        name = mark.group(1).lower()
        if name in found:
            repeated += 1
            continue
        found[name] = text[mark.end() : end]
    return found, repeated


def _facts(
    text: str, candidates: Facts, normalization: Normalization, cutoff: float, truncated: bool
) -> tuple[tuple[Triple, ...], list[str]]:
    value, problem = find_json(text, "fact", truncated=truncated)
    rows = value["fact"] if isinstance(value, dict) else None
    if value is None:  # the list alone, without the object around it
        bare, flaw = find_json(text, truncated=truncated)
        if isinstance(bare, list):
            rows, problem = bare, flaw
    parse_errors = [] if problem is None else [f"facts_{problem}"]
    if not isinstance(rows, list):
        return (), parse_errors or ["facts_wrong_shape"]
    if len(rows) == 3 and all(isinstance(part, str) for part in rows):
        rows = [rows]  # one fact without the list around it
    by_key = {_shown(triple, normalization): triple for triple in reversed(candidates)}
    kept: dict[Triple, None] = {}
    if len(rows) > MAX_FACTS:
        parse_errors.append("too_many_facts")
    for row in rows[:MAX_FACTS]:
        if not (isinstance(row, (list, tuple)) and len(row) == 3):
            parse_errors.append("not_a_triple")
            continue
        head, relation, tail = (_inert(str(part)) for part in row)
        triple = by_key.get((head, relation, tail))  # copied as it was shown
        if triple is None:
            triple = _closest(_shown(Triple(head, relation, tail), normalization), by_key, cutoff)
        if triple is None:
            parse_errors.append("not_a_candidate")
        else:
            kept[triple] = None
    return tuple(kept), parse_errors


def _closest(
    key: tuple[str, str, str], by_key: dict[tuple[str, str, str], Triple], cutoff: float
) -> Triple | None:
    exact = by_key.get(key)
    if exact is not None:
        return exact
    text = " | ".join(key)[:1000]  # difflib is quadratic: an endless repetition must not be
    texts = {" | ".join(other): triple for other, triple in by_key.items()}
    close = difflib.get_close_matches(text, texts, n=1, cutoff=cutoff)
    return texts[close[0]] if close else None


# ---------------------------------------------------------------------------------------- examples


# One fact a round, and never the first: Qwen2.5-1.5B copies the pattern. Shown "Keep: 1" it keeps
# the first of any list, shown "Keep: 4 5" it counts on to the end. Of a single example it also
# copies the words: a third of its queries began with "In which country".
def _worked(
    queries: Sequence[str], *rounds: tuple[tuple[Any, ...], tuple[Any, ...], str]
) -> tuple[Step, ...]:
    """Rounds of (candidates, kept, thought), each of which asks the next query."""
    return tuple(
        Step(query, candidates=candidates, kept=kept, thought=thought, next_query=next_query)
        for query, next_query, (candidates, kept, thought) in zip(
            queries, [*queries[1:], None], rounds, strict=True
        )
    )


_BIRTHPLACE = (EXAMPLE_QUERY, "In which country is Lindvik?")
_SCHOOL = (
    "Who founded the school that the painter of Two Boats went to?",
    "Which school did Ivo Brandt go to?",
    "Where was Ivo Brandt, the painter of Two Boats, a pupil?",
    "Who founded Harlow School?",
)

_BORN = Triple("Mira Solheim", "born in", "Lindvik")
_TOWN = Triple("Lindvik", "town in", "Norway")
_PAINTED = Triple("Two Boats", "painted by", "Ivo Brandt")
_PUPIL = Triple("Ivo Brandt", "pupil at", "Harlow School")
_FOUNDED = Triple("Harlow School", "founded by", "Edith Harlow")
_OF_TRIPLES = (
    _worked(
        _BIRTHPLACE,
        (
            (
                Triple("Mira Solheim", "profession", "cellist"),
                Triple("Solheim Prize", "awarded in", "spring"),
                Triple("Mira Solheim", "recorded", "six albums"),
                _BORN,
                Triple("Lindvik Prize", "given to", "cellists"),
            ),
            (_BORN,),
            "The fourth fact names the town of her birth, Lindvik. The country of Lindvik is still "
            "missing.",
        ),
        (
            (
                Triple("Lindvik", "known for", "fishing"),
                _TOWN,
                Triple("Norway", "borders", "Sweden"),
            ),
            (_TOWN,),
            "The second fact places Lindvik in Norway. The query can be answered now.",
        ),
    ),
    _worked(
        _SCHOOL,
        (
            (
                Triple("Harlow School", "known for", "painting"),
                Triple("Two Boats", "hangs in", "Torvik Museum"),
                _PAINTED,
            ),
            (_PAINTED,),
            "",
        ),
        (
            (
                Triple("Ivo Brandt", "has", "two sisters"),
                Triple("Anna Brandt", "went to", "Torvik College"),
            ),
            (),
            "",
        ),
        ((_PUPIL, Triple("Ivo Brandt", "painted", "Two Boats")), (_PUPIL,), ""),
        (
            (
                Triple("Harlow School", "located in", "Torvik"),
                Triple("Torvik", "founded by", "monks"),
                _FOUNDED,
            ),
            (_FOUNDED,),
            "",
        ),
    ),
)


def _page(title: str, *texts: str) -> tuple[Sentence, ...]:
    return tuple(Sentence(title, index, f"{title}: {text}") for index, text in enumerate(texts))


_PRIZE = _page("Solheim Prize", "The Solheim Prize is awarded every spring.")
_MIRA = _page(
    "Mira Solheim",
    "Mira Solheim is a cellist who has recorded six albums.",
    "She was born in Lindvik as the daughter of a shipwright.",
)
_LINDVIK = _page("Lindvik", "It lives from fishing.", "Lindvik is a town in the west of Norway.")
_BOATS = _page("Two Boats", "It hangs in Torvik Museum.", "Two Boats is by Ivo Brandt.")
_IVO = _page(
    "Ivo Brandt", "He was a pupil at Harlow School.", "He painted Two Boats.", "He has two sisters."
)
_ANNA = _page("Anna Brandt", "Anna Brandt went to Torvik College.")
_HARLOW = _page(
    "Harlow School",
    "It is known for its classes in painting.",
    "Harlow School is in Torvik.",
    "It was founded by Edith Harlow.",
)
_TORVIK = _page("Torvik", "Monks founded Torvik.")
_OF_SENTENCES = (
    _worked(_BIRTHPLACE, ((*_PRIZE, *_MIRA), _MIRA[1:], ""), (_LINDVIK, _LINDVIK[1:], "")),
    _worked(
        _SCHOOL,
        ((_HARLOW[0], *_BOATS), _BOATS[1:], ""),
        ((_IVO[2], *_ANNA), (), ""),
        (_IVO[:2], _IVO[:1], ""),
        ((_HARLOW[1], *_TORVIK, _HARLOW[2]), _HARLOW[2:], ""),
    ),
)
_EXAMPLES: Mapping[str, Sequence[Sequence[Step]]] = {
    "triple": _OF_TRIPLES,
    "sentence": _OF_SENTENCES,
}
