"""The systems that the evaluation of retrieval compares: their encoders and rankings."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cirag_jax import sharding
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.io import bar
from cirag_jax.methods.baselines.hipporag2 import Hipporag2Config, search_graph
from cirag_jax.methods.kirag.method import kirag
from cirag_jax.methods.kirag.settings import KiragConfig
from cirag_jax.models.io.encoder_adapter import base_model_of
from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.models.io.workdir import open_encoder, training_record
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encode import encode
from cirag_jax.retrieval.encoders import (
    Encoder,
    FlaxEncoder,
    MemoizingEncoder,
    Progress,
    Role,
    open_encoder_for,
    with_disk_cache,
)
from cirag_jax.retrieval.graph import open_graph
from cirag_jax.retrieval.linked import LinkedIndex, SearchResult, open_link_head, require_link_head
from cirag_jax.retrieval.links import LinkWalk, WalkOptions
from cirag_jax.retrieval.rankers import BiEncoderRanker, TripleText, text_of
from cirag_jax.retrieval.search import ExactIndex, accelerators
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.runtime.handlers import (
    ExtractHandler,
    LinkHandler,
    RankHandler,
    RetrieveHandler,
    Search,
    WalkHandler,
)
from cirag_jax.runtime.requests import Extract, Link, Program, Retrieve, Walk
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.sqlite import MEMORY
from cirag_jax.types import Config, Dataset, Prediction, Question

_T = TypeVar("_T")

# Systems that follow title links -> the system whose top passages they start from.
_WALKS = {
    "links": "bm25",
    "links_one_shot_frozen": "one_shot_frozen",
    "links_trained": "trained",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The questions with gold passages, and the corpus."""

    dataset: Dataset
    questions: tuple[Question, ...]
    corpus: Corpus
    texts: tuple[str, ...]
    allowed: tuple[np.ndarray, ...] | None  # allowed passages of each question
    kind: chains_lib.UnitKind


def graph_settings(config: Config) -> Hipporag2Config:
    """Returns the settings of ``graph_frozen``."""
    try:
        settings = Hipporag2Config(**config.hipporag2)
    except UserError as error:
        raise UserError(f"config.hipporag2: {error}") from None
    if settings.recognition != "score":
        raise UserError("config.hipporag2.recognition must be score; retrieval has no model")
    return settings


class _Embedder(FlaxEncoder):
    """An encoder of queries and units with a progress bar."""

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """Embeds texts; see `Encoder`. Units are embedded as passages."""
        with bar(f"encoding, as {kind}", len(texts)) as shown:
            return super().encode(texts, kind, shown.update)


class Aligners:
    """The encoders that the systems need: the trained aligner and its initial model.

    Attributes:
      meta: metadata of the checkpoint.
      head: link head of the checkpoint; None if it is not needed.
      frozen: name of the initial model.
      embeds: the encoders ``trained`` and ``frozen``, which cache vectors.
    """

    def __init__(self, config: Config, systems: Sequence[str]):
        self._passage_max_length = config.passage_max_length
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        self._mesh = mesh if mesh.size > 1 else None
        open_model = functools.partial(open_encoder, dtype=config.dtype, mesh=self._mesh)
        self._encoders: dict[str, TextEncoder] = {}
        self.meta: dict[str, Any] = {}
        if config.checkpoint:
            self._encoders["trained"], self.meta = open_model(config.checkpoint)
        elif any("trained" in system or system == "linked" for system in systems):
            raise UserError("config.checkpoint is required: a training workdir or a model folder")
        self.head = None
        if config.checkpoint and "linked" in systems:
            find = require_link_head if "linked" in config.systems else open_link_head
            self.head = find(config.checkpoint)
        if config.frozen and config.encoder.model:
            raise UserError("config.frozen and config.encoder.model are alternatives; set only one")
        self.frozen = config.frozen or config.encoder.model or self.meta.get("model")
        if config.checkpoint and not self.frozen:
            self.frozen = base_model_of(config.checkpoint)
        if config.retriever == "frozen" or any("frozen" in system for system in systems):
            if not self.frozen:
                raise UserError(
                    "config.frozen is required, because config.checkpoint="
                    f"{config.checkpoint or 'null'} does not record its initial model"
                )
            if not config.encoder.model:
                self._encoders["frozen"], _ = open_model(self.frozen)
        trained = training_record(config.checkpoint) if config.checkpoint else {}
        options: Any = {
            "query_max_length": config.query_max_length or trained.get("query_max_length"),
            "passage_max_length": config.unit_max_length or trained.get("unit_max_length"),
            "mesh": self._mesh,
        }
        self.embeds: dict[str, Encoder] = {
            name: MemoizingEncoder(_Embedder(encoder, **options))
            for name, encoder in self._encoders.items()
        }
        self._passages: Encoder | None = None  # The encoder of passages, if it is another one.
        if config.encoder.model:
            units, passages = (
                {"query_max_length": config.query_max_length, "passage_max_length": length}
                for length in (config.unit_max_length, config.passage_max_length)
            )
            self.embeds["frozen"] = MemoizingEncoder(self._open(config, units))
            if units != passages:
                self._passages = self._open(config, passages)

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """All encoders."""
        return (*self.embeds.values(), *([self._passages] if self._passages else []))

    def _open(self, config: Config, lengths: Mapping[str, int | None]) -> Encoder:
        """Opens ``config.encoder`` with the limits of this evaluation, where they are set."""
        block = config.encoder.copy_and_resolve_references()
        block.update({name: value for name, value in lengths.items() if value is not None})
        return open_encoder_for(block, self._mesh)

    def embeds_units(self, name: str) -> Encoder:
        """Returns an encoder for all units; with a link head, its vectors are cached on disk."""
        return self.embeds[name] if self.head is None else with_disk_cache(self.embeds[name])

    def index(self, name: str, texts: Sequence[str]) -> ExactIndex:
        """Returns an index over passages."""
        with bar(f"encoding, {name}", len(set(texts)), "passage") as shown:
            if name not in self._encoders:
                encoder = self._passages or self.embeds[name]
                vectors_ND = encoder.encode(texts, "passage", shown.update)
                return ExactIndex(vectors_ND, mesh=accelerators())
            return ExactIndex(
                encode(
                    self._encoders[name],
                    None,
                    texts,
                    max_length=self._passage_max_length,
                    mesh=self._mesh,
                    progress=shown.update,
                    truncated=self.embeds[name].truncated,
                ),
                mesh=accelerators(),
            )


class Rankings:
    """The rankings of the systems, computed on first use.

    Attributes:
      of: a function that returns the passage rows of a system for each question, best first.
      runs: predictions of iterative systems.
    """

    def __init__(self, config: Config, problem: Problem, aligners: Aligners, depth: int):
        self._config, self._problem, self._aligners, self._depth = config, problem, aligners, depth
        self._texts = [question.question for question in problem.questions]
        self.runs: dict[str, list[Prediction]] = {}
        self.of = functools.cache(self._rank)
        self._index = functools.cache(lambda name: aligners.index(name, problem.texts))

    def _rank(self, system: str) -> list[list[int]]:
        texts, allowed = self._texts, self._problem.allowed
        if system == "bm25":
            return _ranked_rows(BM25(self._problem.texts).search(texts, self._depth, allowed)[0])
        if system in _WALKS:
            return self._walk.search(texts, self.of(_WALKS[system]), self._depth, allowed)
        if system == "graph_frozen":
            return self._walk_graph()
        if system == "linked":
            return [found.rows[: self._depth] for found in self.linked]
        if system in ("trained", "frozen"):
            self.runs[system] = self._iterate(system)
            row_of = {passage.id: row for row, passage in enumerate(self._problem.corpus.passages)}
            return [[row_of[id] for id in found.passages] for found in self.runs[system]]
        name = system.removeprefix("one_shot_")
        query_QD = self._aligners.embeds[name].encode(texts, "query")
        return _ranked_rows(self._index(name).search(query_QD, self._depth, allowed)[0])

    def _walk_graph(self) -> list[list[int]]:
        """Returns the rankings of HippoRAG 2 with recognition by score."""
        config, corpus = self._config, self._problem.corpus
        settings = dataclasses.replace(graph_settings(config), num_passages=self._depth, num_read=1)
        encoder, search = self._aligners.embeds["frozen"], self._search("frozen")
        graph = open_graph(config.graph, corpus.passages, self._problem.dataset.triples, encoder)
        handlers: dict[type | str, Handler] = {
            Retrieve: RetrieveHandler(search, corpus.passages, corpus.allowed),
            Link: LinkHandler(graph, corpus.allowed),
            Walk: WalkHandler(graph, search, corpus.passages, corpus.allowed),
        }
        row_of = {passage.id: row for row, passage in enumerate(corpus.passages)}

        def rank(question: Question) -> Program[list[int]]:
            errors = collections.Counter[str]()
            retrieved, _ = yield from search_graph(question.question, settings, errors)
            return [row_of[passage.id] for passage in retrieved.passages]

        return _run(rank, self._problem.questions, handlers)

    @functools.cached_property
    def _walk(self) -> LinkWalk:
        return LinkWalk(self._problem.corpus.passages, WalkOptions.of(self._config.links))

    @functools.cached_property
    def _units(self) -> list[list[str]]:
        """The units of each passage."""
        problem = self._problem
        return [
            [unit.text for unit in chains_lib.units_of(problem.dataset, passage.id, problem.kind)]
            for passage in problem.corpus.passages
        ]

    @functools.cached_property
    def linked(self) -> list[SearchResult]:
        """The results of a linked search."""
        head = self._aligners.head
        assert head is not None
        index = LinkedIndex(
            self._problem.corpus.passages,
            self._units,
            self._aligners.embeds_units("trained"),
            head,
            self._problem.kind,
            steps=head.steps,
            options=WalkOptions.of(self._config.links),
        )
        return index.explore(self._texts, head.score, self._problem.allowed)

    def _search(self, name: str) -> Search:
        index, encoder = self._index(name), self._aligners.embeds[name]
        return lambda queries, k, allowed, _: index.search(
            encoder.encode(queries, "query"), k, allowed
        )

    def _iterate(self, name: str) -> list[Prediction]:
        config, problem, encoder = self._config, self._problem, self._aligners.embeds[name]
        if config.retriever == "units":
            role = chains_lib.role_of(problem.kind)
            search = UnitIndex(self._units, self._aligners.embeds_units(name), role).search
        else:
            search = self._search(name if config.retriever == "aligner" else "frozen")
        return iterate(
            problem.questions,
            problem.dataset,
            problem.corpus,
            search,
            encoder,
            KiragConfig(
                max_steps=config.steps,
                num_passages=config.k,
                num_candidates=0,
                units=problem.kind,
                use_constructor=False,
                accumulate=True,
                ranking=config.ranking,
                reader="nothing",
            ),
        )


def iterate(
    questions: Sequence[Question],
    dataset: Dataset,
    corpus: Corpus,
    search: Search,
    aligner: Encoder,
    settings: KiragConfig,
) -> list[Prediction]:
    """Runs KiRAG's loop without a language model, on all questions at once.

    The predictions have the order of ``questions``. ``search`` returns rows of passages. Use a
    `MemoizingEncoder` as ``aligner``, because texts recur. ``settings`` must not need a language
    model.
    """
    write = functools.partial(text_of, write_triple=TripleText("angle"))
    handlers: dict[type | str, Handler] = {
        Retrieve: RetrieveHandler(search, corpus.passages, corpus.allowed),
        Extract: ExtractHandler(lambda ids: {i: dataset.triples.get(i) for i in ids}),
        "rankers.aligner": RankHandler(BiEncoderRanker(aligner, write)),
    }
    return _run(lambda question: kirag(question, settings), questions, handlers)


def _run(
    program: Callable[[Question], Program[_T]],
    questions: Sequence[Question],
    handlers: Mapping[type | str, Handler],
) -> list[_T]:
    """Returns the result of the program for each question."""
    results: dict[str, _T] = {}

    def run(question: Question) -> Program[None]:
        results[question.id] = yield from program(question)

    jobs = [Job(q.id, None, functools.partial(run, q)) for q in questions]
    with Runner(MEMORY, {}, lambda *_: handlers, in_flight=len(jobs)) as runner:
        runner.run(jobs)
    return [results[question.id] for question in questions]


def _ranked_rows(row_QK: np.ndarray) -> list[list[int]]:
    return [[int(row) for row in rows if row >= 0] for rows in row_QK]
