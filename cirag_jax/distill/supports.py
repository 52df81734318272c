"""Which facts support a question's hops: pure functions.

A hop is solved by a candidate triple that states its answer; until then its answer is used nowhere,
so that a trajectory holds nothing that a student could not have read.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from cirag_jax.datasets.annotations import Hop, fill, overlap, words
from cirag_jax.types import Triple

# A statement -> the title of its passage and the sentence that it was extracted from.
Contexts = Callable[[Triple], tuple[str, str]]
_KEPT_PER_HOP = 2  # core triples with the same answer: a paraphrase may help, a third does not


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """A candidate that solves a hop, and the hop's answer as far as the candidate states it.

    ``place`` is the candidate's, ``triple`` that of its statements which was looked at.

    ``strength`` compares candidates: how exactly it states the answer, whether as its tail, and how
    many words it shares with what was asked.
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
    """The facts that solve reachable hops, and the hops that these make reachable in turn.

    Args:
      hops: of the question.
      known: hop -> its answer, for those solved before.
      facts: candidates, each with every statement of it (one triple, several sources).
      contexts: title and sentence that a statement was extracted from; "" where not known.

    Returns:
      For every hop that is solved now, at most two supports, the best first.
    """
    known, found = dict(known), []
    while True:
        new = []
        for index in reachable(hops, known):
            ranked = [
                s
                for place, statements in enumerate(facts)
                if (s := _support(index, hops[index], known, place, statements, contexts))
            ]
            ranked.sort(key=lambda s: s.strength, reverse=True)  # ties: the ranker's order
            new += [s for s in ranked if s.strength == ranked[0].strength][:_KEPT_PER_HOP]
        if not new:
            return found
        found += new
        for support in reversed(new):  # the best support's wording wins
            known[support.hop] = support.value


def near_misses(
    hops: Sequence[Hop], known: Mapping[int, str], facts: Sequence[Sequence[Triple]]
) -> list[int]:
    """Places of facts that state the answer of a reachable hop where it is to be found.

    Whether such a fact helps, only a reader of its sentence could say: where it is no support, it
    is no mistake either.
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
    place: int,
    statements: Sequence[Triple],
    contexts: Contexts,
) -> Support | None:
    """Whether a candidate, of which ``statements`` are the sources, supports a hop.

    It has to state the answer and to speak of what is asked: by its own words, or, where it states
    the answer as a part of its own, by those of its sentence, from which it was extracted
    without a name ("Enola Gay; is; B-29" of "... the plane that bombed Hiroshima").
    """
    about, wanted = words(fill(hop.about, known)), words(fill(hop.keywords or hop.about, known))
    for triple in statements:
        is_gold = hop.triple is not None and _same(triple, hop.triple)
        if not is_gold and not _is_in_place(triple, hop):
            continue
        stated = _stated(hop.answers, triple)
        if stated is None:
            continue
        value, exactness = stated
        rest = words(f"{triple.head} {triple.relation} {triple.tail}") - words(value)
        near = len(stems(wanted | about) & stems(rest))
        is_head = words(value) <= words(triple.head)  # then the fact may be about the answer
        title, sentence = contexts(triple)
        if hop.is_entity and not is_gold:
            named = rest if is_head else rest | words(title)
            if 2 * len(about & named) < len(about):
                near = 0
        if not near and exactness == 2 and not is_head:
            told = stems(words(f"{title} {sentence}") - words(value))
            if 2 * len(stems(about) & told) >= len(about):
                return Support(index, place, triple, value, (0, not is_head, 0))
        if near:
            return Support(index, place, triple, value, (exactness, not is_head, near))
    return None


def _is_in_place(triple: Triple, hop: Hop) -> bool:
    """Whether the hop's fact may be there; of an annotated triple, any sentence will do."""
    anywhere = hop.triple is not None
    return any(
        triple.passage_id == passage_id and (anywhere or sentence in (None, triple.sentence))
        for passage_id, sentence in hop.places
    )


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
            if overlap(part, answer) >= 0.6 and numbers <= words(part) and best is None:
                best = (part, 0)
        if wanted and wanted <= text:
            return answer, 1
    return best


def _same(triple: Triple, gold: tuple[str, str, str]) -> bool:
    parts = (triple.head, triple.relation, triple.tail)
    return all(words(a) == words(b) for a, b in zip(parts, gold, strict=True))


def stems(found: frozenset[str]) -> frozenset[str]:
    """Words by their beginnings, so that forms of a word are one."""
    return frozenset(word[:6] for word in found)  # performed, performer
