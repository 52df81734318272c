"""Compares a trained aligner with its initial model, one-shot retrieval and BM25."""

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from cirag_jax import sharding
from cirag_jax.commands import evaluation
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets import load
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.datasets.formats import trec
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import next_unit
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.recall import mean_scores, recall_at, set_scores
from cirag_jax.evaluation.scoring import Scoring
from cirag_jax.io import bar, say, write_lines
from cirag_jax.methods.baselines.hipporag2 import Hipporag2Config, search_graph
from cirag_jax.methods.common.evidence import Evidence
from cirag_jax.methods.kirag.method import kirag
from cirag_jax.methods.kirag.settings import KiragConfig, Ranking
from cirag_jax.models.io.encoder_adapter import base_model_of
from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.models.io.workdir import (
    open_encoder,
    trained_units,
    training_ids,
    training_record,
)
from cirag_jax.reports.tables import write_report
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encode import encode
from cirag_jax.retrieval.encoders import (
    Encoder,
    FlaxEncoder,
    MemoizingEncoder,
    Progress,
    Role,
    open_encoder_for,
    report_truncated,
    with_disk_cache,
)
from cirag_jax.retrieval.graph import GraphOptions, open_graph
from cirag_jax.retrieval.linked import LinkedIndex, SearchResult, open_link_head, require_link_head
from cirag_jax.retrieval.links import LinkWalk, WalkOptions
from cirag_jax.retrieval.rankers import BiEncoderRanker, TripleText, text_of
from cirag_jax.retrieval.search import ExactIndex, accelerators
from cirag_jax.retrieval.stopping import needed_rows
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
from cirag_jax.types import Config, Dataset, PositiveInt, Prediction, Question, UnitInterval
from cirag_jax.validation import check_value

_T = TypeVar("_T")

# All systems, the trained ones first.
SYSTEMS = (
    "linked", "trained", "frozen", "one_shot_trained", "one_shot_frozen", "bm25",
    "links", "links_one_shot_frozen", "links_trained", "graph_frozen",
)  # fmt: skip
_LEADING = ("linked", "trained")  # systems that are compared with all others
# Systems that follow title links -> the system whose top passages they start from.
_WALKS = {
    "links": "bm25",
    "links_one_shot_frozen": "one_shot_frozen",
    "links_trained": "trained",
}


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The questions with gold passages, and the corpus."""

    dataset: Dataset
    questions: tuple[Question, ...]
    corpus: Corpus
    texts: tuple[str, ...]
    allowed: tuple[np.ndarray, ...] | None  # allowed passages of each question
    kind: chains_lib.UnitKind


def evaluate(config: Config, workdir: pathlib.Path, show: bool = True) -> dict[str, Any]:
    """Measures passage recall and next-unit ranking of ``config.systems``.

    Writes ``rankings.jsonl`` (each system's ranking and chains for each question), ``SYSTEM.trec``,
    ``qrels.trec``, ``table.md`` and ``recall.png`` (also as SVG). ``show`` also prints the table.
    The result has differences with confidence intervals and ``num_trained_on``, the number of
    questions that the checkpoint was trained on, or None if the checkpoint does not record this.
    """
    _check_settings(config)
    start, ks = time.monotonic(), Scoring(recall_at=tuple(config.recall_at)).recall_at
    aligners = _Aligners(config, _systems(config))
    trained: Any = trained_units(config.checkpoint) if config.checkpoint else None
    problem = _problem_of(config, config.data.units or trained or "triple")
    runs = _read_runs(config, problem)
    num_trained_on = evaluation.count_trained_on(
        training_ids(config.checkpoint) if config.checkpoint else frozenset(),
        [question.id for question in problem.questions],
        "questions",
    )
    systems = _supported_systems(config, aligners, problem)
    rankings = _Rankings(config, problem, aligners, max(ks))
    ranked = {name: rankings.of(name) for name in systems} | runs
    systems = (*systems, *runs)

    ids = [passage.id for passage in problem.corpus.passages]
    records = _ranking_records(problem, ids, ranked, rankings.runs, max(ks))
    write_lines(workdir / "rankings.jsonl", records)
    _write_trec(problem, ids, ranked, max(ks), workdir)

    # ---- Scores ----------------------------------------------------------------------------------
    recalls = {
        system: {f"recall@{k}": _recalls(ranked[system], ids, problem.questions, k) for k in ks}
        for system in systems
    }
    ratios = {
        system: {name: mean_of(values) for name, values in recalls[system].items()}
        for system in systems
    }
    embeds = {name: aligners.embeds[name] for name in rankings.runs}
    result: dict[str, Any] = {
        **_means(recalls, slice(None)),
        "differences": evaluation.leads(config, ratios, _LEADING),
        "stops": _stops(config, problem, aligners, rankings, systems),
        "per_hop": _by_group(recalls, [question.hops for question in problem.questions]),
        "per_fold": _by_group(recalls, [question.fold for question in problem.questions]),
        "next_unit": _next_unit(problem, embeds, ks),
        "settings": _settings(config, problem, aligners),
        "num_questions": len(problem.questions),
        "num_trained_on": num_trained_on,
        "num_passages": len(problem.texts),
        "truncated_texts": report_truncated(*aligners.encoders),
    }
    result["seconds"] = round(time.monotonic() - start, 1)
    write_report(result, workdir, show)
    return result


def _check_settings(config: Config) -> None:
    """Checks the settings that are used only after the slow encoding."""
    check_at_least(1, config, "steps", "k", "bootstrap_samples")
    for name in ("query_max_length", "unit_max_length", "passage_max_length"):
        check_value(f"config.{name}", config[name], PositiveInt | None)
    for stop in config.stops:
        check_value("config.stops", stop, UnitInterval)
    check_value("config.ranking", config.ranking, Ranking)
    check_value("config.retriever", config.retriever, Literal["units", "aligner", "frozen"])
    WalkOptions.of(config.links)
    GraphOptions.of(config.graph)
    _graph_settings(config)


def _graph_settings(config: Config) -> Hipporag2Config:
    try:
        settings = Hipporag2Config(**config.hipporag2)
    except UserError as error:
        raise UserError(f"config.hipporag2: {error}") from None
    if settings.recognition != "score":
        raise UserError("config.hipporag2.recognition must be score; retrieval has no model")
    return settings


def _systems(config: Config) -> tuple[str, ...]:
    """Returns the systems to compare, by default all."""
    for system in config.systems:
        check_choice("config.systems", system, SYSTEMS)
    return tuple(name for name in SYSTEMS if name in (config.systems or SYSTEMS))


def _supported_systems(config: Config, aligners: "_Aligners", problem: _Problem) -> tuple[str, ...]:
    """Returns `_systems` without those that the model or the data does not support.

    ``linked`` needs a link head for these units, and ``graph_frozen`` needs triples.
    """
    head, systems = aligners.head, _systems(config)
    if not any(problem.dataset.triples.get(p.id) for p in problem.corpus.passages):
        if "graph_frozen" in config.systems:
            raise UserError(
                f"no passage of {problem.dataset.name} has triples, which the system graph_frozen "
                "needs; extract them (launch/extract.py) and set --config.data.triples=FOLDER"
            )
        systems = tuple(name for name in systems if name != "graph_frozen")
    if head is not None and head.units == problem.kind:
        return systems
    if head is not None and "linked" in config.systems:
        raise UserError(
            f"the link head of {config.checkpoint} was trained on {head.units}s; set "
            f"--config.data.units={head.units}"
        )
    return tuple(name for name in systems if name != "linked")


def _read_runs(config: Config, problem: _Problem) -> dict[str, list[list[int]]]:
    """Returns the rows of each question's passages for the run files ``NAME=FILE``."""
    row_of = {passage.id: row for row, passage in enumerate(problem.corpus.passages)}
    ids = [question.id for question in problem.questions]
    runs: dict[str, list[list[int]]] = {}
    for entry in config.runs:
        name, equals, file = str(entry).partition("=")
        if not equals or not name.isidentifier() or name in (*SYSTEMS, *runs):
            raise UserError(
                f"config.runs={entry!r} must be NAME=FILE, with a name of letters and digits that "
                "no other system has"
            )
        rankings = trec.read_run(pathlib.Path(file), ids, row_of)
        missing = sum(name not in rankings for name in ids)
        if missing == len(ids):
            raise UserError(f"{file} ranks passages for none of the {len(ids):,} questions")
        if missing:
            say(f"WARNING: {file} lacks {missing:,} of {len(ids):,} questions; their recall is 0")
        for question in ids:
            for passage in rankings.get(question, ()):
                if passage not in row_of:
                    raise UserError(
                        f"{file} ranks passage {passage!r} for question {question!r}, which the "
                        "corpus does not have"
                    )
        runs[name] = [[row_of[passage] for passage in rankings.get(name, ())] for name in ids]
    return runs


def _settings(config: Config, problem: _Problem, aligners: "_Aligners") -> dict[str, Any]:
    return {
        "steps": config.steps,
        "linked_steps": aligners.head.steps if aligners.head else None,
        "k": config.k,
        "units": problem.kind,
        "retriever": config.retriever,
        "ranking": config.ranking,
        "links": config.links.to_dict(),
        "graph": config.graph.to_dict(),
        "corpus": problem.corpus.policy,
        "runs": [str(entry).partition("=")[0] for entry in config.runs],
        "checkpoint": config.checkpoint,
        "step": aligners.meta.get("step"),
        "frozen": aligners.frozen,
        "data": problem.dataset.name,
        "split": config.data.split,
        "fold": config.data.fold,
        "setting": config.data.setting,
    }


def _problem_of(config: Config, kind: chains_lib.UnitKind) -> _Problem:
    dataset = load.load_dataset(config.data)
    selected = load.select_questions(dataset, config.data)
    questions = tuple(q for q in selected if q.supporting)
    if not questions:
        raise UserError(
            f"none of the {len(selected)} selected questions of {dataset.name} has gold passages "
            "(`supporting`), which recall needs"
        )
    corpus = load.select_corpus(dataset, questions, config.data)
    allowed = None
    if corpus.allowed is not None:
        allowed = tuple(corpus.allowed[q.id] for q in questions)
    texts = tuple(chains_lib.passage_text(passage) for passage in corpus.passages)
    return _Problem(dataset, questions, corpus, texts, allowed, kind)


class _Embedder(FlaxEncoder):
    """An encoder of queries and units with a progress bar."""

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """Embeds texts; see `Encoder`. Units are embedded as passages."""
        with bar(f"encoding, as {kind}", len(texts)) as shown:
            return super().encode(texts, kind, shown.update)


class _Aligners:
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


class _Rankings:
    """The rankings of the systems, computed on first use.

    Attributes:
      of: a function that returns the passage rows of a system for each question, best first.
      runs: predictions of iterative systems.
    """

    def __init__(self, config: Config, problem: _Problem, aligners: _Aligners, depth: int):
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
        settings = dataclasses.replace(
            _graph_settings(config), num_passages=self._depth, num_read=1
        )
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

    def _unit_index(self, name: str) -> UnitIndex:
        role = chains_lib.role_of(self._problem.kind)
        return UnitIndex(self._units, self._aligners.embeds_units(name), role)

    def _search(self, name: str) -> Search:
        index, encoder = self._index(name), self._aligners.embeds[name]
        return lambda queries, k, allowed, _: index.search(
            encoder.encode(queries, "query"), k, allowed
        )

    def _iterate(self, name: str) -> list[Prediction]:
        config, problem, encoder = self._config, self._problem, self._aligners.embeds[name]
        if config.retriever == "units":
            search = self._unit_index(name).search
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

    Args:
      questions: the questions, in the order of the predictions.
      dataset: the source of triples, if units are triples.
      corpus: the passages to search.
      search: returns rows of passages.
      aligner: embeds queries and units; use a `MemoizingEncoder`, because texts recur.
      settings: KiRAG's settings; they must not need a language model.
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


def _recalls(
    ranked: Sequence[Sequence[int]], ids: Sequence[str], questions: Sequence[Question], k: int
) -> np.ndarray:
    top_ids = [[ids[row] for row in rows[:k]] for rows in ranked]
    return np.array(
        [
            recall_at(top, q.supporting or (), k, passage_substitutes(q))
            for top, q in zip(top_ids, questions, strict=True)
        ]
    )


def _stops(
    config: Config,
    problem: _Problem,
    aligners: "_Aligners",
    rankings: "_Rankings",
    systems: Sequence[str],
) -> list[dict[str, Any]] | None:
    """Returns the `SetScores` of the linked search for each threshold of ``config.stops``.

    Returns None without a linked search or a stopping rule.
    """
    rule = aligners.head.stop if aligners.head else None
    if rule is None or "linked" not in systems:
        return None
    passages = problem.corpus.passages
    searches = [(found.rows, rule.probability(found.stop_KF)) for found in rankings.linked]
    stops = []
    for stop in config.stops:
        scores = [
            set_scores(
                [passages[row].id for row in needed_rows(rows, probability_K, stop)],
                question.supporting or (),
                passage_substitutes(question),
            )
            for (rows, probability_K), question in zip(searches, problem.questions, strict=True)
        ]
        stops.append({"stop": stop, **mean_scores(scores)._asdict()})
    return stops


_Recalls = Mapping[str, Mapping[str, np.ndarray]]  # system -> recall@K -> value per question


def _means(recalls: _Recalls, rows: slice | Sequence[int]) -> dict[str, dict[str, float]]:
    return {
        system: {name: float(values[rows].mean()) for name, values in by_name.items()}
        for system, by_name in recalls.items()
    }


def _by_group(recalls: _Recalls, groups: Sequence[int | str | None]) -> dict[str, Any]:
    """Returns mean recalls by group; ignores questions without a group."""
    rows_of: dict[int | str, list[int]] = {}
    for row, group in enumerate(groups):
        if group is not None:
            rows_of.setdefault(group, []).append(row)
    return {
        str(group): {"num_questions": len(rows_of[group]), **_means(recalls, rows_of[group])}
        for group in sorted(rows_of, key=str)
    }


def _next_unit(
    problem: _Problem, embeds: Mapping[str, Encoder], ks: Sequence[int]
) -> dict[str, Any] | None:
    """Returns MRR and Recall@K of the next unit among the candidates of its question."""
    try:
        chains = chains_lib.silver_chains(problem.dataset, problem.questions, problem.kind)
    except UserError:
        return None  # chains need more annotations than gold passages
    by_id = {question.id: question for question in problem.questions}
    pools = [
        chains_lib.pool_of(problem.dataset, by_id[chain.question_id], problem.kind)
        for chain in chains
    ]
    problems = next_unit.next_units(chains, pools, problem.kind)
    return {
        name: next_unit.evaluate_next_unit(
            problems,
            lambda texts, role, encode=encoder.encode: encode(
                texts, "query" if role == "query" else chains_lib.role_of(problem.kind)
            ),
            ks,
        )
        for name, encoder in embeds.items()
    }


def _write_trec(
    problem: _Problem,
    ids: Sequence[str],
    ranked: Mapping[str, Sequence[Sequence[int]]],
    depth: int,
    workdir: pathlib.Path,
) -> None:
    """Writes the ranking of each system, SYSTEM.trec, and the gold passages."""
    for system, rows_Q in ranked.items():
        rankings = {
            question.id: [ids[row] for row in rows[:depth]]
            for question, rows in zip(problem.questions, rows_Q, strict=True)
        }
        trec.write_run(workdir / f"{system}.trec", rankings, system)
    trec.write_qrels(workdir / trec.QRELS, problem.questions)


def _ranking_records(
    problem: _Problem,
    ids: Sequence[str],
    ranked: Mapping[str, Sequence[Sequence[int]]],
    runs: Mapping[str, Sequence[Prediction]],
    depth: int,
) -> Iterator[dict[str, Any]]:
    evidence = Evidence("unicode")
    evidence.add_retrieved(problem.corpus.passages)
    for index, question in enumerate(problem.questions):
        yield {
            "id": question.id,
            "question": question.question,
            "supporting": question.supporting,
            "ranked": {
                system: [ids[row] for row in rows[index][:depth]] for system, rows in ranked.items()
            },
            "chains": {
                name: [evidence.text(unit) for step in run[index].steps for unit in step.kept]
                for name, run in runs.items()
            },
        }
