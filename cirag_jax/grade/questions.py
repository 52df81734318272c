"""Questions about paths: written by templates or a language model, then checked."""

import collections
import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from cirag_jax.datasets import demo, relations
from cirag_jax.datasets.demo import wording
from cirag_jax.grade import prompts
from cirag_jax.grade.claims import window
from cirag_jax.grade.equivalence import SMALL_WORDS, Graph
from cirag_jax.grade.records import Claim, Document, Edge, Fact, Path
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields

# Relations that make unnatural questions.
_UNNATURAL = frozenset(
    {"airport.icao", "country.iso3", "currency.numeric", "language.iso", "script.code",
     "script.numeric"}
)  # fmt: skip
_REPETITION = re.compile(
    r"\bthe (\w+)(?: \w+){0,4} the \1\b"
)  # the country where you find the country
_WORDINGS = 8
_ANSWER_TOKENS = 32  # maximum number of new tokens of a short answer


@dataclasses.dataclass(frozen=True)
class QuestionSettings:
    """Settings of the questions and their checks.

    Attributes:
      kind: model (a model writes the question of a full path, as in the paper), hops (a model
        paraphrases each fact, and templates combine the paraphrases; for small models), or rules
        (templates for relations).
      validation: rules (`Checks`), model (a model checks that the question is self-contained, as in
        the paper), both, or off.
      one_source: with rules, drop a path if a second document relates two neighboring nodes.
      context_words: number of words around each claim to show the model; 0 shows full documents.
      max_tokens: maximum number of new tokens of a question.
    """

    kind: Literal["model", "hops", "rules"] = "model"
    validation: Literal["rules", "model", "both", "off"] = "both"
    one_source: bool = False
    context_words: Count = 120
    max_tokens: PositiveInt = 160

    def __post_init__(self):
        check_fields(self, prefix="config.questions.")

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles of language models in this step."""
        asker = ("asker",) if self.kind != "rules" else ()
        return (*asker, "validator") if self.validation in ("model", "both") else asker


class Templates(Protocol):
    """A template that turns a path into a question."""

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """Returns the question and the reason for rejecting it, such as ``clumsy``, or None."""
        ...

    def answers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the accepted answers; ``names`` are the names of the last fact's tail."""
        return tuple(names)


class RelationTemplates(Templates):
    """Templates for the relations in `datasets.relations`."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """Returns the question and None, or a reason: ``no_template`` or ``clumsy``."""
        *steps, last = (facts[edge.fact].relation for edge in path)
        if not all(relations.is_listed(relation) for relation in (*steps, last)):
            return "", "no_template"
        text = self._graph.name(path[0].head)
        for relation in steps:
            text = relations.noun_phrase(relation, text)
        question = relations.sub_question(last, text)
        return question[0].upper() + question[1:], "clumsy" if _repeats(question) else None


class Wording(TypedDict):
    """Result of `write_wording`: paraphrases of a fact, or the reason why there are none."""

    phrase: NotRequired[str]
    question: NotRequired[str]
    reason: NotRequired[str]


def write_wording(
    fact: Fact, claim: Claim, settings: QuestionSettings
) -> Program[Mapping[str, Any]]:
    """Requests two paraphrases of a fact: a phrase that describes its tail, and a question.

    The question is kept if the model, given the claim, answers it with the tail (roundtrip
    consistency, Alberti et al., 2019).

    Returns:
      ``phrase`` and ``question``, or ``reason``: a problem of `grade.prompts.parse_wording`, or
      ``read_otherwise`` if the answer is not the tail.
    """
    messages = prompts.wording_messages(fact.parts, claim.text)
    response: Generated = yield Generate(messages, "asker", settings.max_tokens)
    parsed = prompts.parse_wording(response.text, fact.head, fact.tail)
    if parsed.problem:
        return {"reason": parsed.problem}
    messages = prompts.reading_messages(parsed.question, claim.text)
    response = yield Generate(messages, "asker", _ANSWER_TOKENS)
    answer, tail = _folded(prompts.parse_reading(response.text)), _folded(fact.tail)
    if answer not in tail and tail not in answer:
        return {"reason": "read_otherwise"}
    return {"phrase": parsed.phrase, "question": parsed.question}


def typical_messages(fact: Fact, claim: Claim) -> tuple[tuple[prompts.Message, ...], ...]:
    """Returns prompts similar to the prompts of `write_wording`, to estimate tokens."""
    return (
        prompts.wording_messages(fact.parts, claim.text),
        prompts.reading_messages(" ".join(fact.parts), claim.text),
    )


class WordedTemplates(Templates):
    """Combines a language model's paraphrases of facts into questions.

    Each fact's phrase replaces the name of the next fact's head.
    """

    def __init__(self, wordings: Mapping[int, Wording]):
        """``wordings`` maps the index of a fact to its paraphrases."""
        self._wordings = wordings

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """Returns the question and None, or a reason: ``no_wording`` or ``clumsy``."""
        text = ""
        for edge in path:
            wording_of_fact = self._wordings.get(edge.fact, {})
            part = wording_of_fact.get("question" if edge == path[-1] else "phrase")
            if part is None:
                return "", "no_wording"
            if text:
                before, after = prompts.named(facts[edge.fact].head).split(part)
                part = before + text + after
            text = part
        return text[0].upper() + text[1:], "clumsy" if _repeats(text) else None


def worth_wording(edges: Iterable[Edge]) -> set[int]:
    """Returns the indices of the facts that can be part of a path of at least two facts."""
    edges = tuple(edges)
    heads, tails = {edge.head for edge in edges}, {edge.tail for edge in edges}
    return {edge.fact for edge in edges if edge.head in tails or edge.tail in heads}


class TypedTemplates(Templates):
    """Templates of the built-in dataset, by relation type."""

    def __init__(self):
        self._entities = demo.entities()

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """Returns ``(question, None)``, or ``("", reason)``.

        Reasons: ``no_template``, ``ambiguous_start``, ``ambiguous_step``, ``clumsy``.
        """
        types = [facts[edge.fact].type for edge in path]
        if (
            types[-1] not in wording.ASKS
            or types[-1] in _UNNATURAL
            or any(step not in wording.STEPS for step in types[:-1])
        ):
            return "", "no_template"
        first, *_ = entities = [self._entities[edge.head] for edge in path]
        if not first.starts_questions:
            return "", "ambiguous_start"
        for entity, step in zip(entities, types, strict=True):
            if sum(triple.type == step for triple in entity.triples) != 1:
                return "", "ambiguous_step"
        steps = tuple((entity.key, step) for entity, step in zip(entities, types, strict=True))
        for number in range(_WORDINGS):
            salt = (steps, number)
            text = wording.phrase(first.kind, first.name, first.spoken_name, types, salt)
            if not _repeats(text):
                return text[0].upper() + text[1:], None
        return "", "clumsy"

    def answers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the accepted answers; for "two films", these include "two" and "2"."""
        forms = wording.answer_forms(names[0])
        first = names[0].partition(" ")[0]
        if first not in wording.NUMBER_WORDS or first == names[0]:
            return forms
        return (*forms, first, str(wording.NUMBER_WORDS.index(first)))


def _repeats(text: str) -> bool:
    """Returns whether three consecutive words recur, or "the X" recurs within a few words."""
    words = text.split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) < len(runs) or _REPETITION.search(text) is not None


# ------------------------------------------------------------------------------------------- checks


class Checks:
    """Rules that exclude ambiguous paths or questions, and paths with a shortcut to the answer.

    In the paper, only a language model checks paths and questions.
    """

    def __init__(
        self, graph: Graph, claims: Sequence[Claim], documents: Iterable[Document], one_source: bool
    ):
        self._graph, self._claims, self._one_source = graph, claims, one_source
        self._texts = {d.id: _folded(" ".join((d.title, *d.sentences))) for d in documents}
        self._words: dict[str, set[str]] = collections.defaultdict(set)
        for name, text in self._texts.items():
            for word in text.split():
                self._words[word].add(name)
        self._tails: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        self._namesakes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        self._links: dict[frozenset[str], set[tuple[str, str]]] = collections.defaultdict(set)
        for edge in graph.own:
            fact = graph.facts[edge.fact]
            relation = self._relation(fact)
            self._tails[edge.head, relation].add(edge.tail)
            self._namesakes[_folded(fact.head), relation].add(edge.head)
            source = (claims[fact.claim].document, relation)
            self._links[frozenset((edge.head, edge.tail))].add(source)

    @staticmethod
    def _relation(fact: Fact) -> str:
        return fact.type or name_key(fact.relation, "unicode")

    def path(self, path: Path) -> str | None:
        """Returns the reason for rejecting a path, or None.

        * ``ambiguous_step``: a relation has several tails. Tails that are parts of another tail's
          name are ignored, such as Germany for "Berlin, Germany".
        * ``ambiguous_name``: a namesake of a hop's head also has the hop's relation.
        * ``answer_early``: a claim or document before the last hop contains the answer.
        * ``shortcut``: a document connects nodes that are several hops apart.
        * ``told_twice``: with ``one_source``, a second document relates two neighboring nodes.
        """
        facts = [self._graph.facts[edge.fact] for edge in path]
        documents = [self._claims[fact.claim].document for fact in facts]
        for hop, (edge, fact) in enumerate(zip(path, facts, strict=True)):
            relation = self._relation(fact)
            parts = {_folded(part) for part in self._graph.name(edge.tail).split(",")}
            others = self._tails[edge.head, relation] - {edge.tail}
            if any(_folded(self._graph.name(other)) not in parts for other in others):
                return "ambiguous_step"
            if hop and len(self._namesakes[_folded(fact.head), relation]) > 1:
                return "ambiguous_name"
            if self._one_source and self._is_restated(edge, documents[hop], relation):
                return "told_twice"
        nodes = [_folded(self._graph.name(n)) for n in (path[0].head, *(e.tail for e in path))]
        claims = [_folded(self._claims[fact.claim].text) for fact in facts]
        if any(nodes[-1] in text for text in claims[:-1]):
            return "answer_early"
        if any(d != documents[-1] and nodes[-1] in self._texts[d] for d in documents[:-1]):
            return "answer_early"
        return "shortcut" if self._skips(nodes, documents) else None

    def _is_restated(self, edge: Edge, document: str, relation: str) -> bool:
        harmless = wording.HARMLESS.get(relation, ())
        links = self._links[frozenset((edge.head, edge.tail))]
        return any(d != document and other not in harmless for d, other in links)

    def _skips(self, nodes: Sequence[str], documents: Sequence[str]) -> bool:
        """Returns whether a document connects nodes that are several hops apart.

        Either it belongs to a hop and names a node of a later hop, or it belongs to no hop and
        names both ends of the path. Exempt are documents that a later hop uses again.
        """
        for hop, document in enumerate(documents):
            later = nodes[hop + 2 :]
            text = self._texts[document]
            if document not in documents[hop + 1 :] and any(name in text for name in later):
                return True
        return any(document not in documents for document in self._naming(nodes[0], nodes[-1]))

    def _naming(self, *names: str) -> Iterator[str]:
        """Yields the documents whose text contains all names."""
        words = [self._words.get(word, set()) for name in names for word in name.split()]
        common = functools.reduce(set.intersection, words) if words else set()
        return (id for id in sorted(common) if all(name in self._texts[id] for name in names))

    def question(self, path: Path, question: str, answer: str) -> str | None:
        """Returns the reason for rejecting a question about a path, or None.

        * ``names_later``: the question names an entity that must be inferred.
        * ``no_start``: the question does not name the path's start (function words are ignored).
        * ``answer_elsewhere``: the last fact and its claim do not contain the answer.
        """
        text, name = _folded(question), self._graph.name
        later = [answer, *(name(edge.tail) for edge in path)]
        words = frozenset(re.findall(r"\w+", question))
        if any(_folded(n) in text or _initials(n) in words for n in later):
            return "names_later"
        starts = (name(path[0].head), *self._graph.same_as.get(path[0].head, ()))
        if not any(_content_words(start) <= set(text.split()) for start in starts):
            return "no_start"
        last = self._graph.facts[path[-1].fact]
        stated = _folded(f"{last.tail} {name(path[-1].tail)} {self._claims[last.claim].text}")
        return None if _folded(answer) in stated else "answer_elsewhere"


@functools.lru_cache(maxsize=1 << 16)
def _folded(text: str) -> str:
    """Normalizes a text and puts spaces around it, so that names can be found as full words."""
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return f" {name_key(plain, 'unicode')} "


def _content_words(name: str) -> set[str]:
    """Returns the content words of a name, or all its words if it has only function words."""
    words = set(_folded(name).split())
    return words - SMALL_WORDS or words


def _initials(name: str) -> str:
    """Returns the initials of a name with several capitalized words; empty for other names."""
    words = [word for word in re.findall(r"\w+", name) if word[0].isupper()]
    return "".join(word[0] for word in words) if len(words) > 1 else ""


# ----------------------------------------------------------------------------------------- programs


class QuestionResult(TypedDict):
    """Result of `ask`."""

    question: str
    answers: list[str]
    reason: NotRequired[str]


def ask(
    path: Path,
    graph: Graph,
    claims: Sequence[Claim],
    documents: Mapping[str, Document],
    settings: QuestionSettings,
    templates: Templates | None,
    checks: Checks | None,
) -> Program[Mapping[str, Any]]:
    """Writes the question of a path (A.9.5) and checks it (A.9.6).

    Returns:
      ``question`` and ``answers``, and ``reason`` if the question is rejected. The reason is from
      `Templates.ask`, `Checks.question` or `grade.prompts.parse_question`, or it is ``cut`` (token
      limit), ``unclear`` (the validator's verdict) or ``no_verdict`` (an unreadable verdict).
    """
    names = answer_names(path, graph)
    if templates is not None:
        question, reason = templates.ask(path, graph.facts)
        answers = templates.answers(names)
    else:
        messages = path_messages(path, graph, claims, documents, settings)
        response: Generated = yield Generate(messages, "asker", settings.max_tokens)
        question, answer, reason = prompts.parse_question(response.text)
        if reason and response.finish_reason == "length":
            reason = "cut"
        name_keys = {name_key(name, "unicode") for name in names}
        others = names if name_key(answer, "unicode") in name_keys else ()
        answers = tuple(dict.fromkeys((answer, *others)))
    result = {"question": question, "answers": list(answers)}
    if not reason and checks is not None:
        reason = checks.question(path, question, answers[0])
    if not reason and "validator" in settings.roles:
        messages = prompts.validation_messages(question, answers[0])
        response = yield Generate(messages, "validator", 8)
        clear = prompts.parse_verdict(response.text, "true", "false")
        reason = None if clear else "no_verdict" if clear is None else "unclear"
    return {**result, "reason": reason} if reason else result


def answer_names(path: Path, graph: Graph) -> tuple[str, ...]:
    """Returns the last fact's tail and its exactly equivalent names."""
    tail = graph.facts[path[-1].fact].tail
    return tuple(dict.fromkeys((tail, *graph.surfaces[path[-1].tail])))


def path_messages(
    path: Path,
    graph: Graph,
    claims: Sequence[Claim],
    documents: Mapping[str, Document],
    settings: QuestionSettings,
) -> tuple[prompts.Message, ...]:
    """Returns the prompt for the question of a path."""
    facts = [graph.facts[edge.fact] for edge in path]
    path_claims = [claims[fact.claim] for fact in facts]
    places = dict.fromkeys((claim.document, claim.sentence) for claim in path_claims)
    context = (window(documents[d], s, settings.context_words) for d, s in places)
    return prompts.question_messages(
        [fact.parts for fact in facts],
        [claim.text for claim in path_claims],
        same_names(path, graph),
        " ".join(dict.fromkeys(context)),
    )


def same_names(path: Path, graph: Graph) -> list[tuple[str, str]]:
    """Returns the pairs of different names that a path treats as equivalent."""
    facts = [graph.facts[edge.fact] for edge in path]
    pairs = zip(facts, facts[1:], graph.links(path), strict=False)
    return [(fact.tail, following.head) for fact, following, link in pairs if link != "stated"]
