"""The passages of a corpus that an extraction still has to do."""

import dataclasses
import itertools
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cirag_jax.datasets.corpus import WHOLE
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.load import load_dataset, select_corpus, select_questions
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.methods.common import extraction
from cirag_jax.triples.store import TripleStore, content_hash
from cirag_jax.types import Config, Passage


def selected_passages(config: Config) -> Collection[str] | None:
    """Returns the ids of the passages that ``config.data`` selects; None for all passages."""
    data = config.data
    if data.corpus == WHOLE:
        filters = [name for name in ("split", "fold", "setting", "ids", "limit") if data[name]]
        if filters:
            raise UserError(
                f"config.data.{filters[0]} selects questions, but config.data.corpus={WHOLE} uses "
                "all passages; set config.data.corpus=selected_questions to extract the passages "
                "of their contexts."
            )
        return None
    dataset = load_dataset(data)
    questions = select_questions(dataset, data)
    return frozenset(passage.id for passage in select_corpus(dataset, questions, data).passages)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The passages of a corpus from which to extract triples.

    Attributes:
        config: see configs/extract.py.
        identity: the identity of the extractor.
        corpus: all passages.
        store: the existing store, if any.
        only: ids of the selected passages; None for the complete corpus.
        share: (index of this process, number of processes).
    """

    config: Config
    identity: Mapping[str, Any]
    corpus: CorpusScan
    store: TripleStore | None
    only: Collection[str] | None
    share: tuple[int, int]

    def chosen(self) -> Iterator[Passage]:
        """Yields this process's share of the selected passages, in the order of the corpus."""
        index, count = self.share
        chosen = (p for p in self.corpus if self.only is None or p.id in self.only)
        for passage in itertools.islice(chosen, self.config.limit or None):
            # By id, so that a passage stays with its process if the corpus changes.
            if zlib.crc32(passage.id.encode("utf-8", "replace")) % count == index:
                yield passage

    def pending(self) -> Iterator[Passage]:
        """Yields the chosen passages without an up-to-date result."""
        return filter(self.is_pending, self.chosen())

    def blocks(self) -> Iterator[tuple[str, list[Passage]]]:
        """Yields blocks of pending passages, with the name of each block.

        The chosen passages are divided into blocks of ``config.block``. If all passages of a block
        are pending, the block is yielded unchanged, under the same name in every run, so a resumed
        run finds the block's journal. The remaining pending passages are regrouped into blocks.
        """
        chosen, size, rest = self.chosen(), self.config.block, list[Passage]()
        for number in itertools.count():
            part = list(itertools.islice(chosen, size))
            pending = [passage for passage in part if self.is_pending(passage)]
            if part and len(pending) == len(part):
                yield f"{number:08d}", part
                continue
            rest += pending
            if len(rest) >= size or (rest and not part):
                yield f"{number:08d}-rest", rest[:size]
                del rest[:size]
            if not part:
                return

    def is_pending(self, passage: Passage) -> bool:
        """Returns whether a passage has no up-to-date result."""
        entry = self.store.entry(passage.id) if self.store else None
        if self.store is None or entry is None or entry.hash != content_hash(passage):
            return True
        if "import" in entry.extractor:  # imported triples are up to date
            return False
        if entry.extractor != self.identity:
            if not self.config.replace:
                remedy = "set --config.replace=true to extract again, or use another --workdir"
                if "extractor" not in entry.extractor:
                    raise UserError(
                        f"{self.store.path} was written by an earlier version, which did not "
                        f"record the full identity of the extractor; {remedy}."
                    )
                check_same(self.store.path, entry.extractor, self.identity, remedy)
            return True
        if self.config.retry == "errors":  # an unreadable answer would not change
            return bool(entry.cause) and not entry.cause.startswith(extraction.UNREADABLE)
        return self.config.retry == "all" and entry.status == "failed"
