"""Claims: factual sentences, made self-contained and checked (sections 3.1, A.9.1-2).

The paper filters out opinions with a classifier (`fact_filter`). A rule, or the language model of
the other steps, can also filter them out.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from cirag_jax.grade import prompts
from cirag_jax.grade.records import Document
from cirag_jax.llm.types import Message
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields

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
    """Settings of the claims.

    Attributes:
      filter: filter of factual sentences: model, rules, or off (keep every sentence); ignored with
        a classifier.
      classifier: sequence classifier that filters factual sentences: a folder or a hub id, with
        safetensors weights. The paper's is lighteternal/fact-or-opinion-xlmr-el. null disables it.
      label: the classifier's label of factual sentences, a name or number.
      kind: writer of claims: model, or rules (replace a pronoun at the start with the title).
      check: let a model check that a claim is consistent with its sentence; ignored with
        kind=rules.
      context_words: number of words around the sentence to show the model; 0 shows the full
        document.
      max_tokens: maximum number of new tokens of a claim.
    """

    filter: Literal["model", "rules", "off"] = "model"
    classifier: str | None = None
    label: str = "LABEL_1"
    kind: Literal["model", "rules"] = "model"
    check: bool = True
    context_words: Count = 0
    max_tokens: PositiveInt = 96

    def __post_init__(self):
        check_fields(self, prefix="config.claims.")

    @property
    def prompts_filter(self) -> bool:
        """Returns whether a language model filters the sentences."""
        return self.filter == "model" and self.classifier is None

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles of language models in this step."""
        model = (self.prompts_filter, self.kind == "model", self.check and self.kind == "model")
        return tuple(role for role, is_used in zip(ROLES, model, strict=True) if is_used)


# Result of `claim`.
ClaimResult = Annotated[dict[Literal["text", "reason"], str], msgspec.Meta(min_length=1)]


def claim(document: Document, index: int, settings: ClaimSettings) -> Program[Mapping[str, Any]]:
    """Rewrites a sentence as a claim; a classifier has already accepted it, if there is one.

    Returns:
      ``text``, or the ``reason`` why there is no claim: ``opinion``, ``question``, ``no_names``,
      ``empty`` (the sentence states nothing), ``pronoun`` (the claim starts with a pronoun),
      ``inconsistent``, or a malformed response: ``no_verdict``, ``no_claim``, ``long_claim``,
      ``cut``.
    """
    sentence = document.sentences[index]
    by_rules = settings.filter == "rules" and settings.classifier is None
    if by_rules and (reason := rejection_reason(sentence)):
        return {"reason": reason}
    if settings.prompts_filter:
        response: Generated = yield Generate(prompts.fact_messages(sentence), "filter", 8)
        is_fact = prompts.parse_verdict(response.text, "fact", "opinion")
        if not is_fact:
            return {"reason": "no_verdict" if is_fact is None else "opinion"}
    if settings.kind == "rules":
        return {"text": decontextualised(sentence, document.title)}
    article = window(document, index, settings.context_words)
    messages = prompts.claim_messages(sentence, article)
    response = yield Generate(messages, "claimer", settings.max_tokens)
    text, reason = prompts.parse_claim(response.text)
    if not reason and response.finish_reason == "length":
        reason = "cut"
    if not reason and _PRONOUN.match(text):
        reason = "pronoun"
    if reason:
        return {"reason": reason}
    if settings.check:
        response = yield Generate(prompts.consistency_messages(sentence, text), "checker", 8)
        consistent = prompts.parse_verdict(response.text, "yes", "no")
        if not consistent:
            return {"reason": "no_verdict" if consistent is None else "inconsistent"}
    return {"text": text}


def typical_messages(document: Document, settings: ClaimSettings) -> list[tuple[Message, ...]]:
    """Returns each role's prompt about the middle sentence, to estimate tokens."""
    middle = len(document.sentences) // 2
    sentence = document.sentences[middle]
    article = window(document, middle, settings.context_words)
    by_role = {
        "filter": prompts.fact_messages(sentence),
        "claimer": prompts.claim_messages(sentence, article),
        "checker": prompts.consistency_messages(sentence, sentence),
    }
    return [by_role[role] for role in settings.roles]


def rejection_reason(sentence: str) -> str | None:
    """Returns the reason why the rules reject a sentence, or None if they accept it as a fact."""
    if sentence.rstrip().endswith("?"):
        return "question"
    if sentence.rstrip().endswith("!") or _OPINION.search(sentence):
        return "opinion"
    has_name = any(c.isupper() or c.isdigit() or not c.isascii() for c in sentence)
    return None if has_name else "no_names"


def decontextualised(sentence: str, title: str) -> str:
    """Replaces a pronoun at the start of a sentence with the title, or prepends the title.

    Sentences that contain the title are unchanged. The rule suits titles that name the subject.
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
    """Returns the title and about ``words`` words around sentence ``index``; 0 means all words."""
    kept: list[int] = []
    budget = words
    for i in sorted(range(len(document.sentences)), key=lambda i: (abs(i - index), i)):
        budget -= len(document.sentences[i].split())
        if words and budget < 0 and kept:
            break
        kept.append(i)
    # Without the colon, a small model reads the title as a part of the first name.
    title = (f"{document.title}:",) if document.title else ()
    return " ".join((*title, *(document.sentences[i] for i in sorted(kept))))
