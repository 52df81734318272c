"""From a method's config to the handlers that answer its requests."""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from cirag_jax.commands import backends, identity, online
from cirag_jax.commands.pool import Pool
from cirag_jax.commands.task import (
    Task,
    asks_schemas,
    demonstrations,
    most_tokens,
    needs_encoder,
    refuse_budgets,
    roles_of,
)
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import say
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Usage
from cirag_jax.methods import prompt_digests
from cirag_jax.methods.common import extraction
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.registry import block_name, method_block
from cirag_jax.models.io import workdir
from cirag_jax.retrieval.encoders import Encoder, kept_on_disk
from cirag_jax.retrieval.index import PassageIndex, hash_corpus, needed, open_retriever
from cirag_jax.retrieval.linked import LinkedIndex, needed_link_head
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.retrieval.rankers import Ranker, check_ranker, check_units, open_ranker
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.runtime.handlers import (
    AnchorHandler,
    DemonstrateHandler,
    ExtractHandler,
    FetchHandler,
    FollowHandler,
    GenerateHandler,
    RankHandler,
    RetrieveHandler,
    TripleSource,
)
from cirag_jax.runtime.requests import (
    Anchor,
    Demonstrate,
    Extract,
    Fetch,
    Follow,
    Needs,
    Retrieve,
)
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Dataset


def check(config: Config, needs: Needs) -> None:
    """Raises UserError where a block cannot give what is needed, before anything is opened."""
    check_at_least(1, config, "in_flight")
    if jax.process_count() > 1:
        refuse_budgets(config)
    for name in needs.rankers:
        check_ranker(config.rankers[name], name)
        if needs.units is not None:
            check_units(config, name, needs.units)
    for role, wanted in needs.abilities.items():
        backends.check_abilities(config, role, wanted)
    if needs.entities is not None and config.triples == ONLINE:
        raise UserError(
            f"config.triples={ONLINE} extracts passages when they are found, and {config.method} "
            "looks for entities in all of them; extract them first (launch/extract.py)."
        )
    if needs.feedback and config.retriever.kind in ("bm25", "linked"):
        raise UserError(
            f"config.retriever.kind={config.retriever.kind} has no vectors, which {config.method} "
            "moves by feedback; choose another kind."
        )
    if needs.index and config.retriever.kind == "linked":
        needed_link_head(config.encoder.model)


def open_handlers(
    config: Config,
    task: Task,
    book: Journal,
    stack: contextlib.ExitStack,
    rows: int,
    pool: Pool | None = None,
) -> dict[type | str, Handler]:
    """Opens whatever a run needs.

    Args:
      config: of configs/methods.
      task: what is asked, and over what.
      book: the run's journal: what it has used counts against the budgets, and what is extracted
        online is kept beside it.
      stack: closes what was opened.
      rows: questions that advance together at most; a model's batch need not be larger.
      pool: what other runs have opened already is taken from it, the rest left there; None: this
        run is alone.
    """
    pool = stack.enter_context(Pool()) if pool is None else pool
    handlers: dict[type | str, Handler] = {}
    needs, corpus = task.needs, task.corpus
    roles = roles_of(config, needs)
    check_task(config, task)
    if needs.corpus:
        handlers[Fetch] = FetchHandler(corpus.passages)
        say(f"{len(corpus.passages):,} passages")
    # What a mistake is likely in and is opened fast goes first, embedding the corpus last.
    encoder = pool.encoder(config.encoder) if needs_encoder(config, needs) else None
    if needs.triples and config.triples != ONLINE:
        source = _open_triples(config, task.dataset, corpus)
        handlers[Extract] = ExtractHandler(source)
        if needs.entities is not None:
            found = source([passage.id for passage in corpus.passages]).values()
            index = EntityIndex(itertools.chain(*(f for f in found if f)), needs.entities)
            say(", ".join(f"{count:,} {name}" for name, count in index.statistics().items()))
            handlers[Anchor] = AnchorHandler(index)
    for name in needs.rankers:
        handlers[f"rankers.{name}"] = RankHandler(_open_ranker(config, name, pool))
    if "extractor" in roles:
        block = config.extractor
        how = extraction.ExtractionSettings(triple_tokens=block.max_tokens, grounded=block.grounded)
        settings = identity.of_extractor(config.extractor, how)
        path = book.path.with_name(book.path.name.replace("journal", online.NAME))
        runner = Runner(
            path,
            settings,
            lambda *_: {"extractor": handlers["extractor"]},
            in_flight=256,
            encode=extraction.encode_extraction,
        )
        extractions = stack.enter_context(runner)
        spent = {**book.usage(), **extractions.book.usage()}
        handlers |= _open_models(config, needs, roles, stack, rows, spent, pool)
        extractor: Any = handlers["extractor"]
        handlers[Extract] = online.OnlineExtractHandler(extractor, extractions, how)
    else:
        handlers |= _open_models(config, needs, roles, stack, rows, book.usage(), pool)
    if needs.demonstrations:
        shown = demonstrations(task)
        if not shown:
            say(f"{task.dataset.name} has no training question to demonstrate with")
        handlers[Demonstrate] = DemonstrateHandler(shown, needed(encoder, "demonstrations"))
    if needs.index:
        index = _open_index(config, task, encoder, pool)
        handlers[Retrieve] = RetrieveHandler(index.search, corpus.passages, corpus.allowed)
    if needs.links:
        found = hash_corpus(corpus.passages)
        titles = pool.get("title indexes", found, lambda: TitleIndex(corpus.passages))
        handlers[Follow] = FollowHandler(titles, corpus.passages, corpus.allowed)
    return handlers


def check_task(config: Config, task: Task) -> None:
    """Raises UserError where a run cannot begin, whatever is opened: see `check_adapters`; no
    passage has triples, or a role may not write.
    """
    roles = roles_of(config, task.needs)
    check_adapters(config, roles)
    for role in roles:
        if most_tokens(config, role) < 1:
            raise UserError(f"config.{role}.max_tokens must be at least 1.")
    if not task.needs.triples or config.triples is not None:
        return
    if not any(passage.id in task.dataset.triples for passage in task.corpus.passages):
        name = block_name(config.method) if "units" in method_block(config) else "cirag"
        other = f"--config=configs/methods/{name}.py:small"
        if "teacher" in config:  # trajectories
            other = (
                "--config.cirag.units=sentence --config.cirag.prompt_format=compact "
                "--config.encoder.model=shipped:aligner --config.retriever.units=sentence"
            )
        raise UserError(
            f"no passage of {task.dataset.name} has triples; extract them (launch/extract.py) and "
            f"name the store with --config.triples=FOLDER, or take {other}, which needs none."
        )


def check_adapters(config: Config, roles: Sequence[str]) -> None:
    """Refuses an adapter trained for another role, and a student asked otherwise than trained.

    That more candidates are shown than in training is only said: the student may cope.
    """
    for role in roles:
        spec = config[role].adapter
        if config[role].backend == "openai" or spec is None:
            continue
        meta = workdir.check_role(spec, role)
        if role == meta.get("component"):
            check_prompts(spec, meta)
        if role not in ("integrator", "reader"):
            continue
        asked = method_block(config)
        trained_as = meta.get("prompt") or {}
        if role == "integrator" and trained_as:
            trained_as = {"units": "triple", **trained_as}  # As all were before it was recorded.
        wrong = [name for name, value in trained_as.items() if asked.get(name, value) != value]
        if wrong:
            flags = [
                f"--config.{block_name(config.method)}.{name}={trained_as[name]}" for name in wrong
            ]
            raise UserError(
                f"{spec} was trained with other settings of {', '.join(wrong)}: give "
                f"{' '.join(flags)}."
            )
        shown, known = asked.get("num_candidates", 0), meta.get("num_candidates") or 0
        if known and shown > known:
            say(
                f"WARNING: config.{block_name(config.method)}.num_candidates={shown}, but "
                f"{spec} was trained with {known} at most"
            )


def check_prompts(spec: object, meta: Mapping[str, Any]) -> None:
    """Refuses a student whose prompts read otherwise by now than when it was trained.

    Those trained before this was recorded know the old prompts; of these, one changed since: the
    paper's format lacked the candidates of earlier rounds.

    Args:
      spec: its workdir.
      meta: what its checkpoint says of its training.
    """
    described = meta.get("prompt") or {}
    now = prompt_digests.prompt_digest(described)
    old = "" if described.get("prompt_format") == "paper" else now
    if meta.get("prompt_digest", old) != now:
        raise UserError(
            f"{spec} was trained with prompts that this version of the program no longer writes; "
            "train it again."
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
    """One handler a model: roles with equal configs share it, and its budget."""
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
            # A batch is computed whole: one question must not pay for sixteen.
            block.batch_size = min(rows, EngineConfig.for_platform().batch_size)
        used = sum((spent[role] for role in names if role in spent), start=Usage())
        handler = GenerateHandler(
            pool.language_model(block, used),
            {role: most_tokens(config, role) for role in names},
            seed=config.seed,
            cache=cache,
            identity=identity.of_language_model(block, asks_schemas(needs, *names)),
        )
        handlers |= dict.fromkeys(names, handler)
    return handlers


def _open_ranker(config: Config, name: str, pool: Pool) -> Ranker:
    decided_by = [config.rankers[name].to_dict(), config.encoder.to_dict()]
    return pool.get("rankers", decided_by, lambda: open_ranker(config, name, pool.encoder))


def _open_index(
    config: Config, task: Task, encoder: Encoder | None, pool: Pool
) -> PassageIndex | UnitIndex | LinkedIndex:
    passages, triples = task.corpus.passages, task.dataset.triples
    decided_by: list[Any] = [config.retriever.to_dict(), hash_corpus(passages)]
    if encoder is not None:
        decided_by.append(config.encoder.to_dict())
    if config.retriever.units == "triple" or config.retriever.kind == "linked":
        decided_by.append(identity.of_triples(task.dataset, [p.id for p in passages]))
    if encoder is not None:
        # Neither a question nor a run will be the last over these passages.
        encoder = kept_on_disk(encoder)
    return pool.get(
        "indexes",
        decided_by,
        lambda: open_retriever(config.retriever, passages, encoder, triples=triples),
    )


def _open_triples(config: Config, dataset: Dataset, corpus: Corpus) -> TripleSource:
    if config.triples is not None:
        store = TripleStore.open(config.triples)
        store.check_corpus(corpus.passages)
        return store.triples
    known = sum(passage.id in dataset.triples for passage in corpus.passages)
    say(f"{known:,} of them have triples")
    return lambda ids: {i: dataset.triples.get(i) for i in ids}
