"""The prompts of CIRAG's integration (Figure 11), and the parsers of the responses.

Headers and formats are the paper's; the sentences are ours. Responses are untrusted: they are
parsed, never evaluated, and every kind of malformed output has a name under which it is counted.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact
from cirag_jax.methods.cirag.decisions import Decision, Section
from cirag_jax.methods.common.prompt_parts import conversation_hash, one_line
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.triples.normalization import Normalization, normalise, triple_key
from cirag_jax.types import Sentence, Step, Triple

PromptFormat = Literal["multi_turn", "paper", "compact"]
NO_QUESTION = "<no question>"
HEADERS = ("thought", "fact_after_filter", "question")
# A model that does not end its turn writes the next observation.
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
    # Spaces may only follow a bracket; otherwise a long run of them would take quadratic time.
    r"(?:\[{1,2}[ \t]*)?#{1,3}[ \t]*(thought|fact_after_filter|question)[ \t]*#{1,3}"
    r"[ \t]*\]{0,2}[ \t]*:?",
    re.IGNORECASE,
)

_END_MARK = re.compile(r"<\s*no[ _]?question\s*>", re.IGNORECASE)
_DOUBLED = re.compile(r"([\[\]#])\1+")

Facts = Sequence[Triple]

MAX_FACTS = 500  # Of one response; each may require a search for the most similar candidate.


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
    """Returns the integrator's conversation before it decides on ``candidates``.

    Args:
      question: the original query x.
      steps: the finished rounds, with their candidates and decisions.
      candidates: the current candidates, best first.
      normalization: normal form in which triples are shown.
      prompt_format: ``multi_turn`` alternates observations and decisions, so that each prompt
        extends that of the round before; ``paper`` is the single turn of Figure 11, with the
        history last; ``compact`` is ours (`methods.cirag.compact`).
      few_shot: begin with a worked example, or two in ``compact`` (the paper has none).
      units: units of the candidates; sentences need their texts and ``compact``.
    """
    examples = _example_turns(normalization, prompt_format, units) if few_shot else ()
    turns = _conversation(question, steps, candidates, normalization, prompt_format, units)
    return (*examples, *turns[bool(examples) :])


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
    """Returns the input of Eq. 1: the current candidates, then the history H_<t.

    The paper gives the first candidates apart from H and the current ones at its end; here the
    candidates of each round precede its decision. Truncation can only drop the history.
    """
    current = (
        f"[[## Original Query ##]]\n{question}\n\n"
        f"{_observation(candidates, normalization)}\n\n[[## historical_context ##]]\n"
    )
    rounds = (
        f"{_observation(step.candidates, normalization)}\n\n{render_decision(step, normalization)}"
        for step in steps
    )
    return (
        Message("system", _INSTRUCTION),
        Message("user", current, "\n\n".join(rounds) or "none"),
    )


def _observation(candidates: Facts, normalization: Normalization) -> str:
    return f"[[## fact_before_filter ##]]\n{render_facts(candidates, normalization)}"


def prompt_digest(
    normalization: Normalization,
    prompt_format: str,
    few_shot: bool,
    units: compact.Units = "triple",
) -> str:
    """Returns a hash of the rendered prompts, which must be those that a student was trained on."""
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
    return conversation_hash(messages)


def _example_turns(
    normalization: Normalization, prompt_format: str, units: compact.Units
) -> tuple[Message, ...]:
    """The instruction and the worked examples: two in ``compact``, one in the long formats."""
    examples = _EXAMPLES[units] if prompt_format == "compact" else _EXAMPLES[units][:1]
    messages: list[Message] = []
    for *before, last in examples:
        query = before[0].query
        turns = _conversation(query, before, last.candidates, normalization, prompt_format, units)
        decision = render_decision(last, normalization, prompt_format)
        messages += [*turns[bool(messages) :], Message("assistant", decision)]
    return tuple(messages)


def render_facts(triples: Iterable[Triple], normalization: Normalization) -> str:
    """Returns triples as the JSON that the model copies from."""
    rows = ", ".join(
        "[" + ", ".join(f'"{part}"' for part in _shown_parts(triple, normalization)) + "]"
        for triple in triples
    )
    return f'{{"fact": [{rows}]}}'


def _shown_parts(triple: Triple, normalization: Normalization) -> tuple[str, str, str]:
    """The parts of a triple as the model sees and copies them."""
    head, relation, tail = triple_key(triple, normalization)
    return _sanitized(head), _sanitized(relation), _sanitized(tail)


def _sanitized(text: str) -> str:
    """The text without characters that would end a JSON string or imitate a header."""
    return one_line(_DOUBLED.sub(r"\1", text.replace("\\", " ").replace('"', "'")))


def render_decision(
    step: Step, normalization: Normalization, prompt_format: str = "multi_turn"
) -> str:
    """Returns the decision of a round, y_t = (r_t, T~_t, a_{t+1}), in a prompt format."""
    if prompt_format == "compact":
        return compact.render_decision(step)
    question = NO_QUESTION if step.next_query is None else step.next_query
    return (
        f"[[## thought ##]]\n{step.thought}\n\n"
        f"[[## fact_after_filter ##]]\n{render_facts(step.kept, normalization)}\n\n"
        f"[[## question ##]]\n{question}"
    )


def sections(prompt_format: str) -> tuple[Section, ...]:
    """Returns the sections of a response in a prompt format."""
    return compact.SECTIONS if prompt_format == "compact" else _PAPER_SECTIONS


def stops(prompt_format: str) -> tuple[str, ...]:
    """Returns strings at which generation stops, because they begin the next turn."""
    return compact.STOP if prompt_format == "compact" else INTEGRATION_STOP


_PAPER_SECTIONS = (
    Section("[[## thought ##]]\n", ("\n", "[["), "\n\n", 64),
    Section('[[## fact_after_filter ##]]\n{"fact": [', ("\n", "]]", "##"), "]]}\n\n", 96),
    Section("[[## question ##]]\n", ("\n", "[["), "", 40),
)


def ask_for_question(
    messages: Sequence[Message], response: str, prompt_format: str = "multi_turn"
) -> tuple[Message, ...]:
    """Returns the conversation that requests a missing question section."""
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
    """Parses an integration response; never fails.

    Facts are mapped to candidates. A fact that equals no candidate after normalisation is mapped to
    the most similar one by difflib's ratio, or dropped if the ratio is below ``cutoff``. (HippoRAG
    has the same rule without a cutoff.)

    Args:
      text: the response.
      candidates: the candidates that the model was shown.
      normalization: normal form for the comparison.
      prompt_format: in ``compact``, candidates are kept by number and nothing is compared.
      cutoff: minimum similarity in [0, 1].
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
    sections, num_repeated = _split_sections(text)
    parse_errors += ["repeated_header"] * num_repeated
    if not sections:
        parse_errors.append("no_header")
    kept: tuple[Triple, ...] = ()
    if "fact_after_filter" in sections or not sections:
        body = sections.get("fact_after_filter", text)
        kept, fact_errors = _facts(body, candidates, normalization, cutoff, truncated)
        parse_errors += fact_errors
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
    """Parses the reply to `ask_for_question`, which has only a question section; never fails.

    The header may be missing if the reply contains ``<no question>`` or is a single line that ends
    in a question mark. Any other reply leaves ``has_question`` False; the rounds then end, although
    the model did not decide to stop.

    Returns:
      A decision with only the next query. Kinds of parse errors: ``truncated``, and
      ``question_without_header`` or ``no_question``.
    """
    if prompt_format == "compact":
        return compact.parse_reply(text, truncated=truncated)
    parse_errors = ("truncated",) if truncated else ()
    sections, _ = _split_sections(text)
    bare = text.strip()
    asks = bare.endswith("?") and len(bare.splitlines()) == 1
    if "question" not in sections and (asks or _END_MARK.search(text)):
        parse_errors += ("question_without_header",)
        sections["question"] = text
    if not _has_question(sections, truncated):
        return Decision("", (), None, False, (*parse_errors, "no_question"))
    return Decision("", (), parse_question(sections["question"]), True, parse_errors)


def _has_question(sections: Mapping[str, str], truncated: bool) -> bool:
    # An empty section means "no question" unless the text was cut off there.
    return "question" in sections and bool(sections["question"].strip() or not truncated)


def parse_question(text: str) -> str | None:
    """Returns the query of a question section, or None if it is empty or ``<no question>``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or _END_MARK.search(text):
        return None
    bare = normalise(lines[0], "unicode")
    return None if bare in ("", "no question", "none") else one_line(lines[0])


def _split_sections(text: str) -> tuple[dict[str, str], int]:
    """The text of each section, by its name, and the number of repeated headers."""
    sections: dict[str, str] = {}
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    for header, end in zip(headers, ends, strict=False):  # Without a header there is still one end.
        sections.setdefault(header.group(1).lower(), text[header.end() : end])
    return sections, len(headers) - len(sections)


def _facts(
    text: str, candidates: Facts, normalization: Normalization, cutoff: float, truncated: bool
) -> tuple[tuple[Triple, ...], list[str]]:
    value, problem = find_json(text, "fact", truncated=truncated)
    rows = value["fact"] if isinstance(value, dict) else None
    if value is None:  # The list may lack the object around it.
        bare_list, list_problem = find_json(text, truncated=truncated)
        if isinstance(bare_list, list):
            rows, problem = bare_list, list_problem
    parse_errors = [] if problem is None else [f"facts_{problem}"]
    if not isinstance(rows, list):
        return (), parse_errors or ["facts_wrong_shape"]
    if len(rows) == 3 and all(isinstance(part, str) for part in rows):
        rows = [rows]  # A single fact may lack the list around it.
    by_key = {_shown_parts(triple, normalization): triple for triple in reversed(candidates)}
    kept: dict[Triple, None] = {}
    if len(rows) > MAX_FACTS:
        parse_errors.append("too_many_facts")
    for row in rows[:MAX_FACTS]:
        if not (isinstance(row, (list, tuple)) and len(row) == 3):
            parse_errors.append("not_a_triple")
            continue
        head, relation, tail = (_sanitized(str(part)) for part in row)
        triple = by_key.get((head, relation, tail))  # Copied exactly.
        if triple is None:
            key = _shown_parts(Triple(head, relation, tail), normalization)
            triple = _most_similar(key, by_key, cutoff)
        if triple is None:
            parse_errors.append("not_a_candidate")
        else:
            kept[triple] = None
    return tuple(kept), parse_errors


def _most_similar(
    key: tuple[str, str, str], by_key: dict[tuple[str, str, str], Triple], cutoff: float
) -> Triple | None:
    if key in by_key:
        return by_key[key]
    text = " | ".join(key)[:1000]  # difflib takes quadratic time.
    texts = {" | ".join(other): triple for other, triple in by_key.items()}
    close = difflib.get_close_matches(text, texts, n=1, cutoff=cutoff)
    return texts[close[0]] if close else None


# ---------------------------------------------------------------------------------------- examples


# The examples keep one fact per round and never the first one, because Qwen2.5-1.5B copies the
# pattern: after "Keep: 1" it keeps the first of any list, and after "Keep: 4 5" it counts to the
# end. With a single example it also copies words: a third of its queries began with "In which
# country".
def _example(
    queries: Sequence[str], *rounds: tuple[tuple[Any, ...], tuple[Any, ...], str]
) -> tuple[Step, ...]:
    """The steps of an example, from rounds of (candidates, kept, thought)."""
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
_TRIPLE_EXAMPLES = (
    _example(
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
    _example(
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
_SENTENCE_EXAMPLES = (
    _example(_BIRTHPLACE, ((*_PRIZE, *_MIRA), _MIRA[1:], ""), (_LINDVIK, _LINDVIK[1:], "")),
    _example(
        _SCHOOL,
        ((_HARLOW[0], *_BOATS), _BOATS[1:], ""),
        ((_IVO[2], *_ANNA), (), ""),
        (_IVO[:2], _IVO[:1], ""),
        ((_HARLOW[1], *_TORVIK, _HARLOW[2]), _HARLOW[2:], ""),
    ),
)
_EXAMPLES: Mapping[str, Sequence[Sequence[Step]]] = {
    "triple": _TRIPLE_EXAMPLES,
    "sentence": _SENTENCE_EXAMPLES,
}
