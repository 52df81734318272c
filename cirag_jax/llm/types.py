"""The protocol of every language-model backend: requests in, responses out, in the same order."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from cirag_jax.types import Usage

FinishReason = Literal["stop", "length", "error"]
# What only some backends give, by the fields of `Generate`; ``score`` is the request `Score`.
Ability = Literal["logprobs", "entropy", "attention", "score", "json_schema", "continue_final"]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
      role: who speaks: ``system``, ``user`` or ``assistant``.
      content: text that is never dropped (the instruction, the question).
      observation: text after ``content`` that truncation may drop (retrieved facts).
      ending: text after ``observation`` that is never dropped either.
    """

    role: str
    content: str
    observation: str = ""
    ending: str = ""

    @property
    def text(self) -> str:
        """The whole turn as the model reads it."""
        return self.content + self.observation + self.ending


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """A conversation to continue; answered by `Generated`.

    Attributes:
      messages: the turns so far, oldest first; at least one.
      role: whose model answers, a block of the config; a backend ignores it.
      max_tokens: most tokens to generate; 0: the role's own limit.
      temperature: 0 is greedy; else softmax temperature.
      top_p: nucleus of sampling, in (0, 1]; ignored when greedy.
      seed: of this request's own random stream; its samples depend on nothing else. A method
        leaves it 0: the run's seed and the request's place give one.
      stop: strings that end the text and are removed from it.
      continue_final: the last message is an assistant turn to continue; the response holds only
        what is new.
      json_schema: JSON schema that the text must satisfy.
      logprobs: return each generated token's log-probability.
      top_logprobs: also return this many most probable alternatives per token (implies logprobs).
      entropy: return the entropy (nats) of each token's distribution over the vocabulary.
      attention: above 0: return so many of the positions that each generated token looked at most,
        and the largest attention that later tokens gave it.
    """

    messages: tuple[Message, ...]
    role: str = ""
    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    continue_final: bool = False
    json_schema: Mapping[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    entropy: bool = False
    attention: int = 0

    @property
    def wants_tokens(self) -> bool:
        """Whether anything is asked about single tokens."""
        return self.logprobs or self.entropy or self.top_logprobs > 0 or self.attention > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Continuations whose probability after one conversation is asked; answered by `Scored`.

    Attributes:
      messages: the conversation that they share.
      continuations: at least one, none empty.
      role: as in `Generate`.
      continue_final: as in `Generate`.
    """

    messages: tuple[Message, ...]
    continuations: tuple[str, ...]
    role: str = ""
    continue_final: bool = False


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a response.

    Attributes:
      text: its surface form; a token that holds part of a character gives the replacement sign.
      id: vocabulary index; -1 where the server does not say.
      logprob: natural logarithm of its probability before temperature and top-p.
      top: (text, id, logprob) of the most probable alternatives, best first.
      entropy: of the whole distribution, in nats.
      offset: of its first character in the response's text.
      attended: (text, position, weight) of the tokens that were looked at most when it was written,
        most first; positions count the prompt's tokens and the generated ones from 0. Weights are
        the last layer's, averaged over its heads (DRAGIN, Su et al., 2024, section 3.2).
      received: the largest such weight that it got from the tokens after it, itself excepted.
    """

    text: str
    id: int
    logprob: float | None = None
    top: tuple[tuple[str, int, float], ...] = ()
    entropy: float | None = None
    offset: int = -1
    attended: tuple[tuple[str, int, float], ...] = ()
    received: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """What became of a `Generate`.

    Attributes:
      text: the new text, without special tokens and stop string; empty after an error.
      finish_reason: ``stop`` (end of turn, stop string or complete JSON), ``length`` (max_tokens or
        context full) or ``error``.
      usage: tokens and seconds of this request.
      error: one sentence saying why there is no text, else None. A method never sees one: its
        request fails.
      tokens: per generated token, where the request asked for anything about them.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage = Usage()
    error: str | None = None
    tokens: tuple[Token, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of given continuations, token by token; ``error`` as in `Generated`."""

    tokens: tuple[tuple[Token, ...], ...]
    usage: Usage = Usage()
    error: str | None = None

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability of each whole continuation."""
        return tuple(float(sum(t.logprob or 0.0 for t in tokens)) for tokens in self.tokens)


# Called with the responses finished so far and the tokens generated so far, all rows together.
Progress = Callable[[int, int], None]
# Called with a request's place and its response, as soon as that is complete.
Done = Callable[[int, Generated], None]
# Requests that have come since; their places go on from those before.
More = Callable[[], Sequence[Generate]]


class Backend(Protocol):
    """What methods and commands know of a language model.

    One that has ``takes_more`` (absent: False) takes a fourth argument in `generate`, a `More` that
    it calls whenever it has room for further requests, and which it answers as well.
    """

    usage: Usage

    def generate(
        self,
        requests: Sequence[Generate],
        progress: Progress | None = None,
        done: Done | None = None,
    ) -> list[Generated]:
        """One response a request, in order; a request that fails fails alone (``error``)."""
        ...

    def score(self, requests: Sequence[Score]) -> list[Scored]:
        """Log-probabilities of continuations; a backend that cannot raises `UserError`."""
        ...

    def close(self) -> None:
        """Frees what the backend holds."""
        ...


def failed(error: str, usage: Usage | None = None) -> Generated:
    """The response to a request that could not be answered."""
    return Generated("", "error", usage or Usage(), error)
