"""The state of one question while CIRAG answers it."""

import collections
from collections.abc import Iterable

from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common.evidence import Evidence, Fact
from cirag_jax.types import Step


class State:
    """The state of one question.

    Attributes:
      question: the question x.
      config: the settings.
      steps: the finished rounds, with their candidates and decisions (H_<t, Eq. 2).
      evidence: the pools C, S and D (core triples, sentences and passages).
      parse_errors: number of malformed outputs of each kind.
    """

    def __init__(self, question: str, config: CiragConfig, steps: Iterable[Step] = ()):
        self.question = question
        self.config = config
        self.steps: list[Step] = list(steps)
        self.evidence = Evidence(config.normalization)
        self.parse_errors = collections.Counter[str]()

    @property
    def kept(self) -> list[Fact]:
        """The facts that the finished rounds kept, in order."""
        return [fact for step in self.steps for fact in step.kept]

    @property
    def chain(self) -> list[Fact]:
        """The first fact that each finished round kept."""
        return [step.kept[0] for step in self.steps if step.kept]
