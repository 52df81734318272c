"""What an ideal integrator decides, from gold annotations: pure functions.

A question is taken apart into hops, each a fact with the sub-question that asks for it. A hop is
solved by a candidate triple that states its answer; until then its answer is used nowhere, so that
a trajectory holds nothing that a student could not have read.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.distill import templates
from cirag_jax.types import Passage, Question, Triple

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about an and are as at by did do does for from had has have he her his how in is it its "
        "many much of on or s she that the their they this to was were what when where which who "
        "whom whose will with would",
    )
)
_KEPT_PER_HOP = 2  # core triples that state the same answer: a paraphrase may help, a third not


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One fact that a question needs. ``#k`` in its texts stands for the answer of the k-th hop.

    Attributes:
      asks: the sub-question; empty where none is annotated.
      noun: what it asks for, as a noun phrase; empty where none can be made.
      keywords: the same as words to search for.
      about: what a fact that supports it must speak of.
      is_entity: whether ``about`` is an entity, of whose name such a fact must have a good part.
      answers: what such a fact must state, in any of these forms; empty: nothing of its own.
      places: (passage id, sentence index) of the facts that may support it; None: any sentence.
      parents: earlier hops whose answers it refers to.
      triple: the annotated fact.
    """

    asks: str
    noun: str
    keywords: str
    about: str
    is_entity: bool
    answers: tuple[str, ...]
    places: frozenset[tuple[str, int | None]]
    parents: tuple[int, ...] = ()
    triple: tuple[str, str, str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """A candidate that solves a hop, and the hop's answer as far as the candidate states it.

    ``strength`` compares candidates: how exactly it states the answer, whether as its tail, and how
    many words it shares with what was asked.
    """

    hop: int
    triple: Triple
    value: str
    strength: tuple[int, bool, int]


# ------------------------------------------------------------------------------------------- hops


def hops_of(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """The hops of a question, in annotation order; empty where nothing is annotated.

    2WikiMultihopQA and the built-in dataset annotate triples, MuSiQue sub-questions, HotpotQA
    sentences; where only gold passages are known, each is a hop.
    """
    if question.evidences and question.supporting:
        return _hops_of_evidences(question)
    if question.decomposition:
        return _hops_of_decomposition(question)
    return _hops_of_places(question, corpus)


def _hops_of_evidences(question: Question) -> tuple[Hop, ...]:
    """A triple needs the earlier one whose tail is its head."""
    evidences = question.evidences or ()
    hops: list[Hop] = []
    free = set()  # tails that no later head took up
    for index, (head, relation, tail) in enumerate(evidences):
        parents = [i for i in range(index) if _overlap(evidences[i][2], head) > 0.6][:1]
        if not parents and not _names(question.question, head):
            # "André de Toth" may go on as "Andre DeToth": the head can only be an earlier tail.
            parents = sorted(free)[:1]
        free -= set(parents)
        free.add(index)
        named = f"#{parents[0] + 1}" if parents else head
        hops.append(
            Hop(
                templates.sub_question(relation, named),
                templates.noun_phrase(relation, named),
                f"{named} {relation}",
                named,
                True,
                _answers(question, tail),
                _anywhere(question.supporting),
                tuple(parents),
                (head, relation, tail),
            )
        )
    return tuple(hops)


def _hops_of_decomposition(question: Question) -> tuple[Hop, ...]:
    """``#k`` makes the k-th step a parent; ``X >> relation`` is a question without words."""
    hops = []
    for index, step in enumerate(question.decomposition or ()):
        text = " ".join(step.question.split()).replace("( ", "(").replace(" )", ")")
        parents = {int(k) - 1 for k in re.findall(r"#(\d+)", text) if 0 < int(k) <= index}
        head, arrow, relation = text.partition(" >> ")
        if arrow:
            asks, noun = (
                f(relation, head) for f in (templates.sub_question, templates.noun_phrase)
            )
            keywords, about = f"{head} {relation}", head
        else:
            asks, noun = _as_question(text), ""
            keywords = " ".join(w for w in text.rstrip("?").split() if w.lower() not in _STOP_WORDS)
            about = text
        places = _anywhere([step.supporting] if step.supporting else question.supporting)
        answers = _answers(question, step.answer)
        order = tuple(sorted(parents))
        hops.append(Hop(asks, noun, keywords, about, bool(arrow), answers, places, order))
    return tuple(hops)


def _hops_of_places(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """Supporting sentences (HotpotQA) or passages, of which nobody says what they answer.

    A passage that the question names can be asked for at once, any other only when a fact has named
    it: the first of them is then what the named passages have to lead to, where they do.
    """
    sentences: dict[str, list[int]] = {i: [] for i in question.supporting or ()}
    for passage_id, sentence in question.supporting_sentences or ():
        sentences.setdefault(passage_id, []).append(sentence)
    ids = [i for i in sentences if i in corpus]
    ids.sort(key=lambda i: not _names(question.question, corpus[i].title))
    hidden = [i for i in ids if not _names(question.question, corpus[i].title)]
    bridge = corpus[hidden[0]].title if hidden else ""
    hops: list[Hop] = []
    for passage_id in ids:
        title = corpus[passage_id].title
        text = _text(corpus[passage_id], sentences[passage_id])
        parents = tuple(k for k, hop in enumerate(hops) if title in hop.answers)[:1]
        about = f"#{parents[0] + 1}" if parents else title
        if passage_id in hidden:
            answers = tuple(a for a in question.answers if _names(text, a))
        else:
            answers = (bridge,) if bridge and _names(text, bridge) else ()
        can_be_asked = bool(parents) or passage_id not in hidden
        hops.append(
            Hop(
                f"What about {about}: {question.question}" if can_be_asked else "",
                "",
                about if can_be_asked else "",
                f"{about} {question.question}" if can_be_asked else question.question,
                False,
                answers,
                frozenset((passage_id, s) for s in sentences[passage_id] or (None,)),
                parents,
            )
        )
    return tuple(hops)


def _text(passage: Passage, sentences: Sequence[int]) -> str:
    texts = sentences_of(passage)
    return " ".join(texts[i] for i in sentences if i < len(texts)) or passage.text


def _anywhere(passages: Iterable[str] | None) -> frozenset[tuple[str, int | None]]:
    return frozenset((passage_id, None) for passage_id in passages or ())


def _answers(question: Question, answer: str) -> tuple[str, ...]:
    """An annotated answer with the other forms that the final answer has."""
    others = question.answers if answer in question.answers else ()
    return tuple(dict.fromkeys((answer, *others)))


def _as_question(text: str) -> str:
    text = text.strip().rstrip("?").rstrip()
    return f"{text[:1].upper()}{text[1:]}?"


# ---------------------------------------------------------------------------------------- support


def supports_of(
    hops: Sequence[Hop],
    known: Mapping[int, str],
    facts: Sequence[Sequence[Triple]],
    titles: Mapping[str, str],
) -> list[Support]:
    """Which facts solve hops that can be reached, to the fix point, parallel hops included.

    Args:
      hops: of the question.
      known: hop -> its answer, for those solved before.
      facts: candidates, each with every statement of it (one triple, several sources).
      titles: passage id -> title, of gold passages.

    Returns:
      For every hop that is solved now, at most two supports, the best first.
    """
    known, found = dict(known), []
    while True:
        new = []
        for index in reachable(hops, known):
            ranked = [
                s for place in facts if (s := _support(index, hops[index], known, place, titles))
            ]
            ranked.sort(key=lambda s: s.strength, reverse=True)  # ties: the ranker's order
            new += [s for s in ranked if s.strength == ranked[0].strength][:_KEPT_PER_HOP]
        if not new:
            return found
        found += new
        for support in reversed(new):  # the best one's wording stands
            known[support.hop] = support.value


def reachable(hops: Sequence[Hop], known: Mapping[int, str]) -> list[int]:
    """Hops that are not solved but whose parents are."""
    return [
        index
        for index, hop in enumerate(hops)
        if index not in known and all(parent in known for parent in hop.parents)
    ]


def _support(
    index: int,
    hop: Hop,
    known: Mapping[int, str],
    statements: Sequence[Triple],
    titles: Mapping[str, str],
) -> Support | None:
    """Whether a candidate, of which ``statements`` are the sources, supports a hop.

    A fact has to speak of what is asked itself: that its passage does would leave a rationale
    without ground. The passage's title makes up for part of an entity's name.
    """
    about, wanted = words(fill(hop.about, known)), words(fill(hop.keywords or hop.about, known))
    for triple in statements:
        is_gold = hop.triple is not None and _same(triple, hop.triple)
        places = {(triple.passage_id, None), (triple.passage_id, triple.sentence)}
        if not is_gold and places.isdisjoint(hop.places):
            continue
        stated = _stated(hop.answers, triple)
        if stated is None:
            continue
        value, exactness = stated
        rest = words(f"{triple.head} {triple.relation} {triple.tail}") - words(value)
        near = len(_stems(wanted | about) & _stems(rest))
        is_head = words(value) <= words(triple.head)  # then the fact may be about the answer
        if hop.is_entity and not is_gold:
            title = frozenset() if is_head else words(titles.get(triple.passage_id or "", ""))
            if 2 * len(about & (rest | title)) < len(about):
                continue
        if near:
            return Support(index, triple, value, (exactness, not is_head, near))
    return None


def _stated(answers: Sequence[str], triple: Triple) -> tuple[str, int] | None:
    """The answer that a triple states, in its words, and how exactly (2: as a part of its own)."""
    if not answers:
        return "", 0
    text = words(f"{triple.head} {triple.relation} {triple.tail}")
    best: tuple[str, int] | None = None
    for answer in answers:
        wanted = words(answer)
        for part in (triple.tail, triple.head):
            if words(part) == wanted:
                return part, 2
            numbers = {w for w in wanted if any(map(str.isdigit, w))}
            if _overlap(part, answer) >= 0.6 and numbers <= words(part) and best is None:
                best = (part, 0)
        if wanted and wanted <= text:
            return answer, 1
    return best


def _same(triple: Triple, gold: tuple[str, str, str]) -> bool:
    parts = (triple.head, triple.relation, triple.tail)
    return all(words(a) == words(b) for a, b in zip(parts, gold, strict=True))


def fill(text: str, known: Mapping[int, str]) -> str:
    """``text`` with the answers of solved hops for ``#k``; others are left as they stand."""
    return re.sub(r"#(\d+)", lambda m: known.get(int(m[1]) - 1, m[0]), text)


@functools.lru_cache(maxsize=1 << 16)
def words(text: str) -> frozenset[str]:
    """The words that matter for a comparison: folded, without accents and stop words.

    Of a text of stop words alone, all of them.
    """
    plain = unicodedata.normalize("NFKD", text).casefold()
    found = re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
    return frozenset(w for w in found if w not in _STOP_WORDS) or frozenset(found)


def _stems(found: frozenset[str]) -> frozenset[str]:
    return frozenset(word[:6] for word in found)  # performed, performer


def _overlap(a: str, b: str) -> float:
    """F1 of two texts' words."""
    words_a, words_b = words(a), words(b)
    total = len(words_a) + len(words_b)
    return 2 * len(words_a & words_b) / total if total else 0.0


def _names(text: str, name: str) -> bool:
    """Whether a text has most words of a name."""
    wanted = words(name)
    return bool(wanted) and len(wanted & words(text)) >= 0.6 * len(wanted)
