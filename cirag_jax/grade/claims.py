"""From sentences to claims: is it a fact, what does it say alone, is that what it said.

Sections 3.1 and A.9.1, A.9.2. The paper's filter is a classifier of facts and opinions; here it is
the language model of the other steps, or a rule.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from cirag_jax.errors import check_at_least, check_choice
from cirag_jax.grade import prompts
from cirag_jax.grade.records import Document
from cirag_jax.llm.types import Message
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key

ROLES = ("filter", "claimer", "checker")

_OPINION = re.compile(
    r"\b(I|we|We|you|You|my|My|our|Our|should|might|perhaps|Perhaps|maybe|Maybe|probably|hopefully|"
    r"arguably|seems?|believes?|thinks?|hopes?|expects?|predicts?|worth|wonderful|terrible)\b"
)
_SUBJECT = re.compile(r"(?:It|He|She|They)\b(?!')")
_POSSESSIVE = re.compile(r"(?:Its|His|Her|Their)\b")
_PRONOUN = re.compile(r"(?i)(?:it|he|she|they|its|his|her|their|this|that|these|those|there)\b")


@dataclasses.dataclass(frozen=True)
class ClaimSettings:
    """How claims are made.

    Attributes:
      filter: who says what is a fact: model, rules, or off (every sentence is).
      kind: who makes the claim: model, or rules (the title stands for a first pronoun).
      check: ask whether the claim says what the sentence says; a rule's claim needs no check.
      context_words: words of the article that are shown, around the sentence; 0: all.
      max_tokens: most new tokens of a claim.
    """

    filter: Literal["model", "rules", "off"] = "model"
    kind: Literal["model", "rules"] = "model"
    check: bool = True
    context_words: int = 0
    max_tokens: int = 96

    def __post_init__(self):
        check_choice("config.claims.filter", self.filter, ("model", "rules", "off"))
        check_choice("config.claims.kind", self.kind, ("model", "rules"))
        check_at_least(1, self, "max_tokens", prefix="config.claims.")
        check_at_least(0, self, "context_words", prefix="config.claims.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of a language model that are asked."""
        model = (self.filter == "model", self.kind == "model", self.check and self.kind == "model")
        return tuple(role for role, asked in zip(ROLES, model, strict=True) if asked)


# What `claim` gives.
Outcome = Annotated[dict[Literal["text", "reason"], str], msgspec.Meta(min_length=1)]


def claim(document: Document, index: int, settings: ClaimSettings) -> Program[Mapping[str, Any]]:
    """The claim of a sentence; a `Generate` of each role that is asked.

    Returns:
      ``text``, or ``reason`` why there is none: ``opinion``, ``question``, ``no_names``, ``empty``
      (it states nothing), ``pronoun`` (the claim begins with one), ``inconsistent``, and
      malformed answers: ``no_verdict``, ``no_claim``, ``long_claim``, ``cut``.
    """
    sentence = document.sentences[index]
    if settings.filter == "rules" and (reason := why_no_fact(sentence)):
        return {"reason": reason}
    if settings.filter == "model":
        told: Generated = yield Generate(prompts.fact_messages(sentence), "filter", 8)
        is_fact = prompts.parse_verdict(told.text, "fact", "opinion")
        if not is_fact:
            return {"reason": "no_verdict" if is_fact is None else "opinion"}
    if settings.kind == "rules":
        return {"text": decontextualised(sentence, document.title)}
    article = window(document, index, settings.context_words)
    messages = prompts.claim_messages(sentence, article)
    told = yield Generate(messages, "claimer", settings.max_tokens)
    text, reason = prompts.parse_claim(told.text)
    if not reason and told.finish_reason == "length":
        reason = "cut"
    if not reason and _PRONOUN.match(text):
        reason = "pronoun"
    if reason:
        return {"reason": reason}
    if settings.check:
        told = yield Generate(prompts.consistency_messages(sentence, text), "checker", 8)
        consistent = prompts.parse_verdict(told.text, "yes", "no")
        if not consistent:
            return {"reason": "no_verdict" if consistent is None else "inconsistent"}
    return {"text": text}


def typical_messages(document: Document, settings: ClaimSettings) -> list[tuple[Message, ...]]:
    """What each role is asked about the middle sentence, taken for its claim, too."""
    middle = len(document.sentences) // 2
    sentence = document.sentences[middle]
    article = window(document, middle, settings.context_words)
    asked = {
        "filter": prompts.fact_messages(sentence),
        "claimer": prompts.claim_messages(sentence, article),
        "checker": prompts.consistency_messages(sentence, sentence),
    }
    return [asked[role] for role in settings.roles]


def why_no_fact(sentence: str) -> str | None:
    """The rule: a fact asks nothing, judges nothing, and names something; None: it is one."""
    if sentence.rstrip().endswith("?"):
        return "question"
    if sentence.rstrip().endswith("!") or _OPINION.search(sentence):
        return "opinion"
    named = any(c.isupper() or c.isdigit() or not c.isascii() for c in sentence)
    return None if named else "no_names"


def decontextualised(sentence: str, title: str) -> str:
    """The rule: the document's title stands for the pronoun that begins a sentence, or before it.

    For passages about the thing that their title names.
    """
    sentence = " ".join(sentence.split())
    if not title or f" {name_key(title)} " in f" {name_key(sentence)} ":
        return sentence
    if _SUBJECT.match(sentence):
        return _SUBJECT.sub(lambda _: title, sentence, count=1)
    if _POSSESSIVE.match(sentence):
        return _POSSESSIVE.sub(lambda _: f"{title}'s", sentence, count=1)
    return f"{title}: {sentence}"


def window(document: Document, index: int, words: int) -> str:
    """The title, and the sentences nearest to one, together of ``words`` words; 0: all."""
    kept: list[int] = []
    left = words
    for at in sorted(range(len(document.sentences)), key=lambda at: (abs(at - index), at)):
        left -= len(document.sentences[at].split())
        if words and left < 0 and kept:
            break
        kept.append(at)
    # A colon, else a small model takes the title for a part of the first name.
    title = (f"{document.title}:",) if document.title else ()
    return " ".join((*title, *(document.sentences[at] for at in sorted(kept))))
