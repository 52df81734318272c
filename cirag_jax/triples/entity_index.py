"""An index of the entities of triples, in which C2RAG looks up the names in its constraints.

An inverted index from words to entities limits a search to entities that share a word with the
name.
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

# One integer encodes the rank of a candidate: more shared words, shorter name, earlier entity.
_ID_BITS, _LENGTH_BITS = 26, 16
_BINS = 32  # Number of bins into which letters are counted.


class EntityIndex:
    """The entities of triples, identified by their normal forms.

    Args:
      triples: triples whose heads and tails are the entities; triples with an empty end are
        skipped.
      normalization: normalization of names before their words are compared.
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
        self._shared_E = np.zeros(len(self._names), np.int32)  # Zero between searches.

    def __len__(self) -> int:
        return len(self._names)

    @property
    def triples(self) -> Sequence[Triple]:
        """All indexed triples, in order."""
        return self._triples

    def anchors(self, surface: str, n: int, match: Match = "coverage") -> tuple[str, ...]:
        """Returns at most n entities that share a word with a name, the nearest first.

        ``coverage`` ranks entities by the share of the name's words that they contain; if tied,
        shorter entities rank first (C2RAG, Eq. 3). ``ratio`` ranks by difflib's ratio, as C2RAG's
        released code does.
        """
        words = dict.fromkeys(name_key(surface, self.normalization).split())
        lists = [self._entities_of[word] for word in words if word in self._entities_of]
        if n < 1 or not lists:
            return ()
        if match == "coverage":
            entities = self._by_coverage(sorted(lists, key=len), n)
        else:
            entities = self._by_ratio(surface.lower(), np.unique(np.concatenate(lists)), n)
        return tuple(self._names[entity] for entity in entities)

    def neighbors(self, entities: Iterable[str]) -> tuple[Triple, ...]:
        """Returns the distinct triples with one of these entities as head or tail, in order."""
        ids = (self._ids.get(name_key(name, self.normalization)) for name in entities)
        rows = {row for entity in ids if entity is not None for row in self._around[entity]}
        return tuple(self._triples[row] for row in sorted(rows))

    def statistics(self) -> dict[str, int]:
        """Counts distinct ``entities``, ``relations`` and ``triples`` (C2RAG, Table 4)."""
        facts = merge_sources(self._triples, self.normalization)
        relations = {name_key(fact.triple.relation, self.normalization) for fact in facts}
        return {"entities": len(self), "relations": len(relations), "triples": len(facts)}

    def _by_coverage(self, lists: Sequence[np.ndarray], n: int) -> np.ndarray:
        """Ranks entities; ``lists`` has the entities with each word, the rarest word first."""
        shared_E, candidates = self._shared_E, np.zeros(0, np.int32)
        for place, entities in enumerate(lists):
            rest = lists[place:]
            # Stops if n candidates share more words than new candidates could. This is tested only
            # if the test is cheaper than adding the new candidates.
            if n <= len(candidates) < len(entities) // 4:
                shared = shared_E[candidates] + sum(_is_in(candidates, other) for other in rest)
                if np.count_nonzero(shared > len(rest)) >= n:
                    break
            new = entities[shared_E[entities] == 0]
            shared_E[entities] += 1
            candidates = np.concatenate([candidates, new])
        else:
            shared = shared_E[candidates]
        shared_E[candidates] = 0
        min_shared = len(lists)
        while min_shared > 1 and np.count_nonzero(shared >= min_shared) < n:
            min_shared -= 1
        near = shared >= min_shared
        candidates, shared = candidates[near], shared[near].astype(np.int64)
        length = np.minimum(self._length_E[candidates], (1 << _LENGTH_BITS) - 1)
        order = (((-shared << _LENGTH_BITS) + length) << _ID_BITS) + candidates
        if len(order) > n:
            best = np.argpartition(order, n - 1)[:n]
            candidates, order = candidates[best], order[best]
        return candidates[np.argsort(order)]

    def _by_ratio(self, surface: str, candidates: np.ndarray, n: int) -> list[int]:
        # Shared letters give an upper bound of the ratio, so that few ratios are computed.
        letters_EL = self._letters_EL
        surface_L = _letters([surface])[0]
        in_common = np.minimum(letters_EL[candidates], surface_L).sum(1, dtype=np.int64)
        length = letters_EL[candidates].sum(1, dtype=np.int64) + surface_L.sum(dtype=np.int64)
        bound = 2 * in_common / length
        best: list[tuple[float, int]] = []
        for place in np.argsort(-bound, kind="stable"):
            if len(best) == n and bound[place] < best[-1][0]:
                break
            entity = int(candidates[place])
            name = self._names[entity].lower()
            ratio = difflib.SequenceMatcher(None, surface, name).ratio()
            best = sorted([*best, (ratio, entity)], key=lambda b: (-b[0], b[1]))[:n]
        return [entity for _, entity in best]

    @functools.cached_property
    def _letters_EL(self) -> np.ndarray:
        return _letters([name.lower() for name in self._names])


def _invert(keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns word -> sorted indices of the keys that contain it, int32."""
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, key in enumerate(keys):
        for word in set(key.split()):
            places[word].append(place)
    return {word: np.array(indices, np.int32) for word, indices in places.items()}


def _is_in(values: np.ndarray, sorted_values: np.ndarray) -> np.ndarray:
    """Returns whether each value is in ``sorted_values``."""
    place = np.searchsorted(sorted_values, values)
    place[place == len(sorted_values)] = 0
    return sorted_values[place] == values


def _letters(names: Sequence[str]) -> np.ndarray:
    """Counts the characters of each name in `_BINS` bins; returns uint16 ``[names, bins]``."""
    length = np.array([len(name) for name in names])
    code = np.frombuffer("".join(names).encode("utf-32-le", "surrogatepass"), np.uint32)
    bin_index = np.repeat(np.arange(len(names)), length) * _BINS + code % _BINS
    count = np.bincount(bin_index.astype(np.int64), minlength=len(names) * _BINS)
    return count.reshape(len(names), _BINS).astype(np.uint16)
