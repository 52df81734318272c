"""Search-R1's inference loop: one model thinks, searches and answers in tags (Jin et al., 2025)."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import best_scores, passage_line
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.reading import SearchConfig, search
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, RequestError
from cirag_jax.types import Attempt, Count, Passage, PositiveInt, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class SearchR1Config(SearchConfig):
    """Search-R1's settings, with the values of its paper and code.

    Attributes:
      max_turns: turns in which the model may search; in one more turn it can only answer.
      num_passages: passages retrieved per search.
      max_chars: characters of passages shown per search; 0 is no limit. The code shows 500 tokens.
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking.
      prefill_answer: begin the last turn with ``<answer>`` (ours, for models that were not trained
        on the tags).
    """

    max_turns: PositiveInt = 4
    num_passages: PositiveInt = 3
    max_chars: Count = 2000
    rerank_from: Count = 0
    prefill_answer: bool = False

    @property
    def needs(self) -> Needs:
        """Needs a model that can continue its own turn, and a ranker if passages are reranked."""
        return Needs(
            roles=("agent",),
            abilities={"agent": ("continue_final",)},
            rankers=("passages",) if self.rerank_from else (),
        )


def search_r1(question: Question, config: SearchR1Config) -> Program[Prediction]:
    """Answers a question: the model writes its turn, and searches interrupt it."""
    prompt = question_message(question.question)
    turn = Message("assistant", "")  # The model's turn so far, with the results of its searches.
    steps, errors = list[Step[str]](), collections.Counter[str]()
    found: dict[str, Passage] = {}
    scores = list[tuple[str, float]]()
    attempt = Attempt("passage", (), "", "", False)
    for number in range(config.max_turns + 1):
        is_last = number == config.max_turns
        opening = OPENING if is_last and config.prefill_answer else ""
        turn = dataclasses.replace(turn, ending=turn.ending + opening)
        try:
            response: Generated = yield Generate(
                (prompt, turn) if turn.text else (prompt,),
                "agent",
                stop=STOP,
                continue_final=bool(turn.text),
            )
        except RequestError as error:
            attempt = dataclasses.replace(attempt, error=str(error))
            break
        action = parse_action(opening + full_text(response), response.finish_reason == "length")
        if action.problem is not None:
            errors[action.problem] += 1
        attempt = dataclasses.replace(attempt, response=action.text)
        if action.kind == "answer" and (action.problem is None or is_last):
            attempt = dataclasses.replace(
                attempt, answer=action.content, sufficient=bool(action.content)
            )
            break
        written = f"{turn.text}{action.text}"
        if is_last:
            continue
        if action.kind is None or action.problem is not None:
            turn = Message("assistant", f"{written}{CORRECTION}")
            continue
        retrieved = yield from search(action.content, config)
        scores += zip(retrieved.ids, retrieved.scores, strict=True)
        found |= {passage.id: passage for passage in retrieved.passages}
        steps.append(Step(action.content, retrieved.ids, response=action.text))
        shown = information(retrieved.passages, config.max_chars)
        turn = Message("assistant", f"{written}\n\n<information>", shown, "</information>\n\n")
    if not attempt.sufficient and attempt.error is None:
        errors["no_answer"] += 1
    best = best_scores(scores)
    evidence = tuple(passage_line(passage) for passage in found.values())
    following = [*(step.query for step in steps), None][1:]
    return Prediction(
        attempt.answer,
        "passage" if attempt.sufficient and found else "default",
        tuple(sorted(best, key=lambda name: -best[name])),
        steps=tuple(
            dataclasses.replace(step, next_query=query)
            for step, query in zip(steps, following, strict=True)
        ),
        attempts=(dataclasses.replace(attempt, evidence=evidence),),
        parse_errors=dict(errors),
    )


METHOD = Method(search_r1, SearchR1Config, lambda _: question_message(""))


# ------------------------------------------------------------------------- prompts and the parser
# The tags, the form of a document, and the blank lines are those of the trained checkpoints. The
# sentences are ours.

PROMPT = Prompt("agent")
OPENING = "<answer>"
STOP = ("</search>", "</answer>")
_INSTRUCTION = (
    "Find the answer to the question below. Whenever you learn something new, first think about it "
    "between <think> and </think>. If you still miss a fact, search for it: write the query as "
    "<search> query </search>, and the best results will follow between <information> and "
    "</information>. You may search several times. As soon as you know enough, write the answer "
    "alone, without explanation, between <answer> and </answer>, as in <answer> Oslo </answer>. "
    "Question: "
)
CORRECTION = (
    "\nThat was neither a search nor an answer. To search, I have to write the query between "
    "<search> and </search>. To answer, I have to write the answer between <answer> and </answer>. "
    "I try again.\n"
)
_TAG = re.compile(r"<\s{0,3}(/?)\s{0,3}(search|answer)\s{0,3}>", re.IGNORECASE)
# Passages may not contain tags, which would end their block or imitate an action.
_ANY_TAG = re.compile(
    r"<(\s{0,3}/?\s{0,3}(?:think|search|information|answer)\s{0,3})>", re.IGNORECASE
)


def question_message(question: str) -> Message:
    """Returns the user's turn; as in training, the question ends with a question mark."""
    question = one_line(question)
    asked = f"{question.removesuffix('?')}?\n"
    return PROMPT.conversation(Message("user", _INSTRUCTION), (), appended=asked)[0]


def information(passages: Sequence[Passage], max_chars: int) -> str:
    """Returns passages as the content of an ``<information>`` block, with disarmed tags."""
    text = "\n".join(
        f"Doc {number}(Title: {one_line(passage.title)}) {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
    return _ANY_TAG.sub(r"(\1)", text)[: max_chars or None].strip()


def full_text(response: Generated) -> str:
    """Returns a response with its thoughts, which the runtime separates from the text."""
    if response.thoughts is None:
        return response.text
    is_marked = "<think" in response.thoughts or "</think" in response.thoughts
    thoughts = response.thoughts if is_marked else f"<think>{response.thoughts}</think>"
    return f"{thoughts}\n{response.text}" if response.text else thoughts


class Action(NamedTuple):
    """The action of the model in a turn.

    Attributes:
      kind: ``search``, ``answer``, or None if there is neither.
      content: the query or the answer.
      text: the model's text up to the end of the action.
      problem: the kind of malformed output, or None.
    """

    kind: Literal["search", "answer"] | None
    content: str
    text: str
    problem: str | None


def parse_action(text: str, truncated: bool = False) -> Action:
    """Returns the first action in a turn whose tag is closed; never fails.

    Generation stops at a closing tag, which is then missing from ``text``: if no tag is closed, the
    last open tag is the action. With ``truncated``, generation stopped at its token limit, so an
    open tag is incomplete.
    """
    tags = list(_TAG.finditer(text))
    last_close = {tag[2].lower(): tag.start() for tag in tags if tag[1]}
    openings = [tag for tag in tags if not tag[1]]
    opening = next((o for o in openings if o.start() < last_close.get(o[2].lower(), -1)), None)
    if opening is not None:
        closing = next(
            tag
            for tag in tags
            if tag[1] and tag[2].lower() == opening[2].lower() and tag.start() > opening.start()
        )
        content, written, is_cut = text[opening.end() : closing.start()], text[: closing.end()], 0
    elif openings:
        opening = openings[-1]
        content, is_cut = text[opening.end() :], truncated
        written = text if is_cut else f"{text.rstrip()} </{opening[2].lower()}>"
    else:
        return Action(None, "", text, "truncated" if truncated else "no_action")
    kind: Literal["search", "answer"] = "search" if opening[2].lower() == "search" else "answer"
    content = one_line(content)
    problem = "truncated" if is_cut else None if content else f"{kind}_empty"
    return Action(kind, content, written, problem)
