"""An index over the entities of triples: names by their words, and the triples around a name.

What C2RAG anchors its constraints with: an inverted index from words to entities, so that a search
looks at the entities that share a word with what is sought, not at all of them.
"""

import collections
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np

from cirag_jax.triples.normalization import Normalization, merge_sources, name_key
from cirag_jax.types import Triple

Match = Literal["coverage", "ratio"]
MATCHES: tuple[Match, ...] = get_args(Match)

# One integer orders candidates: shared words, then the shorter name, then the earlier entity.
_ID_BITS, _LENGTH_BITS = 26, 16
_BINS = 32  # of letters, by their code


class EntityIndex:
    """The entities of triples, equal where their normal forms are.

    Args:
      triples: whose heads and tails are entities; one with an empty end is left out.
      normalization: of names; its words are what a search compares.
    """

    def __init__(self, triples: Iterable[Triple], normalization: Normalization = "unicode"):
        self.normalization: Normalization = normalization
        self._triples: list[Triple] = []
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._around: list[list[int]] = []
        for triple in triples:
            ends = [name_key(end, normalization) for end in (triple.head, triple.tail)]
            if not all(ends):
                continue
            for key, name in dict(zip(ends, (triple.head, triple.tail), strict=True)).items():
                if key not in self._ids:
                    self._ids[key] = len(self._names)
                    self._names.append(name)
                    self._around.append([])
                self._around[self._ids[key]].append(len(self._triples))
            self._triples.append(triple)
        self._length_E = np.array([len(key) for key in self._ids], np.int64)
        self._entities_of = _invert(self._ids)
        self._shared_E = np.zeros(len(self._names), np.int32)  # all zero between two searches

    def __len__(self) -> int:
        """Number of entities."""
        return len(self._names)

    @property
    def triples(self) -> Sequence[Triple]:
        """Every statement of a triple, in order."""
        return self._triples

    def anchors(self, surface: str, n: int, match: Match = "coverage") -> tuple[str, ...]:
        """The entities nearest to a name, best first; none that shares no word with it.

        Args:
          surface: the name.
          n: how many at most.
          match: ``coverage``: by the share of its words that the entity has, ties by the shorter
            name (C2RAG, Eq. 3); ``ratio``: by difflib's ratio (its released code).
        """
        words = dict.fromkeys(name_key(surface, self.normalization).split())
        lists = [self._entities_of[word] for word in words if word in self._entities_of]
        if n < 1 or not lists:
            return ()
        if match == "coverage":
            found = self._by_coverage(sorted(lists, key=len), n)
        else:
            found = self._by_ratio(surface.lower(), np.unique(np.concatenate(lists)), n)
        return tuple(self._names[entity] for entity in found)

    def neighbours(self, entities: Iterable[str]) -> tuple[Triple, ...]:
        """The triples with one of these entities at either end, each once, in order."""
        ids = (self._ids.get(name_key(name, self.normalization)) for name in entities)
        rows = {row for entity in ids if entity is not None for row in self._around[entity]}
        return tuple(self._triples[row] for row in sorted(rows))

    def statistics(self) -> dict[str, int]:
        """Distinct ``entities``, ``relations`` and ``triples`` (C2RAG, Table 4)."""
        facts = merge_sources(self._triples, self.normalization)
        relations = {name_key(fact.triple.relation, self.normalization) for fact in facts}
        return {"entities": len(self), "relations": len(relations), "triples": len(facts)}

    def _by_coverage(self, lists: Sequence[np.ndarray], n: int) -> np.ndarray:
        """``lists``: entities of each word, the rarest word first."""
        shared_E, found = self._shared_E, np.zeros(0, np.int32)
        for place, entities in enumerate(lists):
            rest = lists[place:]
            # Few were found and many could be added: nobody new shares more words than are left.
            if n <= len(found) < len(entities) // 4:
                shared = shared_E[found] + sum(_among(found, other) for other in rest)
                if np.count_nonzero(shared > len(rest)) >= n:
                    break
            new = entities[shared_E[entities] == 0]
            shared_E[entities] += 1
            found = np.concatenate([found, new])
        else:
            shared = shared_E[found]
        shared_E[found] = 0
        least = len(lists)
        while least > 1 and np.count_nonzero(shared >= least) < n:
            least -= 1
        near = shared >= least
        found, shared = found[near], shared[near].astype(np.int64)
        length = np.minimum(self._length_E[found], (1 << _LENGTH_BITS) - 1)
        order = (((-shared << _LENGTH_BITS) + length) << _ID_BITS) + found
        if len(order) > n:
            best = np.argpartition(order, n - 1)[:n]
            found, order = found[best], order[best]
        return found[np.argsort(order)]

    def _by_ratio(self, surface: str, found: np.ndarray, n: int) -> list[int]:
        # No two texts are more alike than the letters that they share; few are compared in full.
        letters_EL = self._letters_EL
        sought_L = _letters([surface])[0]
        in_common = np.minimum(letters_EL[found], sought_L).sum(1, dtype=np.int64)
        length = letters_EL[found].sum(1, dtype=np.int64) + sought_L.sum(dtype=np.int64)
        bound = 2 * in_common / length
        best: list[tuple[float, int]] = []
        for place in np.argsort(-bound, kind="stable"):
            if len(best) == n and bound[place] < best[-1][0]:
                break
            name = self._names[found[place]].lower()
            ratio = difflib.SequenceMatcher(None, surface, name).ratio()
            best = sorted([*best, (ratio, int(found[place]))], key=lambda b: (-b[0], b[1]))[:n]
        return [entity for _, entity in best]

    @functools.cached_property
    def _letters_EL(self) -> np.ndarray:
        return _letters([name.lower() for name in self._names])


def _invert(keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Word -> the places of the keys that have it, rising, int32."""
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, key in enumerate(keys):
        for word in set(key.split()):
            places[word].append(place)
    return {word: np.array(found, np.int32) for word, found in places.items()}


def _among(values: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """Of each value, whether it is in ``rising``."""
    place = np.searchsorted(rising, values)
    place[place == len(rising)] = 0
    return rising[place] == values


def _letters(names: Sequence[str]) -> np.ndarray:
    """How often each name has the characters of each of `_BINS` bins, uint16 ``[names, bins]``."""
    length = np.array([len(name) for name in names])
    code = np.frombuffer("".join(names).encode("utf-32-le", "surrogatepass"), np.uint32)
    cell = np.repeat(np.arange(len(names)), length) * _BINS + code % _BINS
    count = np.bincount(cell.astype(np.int64), minlength=len(names) * _BINS)
    return count.reshape(len(names), _BINS).astype(np.uint16)
