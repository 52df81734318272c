"""The protocol of every language-model backend: requests in, responses out, in the same order."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from cirag_jax.types import Usage

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
      role: who speaks.
      content: text that is never dropped (the instruction, the question).
      observation: text after ``content`` that truncation may drop (retrieved facts).
      ending: text after ``observation`` that is never dropped either.
    """

    role: Role
    content: str
    observation: str = ""
    ending: str = ""

    @property
    def text(self) -> str:
        """The whole turn as the model reads it."""
        return self.content + self.observation + self.ending


@dataclasses.dataclass(frozen=True)
class Request:
    """One conversation to continue.

    Attributes:
      id: name of the request, repeated in its response.
      messages: the turns so far, oldest first; at least one.
      max_tokens: most tokens to generate, at least 1.
      temperature: 0 is greedy; else softmax temperature.
      top_p: nucleus of sampling, in (0, 1]; ignored when greedy.
      seed: of this request's own random stream; its samples depend on nothing else.
      stop: strings that end the text and are cut from it.
      continue_final: the last message is an assistant turn to go on with; the response holds only
        what is new.
      json_schema: JSON schema that the text must satisfy.
      logprobs: return each generated token's log-probability.
      top_logprobs: also return this many most probable alternatives per token (implies logprobs).
      entropy: return the entropy (nats) of each token's distribution over the vocabulary.
      attention: return the last layer's attention of each generated token.
    """

    id: str
    messages: tuple[Message, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    continue_final: bool = False
    json_schema: Mapping[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    entropy: bool = False
    attention: bool = False


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """A continuation whose probability after a conversation is asked, without decoding."""

    id: str
    messages: tuple[Message, ...]
    continuation: str
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
    """

    text: str
    id: int
    logprob: float | None = None
    top: tuple[tuple[str, int, float], ...] = ()
    entropy: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """What became of one request.

    Attributes:
      id: the request's.
      text: the new text, without special tokens and stop string; empty after an error.
      finish_reason: ``stop`` (end of turn, stop string or complete JSON), ``length`` (max_tokens or
        context full) or ``error``.
      usage: tokens and seconds of this request.
      error: one sentence saying why there is no text, else None.
      tokens: per generated token, where the request asked for log-probabilities or entropies.
      attention_TNS: last-layer attention (fp32) of each generated token T, per head N, over prompt
        and generated tokens S, where asked; zero after the token itself.
    """

    id: str
    text: str
    finish_reason: FinishReason
    usage: Usage = Usage()
    error: str | None = None
    tokens: tuple[Token, ...] | None = None
    attention_TNS: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a given continuation, token by token; ``error`` as in `Response`."""

    id: str
    tokens: tuple[Token, ...]
    usage: Usage = Usage()
    error: str | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return float(sum(token.logprob or 0.0 for token in self.tokens))


# Called with the responses finished so far and the tokens generated so far, all rows together.
Progress = Callable[[int, int], None]


class Backend(Protocol):
    """What methods and commands know of a language model."""

    usage: Usage

    def generate(
        self, requests: Sequence[Request], progress: Progress | None = None
    ) -> list[Response]:
        """One response a request, in order; a request that fails fails alone (``error``)."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probabilities of continuations; a backend that cannot raises `UserError`."""
        ...

    def close(self) -> None:
        """Frees what the backend holds."""
        ...


def failed(request: Request, error: str, usage: Usage | None = None) -> Response:
    """The response of a request that could not be answered."""
    return Response(request.id, "", "error", usage or Usage(), error)
