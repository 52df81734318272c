"""Decides which candidate triples support the hops of a question.

A candidate that states the answer of a hop solves the hop. An answer is not used before it is
stated, so a trajectory contains only facts that a student could have read.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from cirag_jax.datasets.annotations import Hop, fill, overlap, words
from cirag_jax.types import Triple

# Maps a triple to the title of its passage and the text of its sentence.
Contexts = Callable[[Triple], tuple[str, str]]
_KEPT_PER_HOP = 2  # Maximum of core triples with the same answer; more paraphrases do not help.


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """A candidate that solves a hop.

    ``place`` is the index of the candidate, ``triple`` the triple that supports the hop, and
    ``value`` the answer in the triple's words. ``strength`` ranks candidates by three criteria: how
    exactly the answer is stated, whether the tail states it, and the number of words shared with
    the query.
    """

    hop: int
    place: int
    triple: Triple
    value: str
    strength: tuple[int, bool, int]


def supports_of(
    hops: Sequence[Hop],
    known: Mapping[int, str],
    facts: Sequence[Sequence[Triple]],
    contexts: Contexts,
) -> list[Support]:
    """Returns the supports of all reachable hops, including hops that become reachable.

    Args:
      hops: hops of the question.
      known: hop -> answer for the hops that were solved before.
      facts: for each candidate, the equal triples (a fact may have several sources).
      contexts: returns the passage title and the sentence of a triple; "" if unknown.

    Returns:
      At most two supports for every newly solved hop, best first.
    """
    known, supports = dict(known), []
    while True:
        new = []
        for index in reachable(hops, known):
            ranked = [
                s
                for place, statements in enumerate(facts)
                if (s := _support(index, hops[index], known, place, statements, contexts))
            ]
            ranked.sort(key=lambda s: s.strength, reverse=True)  # Ties keep the ranker's order.
            new += [s for s in ranked if s.strength == ranked[0].strength][:_KEPT_PER_HOP]
        if not new:
            return supports
        supports += new
        for support in reversed(new):  # The best support is last and determines the wording.
            known[support.hop] = support.value


def near_misses(
    hops: Sequence[Hop], known: Mapping[int, str], facts: Sequence[Sequence[Triple]]
) -> list[int]:
    """Returns the indices of facts that state a reachable hop's answer.

    Only facts from gold sentences or passages are returned, see `_is_in_place`. Whether such a fact
    helps depends on its sentence. Keeping the fact is therefore not a mistake, even if it supports
    no hop.
    """
    return [
        place
        for place, statements in enumerate(facts)
        if any(
            hops[index].answers
            and _is_in_place(triple, hops[index])
            and _stated(hops[index].answers, triple)
            for index in reachable(hops, known)
            for triple in statements
        )
    ]


def reachable(hops: Sequence[Hop], known: Mapping[int, str]) -> list[int]:
    """Returns the unsolved hops whose parents are solved."""
    return [
        index
        for index, hop in enumerate(hops)
        if index not in known and all(parent in known for parent in hop.parents)
    ]


def _support(
    index: int,
    hop: Hop,
    known: Mapping[int, str],
    place: int,
    statements: Sequence[Triple],
    contexts: Contexts,
) -> Support | None:
    """Returns the support by the first of a candidate's triples that supports a hop, or None.

    The triple must state the answer and mention the subject of the query. If the tail is exactly
    the answer, it is enough that the sentence mentions the subject ("Enola Gay; is; B-29" from
    "... the plane that bombed Hiroshima").
    """
    about, keywords = words(fill(hop.about, known)), words(fill(hop.keywords or hop.about, known))
    for triple in statements:
        is_gold = hop.triple is not None and _same(triple, hop.triple)
        if not is_gold and not _is_in_place(triple, hop):
            continue
        stated = _stated(hop.answers, triple)
        if stated is None:
            continue
        value, exactness = stated
        rest = words(f"{triple.head} {triple.relation} {triple.tail}") - words(value)
        shared = len(stems(keywords | about) & stems(rest))
        is_head = words(value) <= words(triple.head)  # If so, the fact may be about the answer.
        title, sentence = contexts(triple)
        if hop.is_entity and not is_gold:
            named = rest if is_head else rest | words(title)
            if 2 * len(about & named) < len(about):
                shared = 0
        if not shared and exactness == 2 and not is_head:
            context = stems(words(f"{title} {sentence}") - words(value))
            if 2 * len(stems(about) & context) >= len(about):
                return Support(index, place, triple, value, (0, not is_head, 0))
        if shared:
            return Support(index, place, triple, value, (exactness, not is_head, shared))
    return None


def _is_in_place(triple: Triple, hop: Hop) -> bool:
    """Returns whether a triple is from a gold sentence of a hop.

    If the hop has a gold triple, any sentence of the gold passage is accepted.
    """
    anywhere = hop.triple is not None
    return any(
        triple.passage_id == passage_id and (anywhere or sentence in (None, triple.sentence))
        for passage_id, sentence in hop.places
    )


def _stated(answers: Sequence[str], triple: Triple) -> tuple[str, int] | None:
    """Returns the answer in the triple's words, and the exactness (2: equals head or tail)."""
    if not answers:
        return "", 0
    text = words(f"{triple.head} {triple.relation} {triple.tail}")
    best: tuple[str, int] | None = None
    for answer in answers:
        answer_words = words(answer)
        for part in (triple.tail, triple.head):
            if words(part) == answer_words:
                return part, 2
            numbers = {w for w in answer_words if any(map(str.isdigit, w))}
            if overlap(part, answer) >= 0.6 and numbers <= words(part) and best is None:
                best = (part, 0)
        if answer_words and answer_words <= text:
            return answer, 1
    return best


def _same(triple: Triple, gold: tuple[str, str, str]) -> bool:
    parts = (triple.head, triple.relation, triple.tail)
    return all(words(a) == words(b) for a, b in zip(parts, gold, strict=True))


def stems(tokens: frozenset[str]) -> frozenset[str]:
    """Returns the first six letters of each word, to match "performed" and "performer"."""
    return frozenset(word[:6] for word in tokens)
