"""Questions about paths: asked by templates or by a language model, then checked.

A path is a question's for good: its program is started with it, and whatever becomes of the
question stands beside it.
"""

import collections
import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from cirag_jax.datasets import demo, relations
from cirag_jax.datasets.demo import wording
from cirag_jax.errors import check_at_least, check_choice
from cirag_jax.grade import prompts
from cirag_jax.grade.claims import window
from cirag_jax.grade.equivalence import SMALL_WORDS, Graph
from cirag_jax.grade.records import Claim, Document, Edge, Fact, Path
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key

# What hardly anybody asks for.
_SELDOM = frozenset(
    {"airport.icao", "country.iso3", "currency.numeric", "language.iso", "script.code",
     "script.numeric"}
)  # fmt: skip
_TWICE = re.compile(r"\bthe (\w+)(?: \w+){0,4} the \1\b")  # the country where you find the country
_WORDINGS = 8
_ANSWER_TOKENS = 32  # of a claim's answer to a question


@dataclasses.dataclass(frozen=True)
class QuestionSettings:
    """How questions are asked and checked.

    Attributes:
      kind: model (asked for the question of a whole path, as in the paper), hops (asked to put
        each fact into other words, which are then put together: within reach of small models), or
        rules (templates over relations).
      validation: rules (`Checks`), model (the paper: is it clear alone), both, or off.
      one_source: rules: drop a path of which another document links two neighbours, too.
      context_words: words of an article that are shown around each claim; 0: all.
      max_tokens: most new tokens of a question.
    """

    kind: Literal["model", "hops", "rules"] = "model"
    validation: Literal["rules", "model", "both", "off"] = "both"
    one_source: bool = False
    context_words: int = 120
    max_tokens: int = 160

    def __post_init__(self):
        check_choice("config.questions.kind", self.kind, ("model", "hops", "rules"))
        options = ("rules", "model", "both", "off")
        check_choice("config.questions.validation", self.validation, options)
        check_at_least(1, self, "max_tokens", prefix="config.questions.")
        check_at_least(0, self, "context_words", prefix="config.questions.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of a language model that are asked."""
        model = (self.kind != "rules", self.validation in ("model", "both"))
        return tuple(r for r, asked in zip(("asker", "validator"), model, strict=True) if asked)


class Templates(Protocol):
    """Says a path as a question."""

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """The question, or why there is none: ``no_template``, ``ambiguous_start``, ``clumsy``."""
        ...

    def answers(self, path: Path, names: Sequence[str]) -> tuple[str, ...]:
        """The accepted answers; ``names``: the last fact's tail, and what else always means it."""
        ...


class RelationTemplates:
    """Templates by the names of relations that `datasets.relations` lists."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """See `Templates`."""
        *steps, last = (facts[edge.fact].relation for edge in path)
        if not all(relations.is_listed(relation) for relation in (*steps, last)):
            return "", "no_template"
        text = self._graph.name(path[0].head)
        for relation in steps:
            text = relations.noun_phrase(relation, text)
        asked = relations.sub_question(last, text)
        return asked[0].upper() + asked[1:], "clumsy" if _repeats(asked) else None

    def answers(self, path: Path, names: Sequence[str]) -> tuple[str, ...]:
        """See `Templates`."""
        return tuple(names)


class Wording(TypedDict):
    """What `word` gives: two sentences' parts, or why there are none."""

    phrase: NotRequired[str]
    question: NotRequired[str]
    reason: NotRequired[str]


def word(fact: Fact, claim: Claim, settings: QuestionSettings) -> Program[Mapping[str, Any]]:
    """A fact as a phrase for its tail and as a question for it, by a language model.

    Returns:
      ``phrase`` and ``question``, or ``reason``: see `grade.prompts.parse_wording`, and
      ``read_otherwise`` where the claim is read as no or another answer to the question (as Alberti
      et al., 2019, keep what a reader answers alike).
    """
    messages = prompts.wording_messages(fact.parts, claim.text)
    told: Generated = yield Generate(messages, "asker", settings.max_tokens)
    found = prompts.parse_wording(told.text, fact.head, fact.tail)
    if found.problem:
        return {"reason": found.problem}
    messages = prompts.reading_messages(found.question, claim.text)
    told = yield Generate(messages, "asker", _ANSWER_TOKENS)
    answer, tail = _folded(prompts.parse_reading(told.text)), _folded(fact.tail)
    if answer not in tail and tail not in answer:
        return {"reason": "read_otherwise"}
    return {"phrase": found.phrase, "question": found.question}


def typical_messages(fact: Fact, claim: Claim) -> tuple[tuple[prompts.Message, ...], ...]:
    """What `word` asks, with the fact itself in place of its question."""
    return (
        prompts.wording_messages(fact.parts, claim.text),
        prompts.reading_messages(" ".join(fact.parts), claim.text),
    )


class WordedTemplates:
    """Questions put together from facts in a language model's words.

    The name of a fact's head gives way to the phrase of the fact before it.
    """

    def __init__(self, wordings: Mapping[int, Wording]):
        """``wordings``: by the fact's place."""
        self._wordings = wordings

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """See `Templates`; ``no_wording`` where a fact has none."""
        text = ""
        for edge in path:
            worded = self._wordings.get(edge.fact, {})
            part = worded.get("question" if edge == path[-1] else "phrase")
            if part is None:
                return "", "no_wording"
            if text:
                before, after = prompts.named(facts[edge.fact].head).split(part)
                part = before + text + after
            text = part
        return text[0].upper() + text[1:], "clumsy" if _repeats(text) else None

    def answers(self, path: Path, names: Sequence[str]) -> tuple[str, ...]:
        """See `Templates`."""
        return tuple(names)


def worth_wording(edges: Iterable[Edge]) -> set[int]:
    """The facts (places) that can be part of a path of two or more."""
    edges = tuple(edges)
    heads, tails = {edge.head for edge in edges}, {edge.tail for edge in edges}
    return {edge.fact for edge in edges if edge.head in tails or edge.tail in heads}


class TypedTemplates:
    """The built-in dataset's own templates, by the types of its relations."""

    def __init__(self):
        self._entities = demo.entities()

    def ask(self, path: Path, facts: Sequence[Fact]) -> tuple[str, str | None]:
        """See `Templates`; ``ambiguous_step`` if a relation has several tails."""
        types = [facts[edge.fact].type for edge in path]
        if (
            types[-1] not in wording.ASKS
            or types[-1] in _SELDOM
            or any(step not in wording.STEPS for step in types[:-1])
        ):
            return "", "no_template"
        first, *_ = entities = [self._entities[edge.head] for edge in path]
        if not first.starts_questions:
            return "", "ambiguous_start"
        for entity, step in zip(entities, types, strict=True):
            if sum(stated.type == step for stated in entity.triples) != 1:
                return "", "ambiguous_step"
        steps = tuple((entity.key, step) for entity, step in zip(entities, types, strict=True))
        for number in range(_WORDINGS):
            salt = (steps, number)
            text = wording.phrase(first.kind, first.name, first.spoken_name, types, salt)
            if not _repeats(text):
                return text[0].upper() + text[1:], None
        return "", "clumsy"

    def answers(self, path: Path, names: Sequence[str]) -> tuple[str, ...]:
        """See `Templates`."""
        forms = wording.answer_forms(names[0])
        first = names[0].partition(" ")[0]  # of "two films"
        if first not in wording.NUMBER_WORDS or first == names[0]:
            return forms
        return (*forms, first, str(wording.NUMBER_WORDS.index(first)))


def _repeats(text: str) -> bool:
    """Whether a question says three words in a row twice, or a thing beside itself."""
    words = text.split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) < len(runs) or _TWICE.search(text) is not None


# ------------------------------------------------------------------------------------------- checks


class Checks:
    """What makes a path one question, and its only way to the answer: rules over graph and texts.

    The paper leaves this to its language model.
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
            stated = (claims[fact.claim].document, relation)
            self._links[frozenset((edge.head, edge.tail))].add(stated)

    @staticmethod
    def _relation(fact: Fact) -> str:
        return fact.type or name_key(fact.relation, "unicode")

    def path(self, path: Path) -> str | None:
        """Why a path makes no good question; None: it may.

        ``ambiguous_step``: a relation has several tails, and more than this one ("Berlin, Germany")
        and what its name lists (Germany); ``ambiguous_name``: another thing of the name has the
        next relation, too; ``answer_early``: what is read before the last hop holds the answer;
        ``shortcut``: a document skips a hop; ``told_twice`` (with ``one_source``).
        """
        facts = [self._graph.facts[edge.fact] for edge in path]
        homes = [self._claims[fact.claim].document for fact in facts]
        for at, (edge, fact) in enumerate(zip(path, facts, strict=True)):
            relation = self._relation(fact)
            within = {_folded(part) for part in self._graph.name(edge.tail).split(",")}
            others = self._tails[edge.head, relation] - {edge.tail}
            if any(_folded(self._graph.name(other)) not in within for other in others):
                return "ambiguous_step"
            if at and len(self._namesakes[_folded(fact.head), relation]) > 1:
                return "ambiguous_name"
            if self._one_source and self._told_twice(edge.head, edge.tail, homes[at], relation):
                return "told_twice"
        nodes = [_folded(self._graph.name(n)) for n in (path[0].head, *(e.tail for e in path))]
        told = [_folded(self._claims[fact.claim].text) for fact in facts]
        if any(nodes[-1] in text for text in told[:-1]):
            return "answer_early"
        if any(h != homes[-1] and nodes[-1] in self._texts[h] for h in homes[:-1]):
            return "answer_early"
        return "shortcut" if self._skips(nodes, homes) else None

    def _told_twice(self, head: str, tail: str, home: str, relation: str) -> bool:
        harmless = wording.HARMLESS.get(relation, ())
        links = self._links[frozenset((head, tail))]
        return any(document != home and other not in harmless for document, other in links)

    def _skips(self, nodes: Sequence[str], homes: Sequence[str]) -> bool:
        """Whether a hop's document names what comes two hops later, or another one both ends."""
        for at, home in enumerate(homes):
            later = nodes[at + 2 :]
            if home not in homes[at + 1 :] and any(name in self._texts[home] for name in later):
                return True
        return any(home not in homes for home in self._holding(nodes[0], nodes[-1]))

    def _holding(self, *names: str) -> Iterator[str]:
        """Documents whose text holds all names."""
        words = [self._words.get(word, set()) for name in names for word in name.split()]
        common = functools.reduce(set.intersection, words) if words else set()
        return (home for home in sorted(common) if all(n in self._texts[home] for n in names))

    def question(self, path: Path, question: str, answer: str) -> str | None:
        """Why a question is none about its path; None: it is.

        ``names_later``: it names what has to be found out; ``no_start``: it lacks a word of every
        name of where the path begins, small ones apart; ``answer_elsewhere``: the last fact does
        not give the answer.
        """
        text, name = _folded(question), self._graph.name
        later = [answer, *(name(edge.tail) for edge in path)]
        words = frozenset(re.findall(r"\w+", question))
        if any(_folded(n) in text or _initials(n) in words for n in later):
            return "names_later"
        starts = (name(path[0].head), *self._graph.same_as.get(path[0].head, ()))
        if not any(_telling(start) <= set(text.split()) for start in starts):
            return "no_start"
        last = self._graph.facts[path[-1].fact]
        told = _folded(f"{last.tail} {name(path[-1].tail)} {self._claims[last.claim].text}")
        return None if _folded(answer) in told else "answer_elsewhere"


@functools.lru_cache(maxsize=1 << 16)
def _folded(text: str) -> str:
    """Words without accents between spaces, so that a name is found as whole words."""
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return f" {name_key(plain, 'unicode')} "


def _telling(name: str) -> set[str]:
    """The words of a name without the small ones; of a name of small ones, all."""
    words = set(_folded(name).split())
    return words - SMALL_WORDS or words


def _initials(name: str) -> str:
    """What a name of several words may be abbreviated to; empty where it has one word."""
    words = [word for word in re.findall(r"\w+", name) if word[0].isupper()]
    return "".join(word[0] for word in words) if len(words) > 1 else ""


# ----------------------------------------------------------------------------------------- programs


class Outcome(TypedDict):
    """What `ask` gives."""

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
    """The question of a path (A.9.5) and whether it stands alone (A.9.6).

    Returns:
      ``question`` and ``answers``; and ``reason`` where it is not used: that of `Templates.ask`,
      `Checks.question` or `grade.prompts.parse_question`; ``cut``, ``unclear`` or ``no_verdict``.
    """
    names = answer_names(path, graph)
    if templates is not None:
        question, reason = templates.ask(path, graph.facts)
        answers = templates.answers(path, names)
    else:
        messages = messages_of(path, graph, claims, documents, settings)
        told: Generated = yield Generate(messages, "asker", settings.max_tokens)
        question, answer, reason = prompts.parse_question(told.text)
        if reason and told.finish_reason == "length":
            reason = "cut"
        known = {name_key(name, "unicode") for name in names}
        others = names if name_key(answer, "unicode") in known else ()
        answers = tuple(dict.fromkeys((answer, *others)))
    found = {"question": question, "answers": list(answers)}
    if not reason and checks is not None:
        reason = checks.question(path, question, answers[0])
    if not reason and "validator" in settings.roles:
        messages = prompts.validation_messages(question, answers[0])
        told = yield Generate(messages, "validator", 8)
        clear = prompts.parse_verdict(told.text, "true", "false")
        reason = None if clear else "no_verdict" if clear is None else "unclear"
    return {**found, "reason": reason} if reason else found


def answer_names(path: Path, graph: Graph) -> tuple[str, ...]:
    """The last fact's tail, and other names that always mean it."""
    tail = graph.facts[path[-1].fact].tail
    return tuple(dict.fromkeys((tail, *graph.surfaces[path[-1].tail])))


def messages_of(
    path: Path,
    graph: Graph,
    claims: Sequence[Claim],
    documents: Mapping[str, Document],
    settings: QuestionSettings,
) -> tuple[prompts.Message, ...]:
    """What a language model is shown of a path."""
    facts = [graph.facts[edge.fact] for edge in path]
    stated = [claims[fact.claim] for fact in facts]
    places = dict.fromkeys((claim.document, claim.sentence) for claim in stated)
    around = (window(documents[d], s, settings.context_words) for d, s in places)
    texts = [claim.text for claim in stated]
    return prompts.question_messages(
        [fact.parts for fact in facts],
        texts,
        same_names(path, graph),
        " ".join(dict.fromkeys(around)),
    )


def same_names(path: Path, graph: Graph) -> list[tuple[str, str]]:
    """Pairs of names that a path takes for one thing although they differ."""
    facts = [graph.facts[edge.fact] for edge in path]
    links = graph.links(path)
    joints = zip(facts, facts[1:], links, strict=False)
    return [(one.tail, other.head) for one, other, link in joints if link != "stated"]
