"""Which passages of a corpus are still to be extracted."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from cirag_jax.errors import UserError
from cirag_jax.methods.extraction import UNREADABLE
from cirag_jax.triples.store import Entry, TripleStore, batches
from cirag_jax.types import Passage

RETRIES = ("never", "errors", "all")
Need = Literal["none", "extract", "retry"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What decides whether a passage is extracted.

    Attributes:
        store: What there is; None: nothing yet.
        identity: Who would extract.
        retry: Failed passages to try again: ``never``, those whose request failed (``errors``: a
            server that was away), or ``all``, unreadable answers too.
        replace: Extract again what another model or prompt extracted.
        limit: Only the first passages of those in question; 0: all.
        only: Ids of the passages in question; None: the whole corpus.
    """

    store: TripleStore | None
    identity: Mapping[str, Any]
    retry: str
    replace: bool
    limit: int
    only: Collection[str] | None = None

    def needs(self, passages: Iterable[Passage]) -> Iterator[tuple[Passage, Need]]:
        """Every passage in question, and what it needs.

        Raises:
            UserError: Another model extracted one of them, and ``replace`` is not set.
        """
        chosen = (p for p in passages if self.only is None or p.id in self.only)
        chosen = itertools.islice(chosen, self.limit or None)
        for batch in batches(chosen, 500):
            entries = self.store.entries(p.id for p in batch) if self.store else {}
            for passage in batch:
                yield passage, self._need(passage, entries.get(passage.id))

    def _need(self, passage: Passage, entry: Entry | None) -> Need:
        if entry is None or self.store is None or not self.store.is_current(entry, passage):
            return "extract"
        extractor = self.store.extractor(entry)
        if "import" in extractor:  # given by the user: as good as extracted
            return "none"
        if extractor != self.identity:
            if not self.replace:
                raise UserError(
                    f"{self.store.folder} holds triples by {describe(extractor)}, and the config "
                    f"asks for {describe(self.identity)}; --config.replace=true extracts them "
                    "again, another --workdir keeps them."
                )
            return "extract"
        if entry.status == "failed" and self._again(entry.cause or ""):
            return "retry"
        return "none"

    def _again(self, cause: str) -> bool:
        if self.retry == "errors":
            return not cause.startswith(UNREADABLE)
        return self.retry == "all"


def describe(identity: Mapping[str, Any]) -> str:
    """An extractor in a few words."""
    return ", ".join(f"{name} {value}" for name, value in identity.items())
