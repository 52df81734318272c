"""Loads the models and indexes that handle the requests of a method."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from cirag_jax import cli
from cirag_jax.commands import backends, identity, online
from cirag_jax.commands import task as task_lib
from cirag_jax.commands.pool import Pool
from cirag_jax.datasets import corruption, triple_files
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import say
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Usage
from cirag_jax.methods import prompt_digests
from cirag_jax.methods.cirag import routing
from cirag_jax.methods.common import extraction, own_prompts
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.registry import block_name, method_block
from cirag_jax.models.io import workdir
from cirag_jax.models.router import load_router
from cirag_jax.retrieval.encoders import Encoder, with_disk_cache
from cirag_jax.retrieval.graph import TripleGraph, open_graph
from cirag_jax.retrieval.index import (
    PassageIndex,
    hash_corpus,
    open_retriever,
    refuse_large,
    require_encoder,
)
from cirag_jax.retrieval.linked import LinkedIndex, require_link_head
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.retrieval.rankers import Ranker, check_ranker, check_units, open_ranker
from cirag_jax.retrieval.run_index import RUN, RunIndex
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.runtime import handlers as handlers_lib
from cirag_jax.runtime import requests
from cirag_jax.runtime.requests import Needs
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Dataset


def check(config: Config, needs: Needs) -> None:
    """Checks that a config meets the needs of its method, before any model is loaded."""
    check_at_least(1, config, "in_flight")
    if jax.process_count() > 1:
        task_lib.refuse_budgets(config)
    for name in needs.rankers:
        check_ranker(config.rankers[name], name)
        if needs.units is not None:
            check_units(config, name, needs.units)
    for role, abilities in needs.abilities.items():
        backends.check_abilities(config, role, abilities)
    if (needs.entities is not None or needs.graph) and config.triples == ONLINE:
        raise UserError(
            f"config.triples={ONLINE} extracts only retrieved passages, but {config.method} needs "
            "the entities of all passages; extract triples first (launch/extract.py)."
        )
    if needs.feedback and config.retriever.kind in ("bm25", "linked", RUN):
        raise UserError(
            f"config.retriever.kind={config.retriever.kind} does not support relevance feedback, "
            f"which {config.method} needs; choose another kind."
        )
    if needs.feedback and config.retriever.units != "passage":
        raise UserError(
            f"config.retriever.units={config.retriever.units} does not support relevance feedback, "
            f"which {config.method} needs; choose units=passage."
        )
    if needs.index and config.retriever.kind == RUN and not config.retriever.folder:
        raise UserError(f"config.retriever.kind={RUN} needs a run file: config.retriever.folder")
    if needs.index and config.retriever.kind == "linked":
        if config.encoder.backend != "flax":
            raise UserError(
                "config.retriever.kind=linked needs the weights of an aligner and its link head: "
                f"config.encoder.backend=flax, not {config.encoder.backend}."
            )
        require_link_head(config.encoder.model)


def open_handlers(
    config: Config,
    task: task_lib.Task,
    stack: contextlib.ExitStack,
    journal: Journal,
    *,
    rows: int,
    pool: Pool | None = None,
) -> dict[type | str, Handler]:
    """Loads the models and indexes of a run; returns the handlers of its requests.

    Args:
      config: a config of configs/methods.
      task: the questions and passages.
      stack: closes everything that is opened.
      journal: the run's journal. Its usage counts against budgets, and triples that are extracted
        online are stored next to it.
      rows: the maximum number of questions in progress, which limits the models' batch size.
      pool: models and indexes that several runs share.
    """
    pool = stack.enter_context(Pool()) if pool is None else pool
    handlers: dict[type | str, Handler] = {}
    needs, corpus = task.needs, task.corpus
    roles = task_lib.roles_of(config, needs)
    check_task(config, task)
    if needs.corpus:
        handlers[requests.Fetch] = handlers_lib.FetchHandler(corpus.passages)
        say(f"{len(corpus.passages):,} passages")
    # Fast and error-prone steps come first, embedding the corpus last.
    encoder = pool.encoder(config.encoder) if task_lib.needs_encoder(config, needs) else None
    if needs.triples and config.triples != ONLINE:
        source = _open_triples(config, task.dataset, corpus)
        corrupted = read_corrupted(config, needs)
        handlers[requests.Extract] = handlers_lib.ExtractHandler(source, corrupted)
        if needs.entities is not None:
            triples = source([passage.id for passage in corpus.passages]).values()
            index = EntityIndex(itertools.chain(*filter(None, triples)), needs.entities)
            say(", ".join(f"{count:,} {name}" for name, count in index.statistics().items()))
            handlers[requests.Anchor] = handlers_lib.AnchorHandler(index)
    for name in needs.rankers:
        handlers[f"rankers.{name}"] = handlers_lib.RankHandler(pooled_ranker(config, name, pool))
    if "extractor" in roles:
        block = config.extractor
        settings = extraction.ExtractionSettings(
            entity_tokens=block.entity_tokens,
            triple_tokens=block.max_tokens,
            grounded=block.grounded,
            dialect=block.dialect,
        )
        extraction.check_adapter(block, settings)
        path = journal.path.with_name(journal.path.name.replace("journal", online.NAME))
        with own_prompts.active(task.own_prompts):
            identity_of_extractor = identity.of_extractor(block, settings)
        runner = Runner(
            path,
            identity_of_extractor,
            lambda *_: {"extractor": handlers["extractor"]},
            in_flight=256,
            encode=extraction.encode_extraction,
            replace=journal.replace,
        )
        extractions = stack.enter_context(runner)
        spent = {**journal.usage(), **extractions.journal.usage()}
        handlers |= _open_models(config, needs, roles, stack, rows, spent, pool)
        extractor: Any = handlers["extractor"]
        handlers[requests.Extract] = online.OnlineExtractHandler(
            extractor, extractions, settings, task.own_prompts
        )
    else:
        handlers |= _open_models(config, needs, roles, stack, rows, journal.usage(), pool)
    if needs.router:
        query_encoder = require_encoder(encoder, "router")
        router = load_router(
            method_block(config)["router"], query_encoder.identity, routing.NUM_SCALARS
        )
        handlers[requests.Route] = handlers_lib.RouteHandler(router, query_encoder)
    if needs.demonstrations:
        examples = task_lib.demonstrations(task)
        if not examples:
            say(f"{task.dataset.name} has no training questions to use as demonstrations")
        handlers[requests.Demonstrate] = handlers_lib.DemonstrateHandler(
            examples, require_encoder(encoder, "demonstrations")
        )
    if needs.index:
        index = _open_index(config, task, encoder, pool)
        handlers[requests.Retrieve] = handlers_lib.RetrieveHandler(
            index.search, corpus.passages, corpus.allowed
        )
        if needs.graph:
            refuse_large(corpus.passages, f"the graph of {config.method}")
            graph = _open_graph(config, task, require_encoder(encoder, "graph"), pool)
            handlers[requests.Link] = handlers_lib.LinkHandler(graph, corpus.allowed)
            handlers[requests.Walk] = handlers_lib.WalkHandler(
                graph, index.search, corpus.passages, corpus.allowed
            )
    if needs.links:
        refuse_large(corpus.passages, f"the title links of {config.method}")
        key = hash_corpus(corpus.passages)
        titles = pool.get("title indexes", key, lambda: TitleIndex(corpus.passages))
        handlers[requests.Follow] = handlers_lib.FollowHandler(
            titles, corpus.passages, corpus.allowed
        )
    return handlers


def check_task(config: Config, task: task_lib.Task) -> None:
    """Checks adapters, token limits, and that there are triples if the method needs any."""
    roles = task_lib.roles_of(config, task.needs)
    check_adapters(config, roles)
    for role in roles:
        if task_lib.most_tokens(config, role) < 1:
            raise UserError(f"config.{role}.max_tokens must be at least 1.")
    if not task.needs.triples or config.triples == ONLINE or triple_files.is_store(config.triples):
        return
    if not any(passage.id in task.dataset.triples for passage in task.corpus.passages):
        own = "units" in method_block(config) and "." not in config.method
        name = config.method if own else "cirag"
        alternative = f"--config=configs/methods/{name}.py:small"
        if "teacher" in config:  # a config of configs/trajectories.py
            alternative = (
                "--config.cirag.units=sentence --config.cirag.prompt_format=compact "
                "--config.encoder.model=shipped:aligner --config.retriever.units=sentence"
            )
        raise UserError(
            f"no passage of {task.dataset.name} has triples; extract them (launch/extract.py) and "
            f"set --config.data.triples=FOLDER, or use {alternative}, which needs no triples."
        )


def extractors_of(config: Config) -> tuple[str, ...]:
    """Returns the extractors of a run's triples, if known: model and dialect."""
    if config.get("triples") != ONLINE:
        return triple_files.extractors_of(config.get("triples"))
    name = backends.model_name(config.extractor) or "the default model"
    return (f"{name}, dialect={config.extractor.dialect}",)


def warn_of_other_inputs(config: Config, task: task_lib.Task) -> None:
    """Warns of a trained integrator or aligner that learned from other inputs than it gets now.

    The checkpoint of an integrator records the settings of its trajectories: L, K and N, the
    encoder, and the extractors of the triples. An aligner's records the extractors.
    """
    here: dict[str, tuple[str, Any]] = {}  # by the name in the record: name in messages, value
    if task.needs.triples:
        here["triples"] = "triples of", " and ".join(extractors_of(config)) or None
        for name in task.needs.rankers:
            spec = str(config.rankers[name].get("model") or config.encoder.model)
            if config.rankers[name].kind in ("bi_encoder", "aligner"):
                _warn_of_inputs(spec, workdir.training_record(spec), here)
    block, block_path = method_block(config), f"config.{block_name(config.method)}"
    for _, spec, meta in _students(config, task.needs.roles):
        if "method" in (meta.get("prompt") or {}):
            settings = cli.jsonable(task_lib.plain(block))
            paths = {field: (f"{block_path}.{field}", value) for field, value in settings.items()}
            _warn_of_inputs(spec, meta, paths)
    role = config.get("integrator")
    if "integrator" in task.needs.roles and role.backend != "openai" and role.adapter:
        meta = workdir.check_role(role.adapter, "integrator")
        for field in ("num_candidates", "num_passages", "max_steps"):
            if field in block:
                here[field] = f"{block_path}.{field}", block[field]
        if block.get("num_candidates", 0) > (meta.get("num_candidates") or 0) > 0:
            del here["num_candidates"]  # `check_adapters` warns of more candidates.
        here["encoder"] = "config.encoder.model", config.encoder.model
        _warn_of_inputs(role.adapter, meta, here)


def _students(config: Config, roles: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the roles with a trained model: role, its workdir or folder, training metadata."""
    for role in roles:
        if spec := workdir.trained_spec(config[role]):
            yield role, spec, workdir.check_role(spec, role)


def _warn_of_inputs(
    spec: str, meta: Mapping[str, Any], here: Mapping[str, tuple[str, Any]]
) -> None:
    trained: Mapping[str, Sequence[Any]] = meta.get("inputs") or {}
    differing = [
        f"{shown} {' or '.join(map(str, trained[name]))} (now {value})"
        for name, (shown, value) in here.items()
        if value is not None and trained.get(name) and value not in trained[name]
    ]
    if differing:
        say(f"WARNING: {spec} was trained with other inputs: {'; '.join(differing)}")


def check_adapters(config: Config, roles: Sequence[str]) -> None:
    """Checks that students were trained for their roles and with the same prompt settings.

    Showing more candidates than in training only causes a warning.
    """
    for role, spec, meta in _students(config, roles):
        if role in workdir.roles_of(meta):
            check_prompts(spec, meta)
        if "method" in (meta.get("prompt") or {}):
            _check_method(config, role, spec, meta["prompt"])
            continue
        if role not in ("integrator", "reader"):
            continue
        block, name = method_block(config), f"config.{block_name(config.method)}"
        trained = meta.get("prompt") or {}
        if role == "integrator" and trained:
            trained = {"units": "triple", **trained}  # older checkpoints do not record the units
        wrong = [field for field, value in trained.items() if block.get(field, value) != value]
        _check_none(wrong, spec, name, trained)
        number, limit = block.get("num_candidates", 0), meta.get("num_candidates") or 0
        if limit and number > limit:
            say(
                f"WARNING: {name}.num_candidates={number}, but {spec} was trained with at most "
                f"{limit}"
            )


def _check_none(wrong: Sequence[str], spec: str, name: str, trained: Mapping[str, Any]) -> None:
    """Raises `UserError` if settings in the block ``name`` differ from those in training."""
    if wrong:
        flags = " ".join(f"--{name}.{field}={trained[field]}" for field in wrong)
        raise UserError(
            f"{spec} was trained with different settings of {', '.join(wrong)}; set {flags}."
        )


def _check_method(config: Config, role: str, spec: str, prompt: Mapping[str, Any]) -> None:
    """Checks that a student trained on examples has the method and prompts of its training."""
    if prompt["method"] != config.method:
        raise UserError(
            f"{spec} was trained for the {role} of {prompt['method']}, not of {config.method}."
        )

    def digest(settings: Mapping[str, Any]) -> str:
        return prompt_digests.prompt_digest({**prompt, "settings": settings})

    now, trained = task_lib.plain(method_block(config)), prompt["settings"]
    if digest(now) != digest(trained):
        differing = [field for field in trained if field in now]
        wrong = [f for f in differing if digest({**now, f: trained[f]}) != digest(now)]
        _check_none(wrong, spec, f"config.{block_name(config.method)}", trained)


def warn_of_own_prompts(config: Config, task: task_lib.Task) -> None:
    """Warns of adapters that were trained with other prompts than those of the run."""
    for role, spec, meta in _students(config, task_lib.roles_of(config, task.needs)):
        if role not in workdir.roles_of(meta):
            continue
        trained, own = meta.get("own_prompts"), own_prompts.of_role(task.own_prompts, role)
        trained = trained.get(role) if isinstance(trained, Mapping) else trained
        if trained != own:
            first = "the prompts of a file" if trained else "this package's prompts"
            second = f"{config.prompt_file} has others" if own else "this run has the package's"
            say(f"WARNING: {spec} was trained with {first}, but {second} for the {role}")


def check_prompts(spec: object, meta: Mapping[str, Any]) -> None:
    """Checks that the prompts have not changed since a student was trained.

    Older checkpoints have no digest of their prompts. Since they were written, only the prompt
    format ``paper`` has changed: it used to omit the candidates of earlier rounds.

    Args:
      spec: the student's workdir.
      meta: the metadata of its checkpoint.
    """
    prompt = meta.get("prompt") or {}
    digest = prompt_digests.prompt_digest(prompt)
    default = "" if prompt.get("prompt_format") == "paper" else digest
    if meta.get("prompt_digest", default) != digest:
        raise UserError(
            f"{spec} was trained with prompts that have changed in this version; train it again."
        )


def _open_models(
    config: Config,
    needs: Needs,
    roles: Sequence[str],
    stack: contextlib.ExitStack,
    rows: int,
    spent: Mapping[str, Usage],
    pool: Pool,
) -> dict[type | str, Handler]:
    """Loads one handler per model; roles with equal configs share a handler and its budget."""
    cache = stack.enter_context(ResponseCache(config.cache)) if config.cache else None
    shared: dict[str, list[str]] = {}
    for role in roles:
        block = config[role].to_dict()
        del block["max_tokens"]
        shared.setdefault(json.dumps(block, sort_keys=True, default=str), []).append(role)
    handlers: dict[type | str, Handler] = {}
    for names in shared.values():
        block = config[names[0]].copy_and_resolve_references()
        if block.backend == "jax" and not block.batch_size and "extractor" not in names:
            # Batches are padded to full size, which is slow if there are few questions.
            block.batch_size = min(rows, EngineConfig.for_platform().batch_size)
        used = sum((spent[role] for role in names if role in spent), start=Usage())
        handler = handlers_lib.GenerateHandler(
            pool.language_model(block, used),
            {role: task_lib.most_tokens(config, role) for role in names},
            seed=config.seed,
            cache=cache,
            identity=identity.of_language_model(block, task_lib.asks_schemas(needs, *names)),
        )
        handlers |= dict.fromkeys(names, handler)
    return handlers


def pooled_ranker(config: Config, name: str, pool: Pool) -> Ranker:
    """Returns the ranker ``config.rankers.NAME``, which the runs of a pool share."""
    key = [config.rankers[name].to_dict(), config.encoder.to_dict()]
    return pool.get("rankers", key, lambda: open_ranker(config, name, pool.encoder))


def _open_index(
    config: Config, task: task_lib.Task, encoder: Encoder | None, pool: Pool
) -> PassageIndex | UnitIndex | LinkedIndex | RunIndex:
    passages, triples = task.corpus.passages, task.dataset.triples
    if config.retriever.kind == RUN:
        return RunIndex.open(config.retriever.folder, task.questions, passages)
    key: list[Any] = [config.retriever.to_dict(), hash_corpus(passages)]
    if encoder is not None:
        key.append(config.encoder.to_dict())
        encoder = with_disk_cache(encoder)  # later runs can reuse the vectors
    if config.retriever.units == "triple" or config.retriever.kind == "linked":
        key.append(identity.of_triples(task.dataset, [p.id for p in passages]))
    return pool.get(
        "indexes", key, lambda: open_retriever(config.retriever, passages, encoder, triples=triples)
    )


def _open_graph(config: Config, task: task_lib.Task, encoder: Encoder, pool: Pool) -> TripleGraph:
    passages = task.corpus.passages
    ids = [passage.id for passage in passages]
    source = _open_triples(config, task.dataset, task.corpus)
    triples = {i: found for i, found in source(ids).items() if found is not None}
    content = identity.of_triples(dataclasses.replace(task.dataset, triples=triples), ids)
    key = [config.graph.to_dict(), config.encoder.to_dict(), hash_corpus(passages), content]

    def build() -> TripleGraph:
        graph = open_graph(config.graph, passages, triples, with_disk_cache(encoder))
        say("; ".join(f"{count:,} {name}" for name, count in graph.statistics().items()))
        return graph

    return pool.get("graphs", key, build)


def read_corrupted(config: Config, needs: Needs) -> corruption.ByQuestion | None:
    """Returns the facts of single questions that differ from the store; None without any.

    Raises `UserError` if the method reads the facts of all questions together.
    """
    corrupted = None
    if triple_files.is_store(config.triples):
        corrupted = corruption.read_corrupted(config.triples)
    if corrupted is None:
        return None
    if needs.entities is not None or needs.graph or task_lib.indexes_triples(config):
        raise UserError(
            f"{config.triples} has corrupted facts of single questions, but this run of "
            f"{config.method} indexes the facts of all questions together; use a method or setting "
            "that reads the facts of retrieved passages (c2rag.kg_scope=per_question)."
        )
    return corrupted.by_question


def _open_triples(config: Config, dataset: Dataset, corpus: Corpus) -> handlers_lib.TripleSource:
    if triple_files.is_store(config.triples):
        store = TripleStore.open(config.triples)
        store.check_corpus(corpus.passages)
        triple_files.check_passages(str(config.triples), store, corpus.passages)
        return store.triples
    count = sum(passage.id in dataset.triples for passage in corpus.passages)
    say(f"{count:,} of them have triples")
    return lambda ids: {i: dataset.triples.get(i) for i in ids}
