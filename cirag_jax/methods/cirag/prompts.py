"""The prompts of CIRAG's integration (Figure 11), and the parsers of the responses.

Headers and formats are the paper's; the wording is ours. Responses are untrusted: they are parsed,
never evaluated, and each kind of malformed output is counted under its own name.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact
from cirag_jax.methods.cirag.decisions import Decision, Section
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import conversation_hash
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.triples.normalization import Normalization, normalize, triple_key
from cirag_jax.types import Sentence, Step, Triple

PromptFormat = Literal["multi_turn", "paper", "compact"]
NO_QUESTION = "<no question>"
HEADERS = ("thought", "fact_after_filter", "question")
# These begin the next observation, which a model writes if it does not end its turn.
INTEGRATION_STOP = ("[[## fact_before_filter", "[[## historical_context", "[[## Original Query")

PROMPT = Prompt(
    "integrator",
    labels={
        "query": "[[## Original Query ##]]",
        "candidates": "[[## fact_before_filter ##]]",
        "history": "[[## historical_context ##]]",
    },
    written={
        "thought": "[[## thought ##]]",
        "facts": "[[## fact_after_filter ##]]",
        "question": "[[## question ##]]",
    },
    marks={"end": NO_QUESTION},
    is_inert=True,
)
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

MAX_FACTS = 500  # Further facts of a response are ignored, because matching takes time.


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
    """Returns the conversation in which the integrator next decides on ``candidates``.

    The format ``multi_turn`` alternates observations and decisions, so each prompt extends the
    prompt of the previous round. ``paper`` is the single turn of Figure 11, with the history last.
    ``compact`` is our format (`methods.cirag.compact`), the only format that supports sentences.
    With ``few_shot``, the conversation begins with a worked example (two in ``compact``); the paper
    has none.
    """
    examples = _example_turns(normalization, prompt_format, units) if few_shot else ()
    turns = _conversation(question, steps, candidates, normalization, prompt_format, units)
    # The examples begin with the instruction.
    return prompt_of(prompt_format).conversation(turns[0], examples[1:], *turns[1:])


def prompt_of(prompt_format: str) -> Prompt:
    """Returns the prompt of a format, whose field names a prompt file may replace."""
    return compact.PROMPT if prompt_format == "compact" else PROMPT


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
    shown = (*(step.candidates for step in steps), candidates)
    return compact.alternating(
        _INSTRUCTION,
        f"[[## Original Query ##]]\n{question}\n\n",
        [_observation(facts, normalization) for facts in shown],
        (render_decision(step, normalization) for step in steps),
    )


def _single_turn(
    question: str, steps: Sequence[Step], candidates: Facts, normalization: Normalization
) -> tuple[Message, ...]:
    """Returns the input of Eq. 1: the current candidates, then the history H_<t.

    In the paper, the first round's candidates are outside H, and the current candidates are at the
    end of H. Here, the candidates of each round precede its decision. Truncation can only drop the
    history.
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
    """Returns a hash of the rendered prompts, which must be the same as in a student's training."""
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
    """Returns the instruction and the worked examples: two in ``compact``, otherwise one."""
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
    """Returns the parts of a triple in the form that prompts show and the model copies."""
    head, relation, tail = triple_key(triple, normalization)
    return _sanitized(head), _sanitized(relation), _sanitized(tail)


def _sanitized(text: str) -> str:
    """Returns the text without characters that would end a JSON string or imitate a header."""
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
    """Returns the strings that begin the next turn, at which generation stops."""
    texts = compact.STOP if prompt_format == "compact" else INTEGRATION_STOP
    return prompt_of(prompt_format).stops(texts)


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
    return (*messages, Message("assistant", response), Message("user", PROMPT.write(reminder)))


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

    Each written fact is mapped to the candidate that is equal after normalization. If no candidate
    is equal, the fact is mapped to the most similar candidate by difflib's ratio, or dropped if the
    ratio is below ``cutoff``. HippoRAG has the same rule without a cutoff. In ``compact``,
    candidates are kept by number.

    `decisions.PARSE_ERRORS` lists the kinds of parse errors; errors of `find_json` begin with
    ``facts_``. ``not_a_triple`` and ``not_a_candidate`` are reported once per fact.
    """
    if prompt_format == "compact":
        return compact.parse_decision(text, candidates, truncated=truncated)
    parse_errors = ["truncated"] if truncated else []
    text = PROMPT.read(text)
    if not text.strip():
        return Decision("", (), None, False, (*parse_errors, "empty"))
    sections, num_repeated = _split_sections(text)
    parse_errors += ["repeated_header"] * num_repeated
    if not sections:
        parse_errors.append("no_header")
    kept: tuple[Triple, ...] = ()
    if "fact_after_filter" in sections or not sections:
        body = sections.get("fact_after_filter", text)
        kept, fact_errors = parse_facts(body, candidates, normalization, cutoff, truncated)
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
    in a question mark (parse error ``question_without_header``). For any other reply without the
    section, ``has_question`` is False; the rounds then end, although the model did not choose to
    stop.
    """
    if prompt_format == "compact":
        return compact.parse_reply(text, truncated=truncated)
    parse_errors = ("truncated",) if truncated else ()
    text = PROMPT.read(text)
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
    bare = normalize(lines[0], "unicode")
    return None if bare in ("", "no question", "none") else one_line(lines[0])


def _split_sections(text: str) -> tuple[dict[str, str], int]:
    """Returns the text of each section by name, and the number of repeated headers."""
    sections: dict[str, str] = {}
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    for header, end in zip(headers, ends, strict=False):  # ``ends`` has an item without a header.
        sections.setdefault(header.group(1).lower(), text[header.end() : end])
    return sections, len(headers) - len(sections)


def parse_facts(
    text: str, candidates: Facts, normalization: Normalization, cutoff: float, truncated: bool
) -> tuple[tuple[Triple, ...], list[str]]:
    """Returns the candidates that a JSON list of facts names, and the kinds of malformed output.

    See `parse_decision` for the arguments.
    """
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
    matches = difflib.get_close_matches(text, texts, n=1, cutoff=cutoff)
    return texts[matches[0]] if matches else None


def _example(text: str) -> tuple[Step, ...]:
    """Parses a worked example.

    Each round has a line with the query, lines with candidates ("+" if kept, otherwise "-"), and
    possibly a last line with the thought ("=").
    """
    rounds = [part.splitlines() for part in text.strip().split("\n\n")]
    next_queries = [*(lines[0] for lines in rounds[1:]), None]
    steps = []
    for (query, *lines), next_query in zip(rounds, next_queries, strict=True):
        thought = "".join(line[2:] for line in lines if line[0] == "=")
        facts = [_example_fact(line[2:], i) for i, line in enumerate(lines) if line[0] != "="]
        kept = tuple(fact for fact, line in zip(facts, lines, strict=False) if line[0] == "+")
        steps.append(Step(query, (), tuple(facts), (), thought, kept, next_query))
    return tuple(steps)


def _example_fact(text: str, index: int) -> Triple | Sentence:
    if " | " not in text:
        return Sentence("", index, text)
    head, relation, tail = text.split(" | ")
    return Triple(head, relation, tail)


# The examples keep at most one fact per round, because Qwen2.5-1.5B copies the pattern: after
# "Keep: 1" it keeps the first fact of any list, and after "Keep: 4 5" it counts to the end. With a
# single example it also copies words: a third of its queries began with "In which country".
_EXAMPLES: Mapping[str, Sequence[Sequence[Step]]] = {
    "triple": (
        _example(f"""
{EXAMPLE_QUERY}
- Mira Solheim | profession | cellist
- Solheim Prize | awarded in | spring
- Mira Solheim | recorded | six albums
+ Mira Solheim | born in | Lindvik
- Lindvik Prize | given to | cellists
= The fourth fact names the town of her birth, Lindvik. The country of Lindvik is still missing.

In which country is Lindvik?
- Lindvik | known for | fishing
+ Lindvik | town in | Norway
- Norway | borders | Sweden
= The second fact places Lindvik in Norway. The query can be answered now.
"""),
        _example("""
Who founded the school that the painter of Two Boats went to?
- Harlow School | known for | painting
- Two Boats | hangs in | Torvik Museum
+ Two Boats | painted by | Ivo Brandt

Which school did Ivo Brandt go to?
- Ivo Brandt | has | two sisters
- Anna Brandt | went to | Torvik College

Where was Ivo Brandt, the painter of Two Boats, a pupil?
+ Ivo Brandt | pupil at | Harlow School
- Ivo Brandt | painted | Two Boats

Who founded Harlow School?
- Harlow School | located in | Torvik
- Torvik | founded by | monks
+ Harlow School | founded by | Edith Harlow
"""),
    ),
    "sentence": (
        _example(f"""
{EXAMPLE_QUERY}
- Solheim Prize: The Solheim Prize is awarded every spring.
- Mira Solheim: Mira Solheim is a cellist who has recorded six albums.
+ Mira Solheim: She was born in Lindvik as the daughter of a shipwright.

In which country is Lindvik?
- Lindvik: It lives from fishing.
+ Lindvik: Lindvik is a town in the west of Norway.
"""),
        _example("""
Who founded the school that the painter of Two Boats went to?
- Harlow School: It is known for its classes in painting.
- Two Boats: It hangs in Torvik Museum.
+ Two Boats: Two Boats is by Ivo Brandt.

Which school did Ivo Brandt go to?
- Ivo Brandt: He has two sisters.
- Anna Brandt: Anna Brandt went to Torvik College.

Where was Ivo Brandt, the painter of Two Boats, a pupil?
+ Ivo Brandt: He was a pupil at Harlow School.
- Ivo Brandt: He painted Two Boats.

Who founded Harlow School?
- Harlow School: Harlow School is in Torvik.
- Torvik: Monks founded Torvik.
+ Harlow School: It was founded by Edith Harlow.
"""),
    ),
}
