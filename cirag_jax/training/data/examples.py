"""Supervised examples: conversations as tokens, and which of them the student is to predict.

Rendered by the code that inference uses (`integration_messages`, the model's chat template), so
that what the student sees in training is what it sees when it answers. The loss is on the teacher's
decisions y_t alone (paper, equation 8): instruction, question and observations are context. The
token that ends a decision's turn is supervised too, or the student would not stop.
"""

import collections
import enum
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.distill.trajectories import UNCLEAR
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer, PromptError
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Trajectory


class Part(enum.IntEnum):
    """What a supervised token belongs to.

    ``RATIONALE`` is the thought r_t, ``QUESTION`` the next query, ``STOP`` what stands in its place
    where none is needed, ``ANSWER`` a reader's.
    """

    NONE = 0
    RATIONALE = 1
    FACTS = 2
    QUESTION = 3
    ANSWER = 4
    STOP = 5


class Example(NamedTuple):
    """One conversation.

    Attributes:
      tokens_T: int32 ids of the whole conversation, the chat template's own and turn ends included.
      weight_T: float32, above 0 where a token is supervised (where the loss predicts it): how much
        it counts.
      part_T: uint8, the `Part` of each supervised token, 0 elsewhere.
      source: id of the question (or passage) that it was made from.
    """

    tokens_T: np.ndarray
    weight_T: np.ndarray
    part_T: np.ndarray
    source: str


# Where each part of a turn's text begins: (character, part), ascending, the first at 0.
Split = Callable[[str], Sequence[tuple[int, Part]]]


class UnstableTemplateError(ValueError):
    """The template renders a turn otherwise once another follows it."""


def chat_examples(
    tokenizer: ChatTokenizer,
    turns: Sequence[Message],
    supervised: Collection[int],
    *,
    source: str = "",
    split: Split | None = None,
) -> Example:
    """A conversation up to the last supervised turn, as one example.

    The tokens before each supervised turn are those of ``tokenizer.encode_prompt`` of the turns
    before it, the supervised ones are the turn's text and its end token. ``supervised`` are places
    of the assistant's turns, at least one; ``split`` gives the parts of a turn's text, all of which
    is else `Part.FACTS`.

    Raises:
      UnstableTemplateError: several turns are supervised, and they do not extend one another; with
        one supervised turn this does not happen.
      PromptError: the template refuses the conversation.
    """
    places = sorted(supervised)
    if not places or any(turns[place].role != "assistant" for place in places):
        raise ValueError("supervised turns must be the assistant's, at least one")
    tokens_T, spans = _render(tokenizer, turns, places)
    weight_T = np.zeros(len(tokens_T), np.float32)
    part_T = np.zeros(len(tokens_T), np.uint8)
    for place, (start, end) in zip(places, spans, strict=True):
        weight_T[start:end] = 1.0
        parts = split(turns[place].text) if split else ((0, Part.FACTS),)
        for first, part in _token_parts(tokenizer, tokens_T[start:end], parts):
            part_T[start + first : end] = part
    return Example(tokens_T, weight_T, part_T, source)


def trajectory_examples(
    tokenizer: ChatTokenizer,
    trajectory: Trajectory,
    *,
    normalization: Normalization,
    prompt_format: str,
    few_shot: bool,
    max_length: int,
    units: compact.Units = "triple",
    weights: Mapping[Part, float] | None = None,
) -> tuple[list[Example], dict[str, int]]:
    """A trajectory as what the student learns from.

    ``prompt_format="paper"``: one example a step. Otherwise one example, all decisions supervised;
    where the chat template renders a decision otherwise once another follows (it drops thinking,
    say), one example a step.

    A decision that is no example (`distill.trajectories.UNCLEAR`) is context, not supervised.
    A conversation longer than ``max_length`` loses its last steps; one whose first decision does
    not fit is dropped, and so is each step of its own that does not fit. Decisions are never cut.

    Args:
      tokenizer: of the student.
      trajectory: the teacher's.
      normalization: normalisation of the triples' surface.
      prompt_format: as in `methods.cirag.prompts.integration_messages`.
      few_shot: whether the worked example stands in front.
      max_length: most tokens of an example.
      units: what the candidates are.
      weights: of the tokens of a part; 1 where nothing is said.

    Returns:
      The examples, and how often something is not trained on, or otherwise: trajectories
      ``dropped_no_steps``, examples ``dropped_too_long``, trajectories with ``cut_steps`` and how
      many these are, trajectories with ``split_turns`` (one example a step after all).
    """
    reasons: collections.Counter[str] = collections.Counter()
    steps = trajectory.steps
    while steps and steps[-1].notes.get(UNCLEAR):
        steps = steps[:-1]
    if not steps:
        return [], {"dropped_no_steps": 1}

    def turns(count: int) -> list[Message]:
        """The conversation that ends with decision ``count``."""
        messages = prompts.integration_messages(
            trajectory.question,
            steps[: count - 1],
            steps[count - 1].candidates,
            normalization=normalization,
            prompt_format=prompt_format,
            few_shot=few_shot,
            units=units,
        )
        return [
            *messages,
            Message(
                "assistant",
                prompts.render_decision(steps[count - 1], normalization, prompt_format),
            ),
        ]

    def render(count: int, decisions: int) -> Example:
        """The conversation; of its last ``decisions`` decisions the clear ones are supervised."""
        whole = turns(count)
        first = len(whole) - 2 * decisions + 1
        places = [
            first + 2 * index
            for index, step in enumerate(steps[count - decisions : count])
            if not step.notes.get(UNCLEAR)
        ]
        made = chat_examples(tokenizer, whole, places, source=trajectory.question_id, split=split)
        return weighted(made, weights or {})

    split = compact_parts if prompt_format == "compact" else decision_parts
    if prompt_format != "paper":
        try:
            found = _shortened(render(len(steps), len(steps)), max_length, reasons)
            return ([] if found is None else [found]), dict(reasons)
        except UnstableTemplateError:
            reasons["split_turns"] += 1
    clear = [index for index, step in enumerate(steps) if not step.notes.get(UNCLEAR)]
    examples = [render(index + 1, 1) for index in clear]
    kept = [found for found in examples if len(found.tokens_T) <= max_length]
    reasons["dropped_too_long"] += len(examples) - len(kept)
    return kept, {name: count for name, count in reasons.items() if count}


def weighted(example: Example, weights: Mapping[Part, float]) -> Example:
    """The example with tokens of some parts counting more, or less."""
    weight_T = example.weight_T.copy()
    for part, weight in weights.items():
        weight_T[example.part_T == part] = weight
    return example._replace(weight_T=weight_T)


def _shortened(
    example: Example, max_length: int, reasons: collections.Counter[str]
) -> Example | None:
    """The example up to the last decision that fits; None where the first does not."""
    if len(example.tokens_T) <= max_length:
        return example
    supervised = example.weight_T > 0
    ends = np.flatnonzero(supervised & ~np.append(supervised[1:], False)) + 1
    fitting = ends[ends <= max_length]
    if not len(fitting):
        reasons["dropped_too_long"] += 1
        return None
    reasons["cut_trajectories"] += 1
    reasons["cut_steps"] += len(ends) - len(fitting)
    end = int(fitting[-1])
    return Example(
        example.tokens_T[:end], example.weight_T[:end], example.part_T[:end], example.source
    )


def decision_parts(text: str) -> list[tuple[int, Part]]:
    """Where the sections of a decision begin, headers included (see `prompts.render_decision`).

    Looked for from the end: facts and question are of one line each, so that a thought which
    imitates their headers is not taken for them.
    """
    _, facts, question = (f"\n\n[[## {name} ##]]\n" for name in prompts.HEADERS)
    at_question = text.rfind(question)
    at_facts = text.rfind(facts, 0, max(at_question, 0))
    if at_facts < 0:
        raise ValueError("the text is not a rendered decision")
    ends = text[at_question + len(question) :].strip() == prompts.NO_QUESTION
    last = Part.STOP if ends else Part.QUESTION
    return [(0, Part.RATIONALE), (at_facts + 2, Part.FACTS), (at_question + 2, last)]


def compact_parts(text: str) -> list[tuple[int, Part]]:
    """Where the lines of a compact decision begin."""
    start = text.index("\nNext:") + 1
    last = Part.STOP if text[start:] == compact.LAST_LINE else Part.QUESTION
    return [(0, Part.FACTS), (start, last)]


# --------------------------------------------------------------------------------------- rendering


def _render(
    tokenizer: ChatTokenizer, turns: Sequence[Message], places: Sequence[int]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Tokens up to the end of the last place, and [start, end) of each, its end token included.

    An end of turn that stands in a text is encoded as text (see `ChatTokenizer`): the first one
    after the start is the template's own.
    """
    prompts_ = [tokenizer.encode_prompt(turns[:place]) for place in places]
    whole = _closed(tokenizer, turns[: places[-1] + 1])
    spans = []
    for place, prompt in zip(places, prompts_, strict=True):
        start = len(prompt)
        ends = np.flatnonzero(np.isin(whole[start:], list(tokenizer.eos_ids)))
        end = start + int(ends[0]) if len(ends) else start
        extends = len(ends) and np.array_equal(whole[:start], prompt)
        # Some tokenizers compose characters (NFC) before anything else.
        found, text = (
            unicodedata.normalize("NFC", text)
            for text in (tokenizer.decode(whole[start:end], True), turns[place].text)
        )
        if not extends or found != text:
            break
        spans.append((start, end + 1))
    if len(spans) == len(places):
        return whole[: spans[-1][1]], spans
    if len(places) > 1:
        raise UnstableTemplateError("the chat template rewrites earlier turns")
    # A template that adds something of its own to the turn, or none at all.
    (prompt,), text = prompts_, turns[places[0]].text
    tokens = np.concatenate([prompt, tokenizer.encode(text), [_end_of_turn(tokenizer)]])
    return tokens.astype(np.int32), [(len(prompt), len(tokens))]


def _closed(tokenizer: ChatTokenizer, turns: Sequence[Message]) -> np.ndarray:
    """Tokens of a conversation that goes on after its last turn; empty where it cannot."""
    try:
        return tokenizer.encode_prompt(turns)
    except PromptError:
        return np.zeros(0, np.int32)


def _end_of_turn(tokenizer: ChatTokenizer) -> int:
    own = tokenizer.tokenizer.eos_token_id
    if own is None and not tokenizer.eos_ids:
        raise UserError("the student's tokenizer has no token that ends a turn")
    return int(min(tokenizer.eos_ids) if own is None else own)


def _token_parts(
    tokenizer: ChatTokenizer, ids: np.ndarray, parts: Sequence[tuple[int, Part]]
) -> list[tuple[int, Part]]:
    """The token in which each part's first character is, found by bisection of the decoded text."""
    found = []
    for character, part in parts:
        low, high = 0, len(ids) - 1  # the end token has no text
        while low < high:
            middle = (low + high) // 2
            # Half a character decodes to replacement signs, more of them than it will be.
            text = tokenizer.decode(ids[: middle + 1], True).rstrip("\ufffd")
            if len(text) > character:
                high = middle
            else:
                low = middle + 1
        found.append((low, part))
    return found
