"""The protocol of language-model backends, and its requests and responses."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from cirag_jax.types import Usage

FinishReason = Literal["stop", "length", "error"]
# Features that only some backends have: fields of `Generate`, or ``score`` for the request `Score`.
Ability = Literal["logprobs", "entropy", "attention", "score", "json_schema", "continue_final"]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
      role: ``system``, ``user`` or ``assistant``.
      content: text that truncation keeps (the instruction, the question).
      observation: text after ``content`` that truncation may shorten (retrieved facts).
      ending: text after ``observation`` that truncation keeps.
    """

    role: str
    content: str
    observation: str = ""
    ending: str = ""

    @property
    def text(self) -> str:
        """The complete text of the turn."""
        return self.content + self.observation + self.ending


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """A conversation to continue; answered by `Generated`.

    Attributes:
      messages: the turns so far, oldest first; at least one.
      role: name of the config block of the model that answers. Backends ignore it.
      max_tokens: maximum number of tokens to generate; 0 means the role's limit.
      temperature: softmax temperature; 0 is greedy.
      top_p: probability mass of nucleus sampling, in (0, 1]; ignored when greedy.
      seed: seed of this request's samples. Methods leave the seed 0, which is replaced with a seed
        derived from the run's seed and the request's position.
      stop: strings that end the text and are removed from it.
      continue_final: continue the last message, which must be an assistant turn; only the new text
        is returned.
      json_schema: JSON schema that the text must satisfy.
      logprobs: return each generated token's log-probability.
      top_logprobs: also return this many most probable alternatives per token (implies logprobs).
      entropy: return the entropy (nats) of each token's distribution over the vocabulary.
      attention: if positive, return for each generated token this number of positions with the
        largest attention weights, and the largest weight that a later token gave to the token.
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
        """Whether the response must have details about each token."""
        return self.logprobs or self.entropy or self.top_logprobs > 0 or self.attention > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Complete(Generate):
    """A text to continue, given as tokens instead of messages; only our engine answers it.

    ``max_tokens`` may be 0, which generates nothing.

    Attributes:
      tokens: the tokens of the text, at least one.
      echo: return the tokens of the text with the details that the request asks for; answered by
        `Completed`.
    """

    messages: tuple[Message, ...] = ()
    continue_final: bool = True
    tokens: tuple[int, ...] = ()
    echo: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A request for the probabilities of continuations of a conversation; answered by `Scored`.

    There must be at least one continuation, and none may be empty. ``role`` and ``continue_final``
    have the same meaning as in `Generate`.
    """

    messages: tuple[Message, ...]
    continuations: tuple[str, ...]
    role: str = ""
    continue_final: bool = False


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a response.

    Attributes:
      text: surface form; an incomplete character is shown as the replacement character.
      id: vocabulary index; -1 if the server does not report it.
      logprob: natural logarithm of the probability before temperature and top-p.
      top: (text, id, logprob) of the most probable alternatives, best first.
      entropy: entropy of the distribution over the full vocabulary, in nats.
      offset: position of the token's first character in the response's text.
      attended: (text, position, weight) of the tokens that this token attended to most, highest
        weight first. Positions count prompt and generated tokens from 0. Weights are from the last
        layer, averaged over its heads (DRAGIN, Su et al., 2024, section 3.2).
      received: the largest attention weight that a later token gave to this token.
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
    """The response to a `Generate`.

    Attributes:
      text: the new text, without special tokens, stop string and thoughts; empty after an error.
      finish_reason: ``stop`` (end of turn, stop string or complete JSON), ``length`` (max_tokens
        reached or context full) or ``error``.
      usage: tokens and seconds of this request.
      error: the reason why there is no text, in one sentence. Methods never receive an error,
        because a failed request raises an exception in them.
      tokens: the tokens of the text, if the request has a field that requires details about them.
      thoughts: thoughts that a reasoning model wrote in addition to the text.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage = Usage()
    error: str | None = None
    tokens: tuple[Token, ...] | None = None
    thoughts: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Completed(Generated):
    """The response to a `Complete` with ``echo``.

    ``prompt`` has the tokens of the given text. The first has no log-probability.
    """

    prompt: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """The tokens of each continuation of a `Score`; see `Generated` for ``error``."""

    tokens: tuple[tuple[Token, ...], ...]
    usage: Usage = Usage()
    error: str | None = None

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability of each complete continuation."""
        return tuple(float(sum(t.logprob or 0.0 for t in tokens)) for tokens in self.tokens)


# Called with the total numbers of finished responses and of generated tokens.
OnProgress = Callable[[int, int], None]
# Called with a request's index and its response, as soon as the response is complete.
OnResponse = Callable[[int, Generated], None]
# Called with a request's index before its prompt is computed and after every chunk of its answer,
# and with a function from n to the response so far, with the tokens from index n on. The request is
# cancelled if it returns False.
OnPart = Callable[[int, Callable[[int], Generated]], bool]
# Returns further requests, which usually continue programs that wait for an answer; their indices
# continue after the last request.
MoreRequests = Callable[[], Sequence[Generate]]


class Backend(Protocol):
    """A language model.

    If its attribute ``accepts_more`` is true, `generate` has a fourth parameter, a `MoreRequests`.
    The backend calls this function whenever it has room for further requests.
    """

    usage: Usage

    def generate(
        self,
        requests: Sequence[Generate],
        progress: OnProgress | None = None,
        done: OnResponse | None = None,
    ) -> list[Generated]:
        """Returns one response per request, in order; failed requests have an ``error``."""
        ...

    def score(self, requests: Sequence[Score]) -> list[Scored]:
        """Returns log-probabilities of continuations; raises `UserError` if unsupported."""
        ...

    def close(self) -> None:
        """Releases all resources."""
        ...


def failed(error: str, usage: Usage | None = None) -> Generated:
    """Returns the response to a request that could not be answered."""
    return Generated("", "error", usage or Usage(), error)
