"""CIRAG: iterative construction-integration, then adaptive cascaded generation (paper, section 4).

Names follow the paper: x is the question, a_t the query of round t, D_t its passages, T^_t the
candidate triples, T~_t the core triples; the pools C, S, D hold core triples, sentences, passages.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.datasets.chains import query_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.methods.cirag.cascade import cascade, outcome
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common.evidence import (
    Evidence,
    Fact,
    fact_key,
    place_of,
    places_of,
    rank_facts,
    rank_passages,
    rank_sentences,
)
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Extract,
    Extracted,
    Follow,
    Generate,
    Generated,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.triples.normalization import merge_sources, triple_key
from cirag_jax.types import (
    Attempt,
    Passage,
    Prediction,
    Question,
    Step,
    Triple,
)

TOP_K = 3


def cirag(asked: Question, config: CiragConfig) -> Program[Prediction]:
    """Answers x: integrates facts round by round, then reads them at rising granularity."""
    question = asked.question
    evidence, steps, parse_errors = Evidence(config.normalization), [], collections.Counter[str]()
    yield from collect(question, evidence, steps, config, parse_errors)
    if not steps:
        found: Retrieved = yield Retrieve(question, config.num_passages)
        evidence.see(found.passages)
        steps.append(Step(question, tuple(p.id for p in found.passages)))
    first = evidence.seen[: len(steps[0].passages)]
    attempts = yield from cascade(question, evidence, first, config, parse_errors)
    return _prediction(steps, attempts, parse_errors, config)


METHOD = Method(cirag, CiragConfig)


def construct_and_integrate(asked: Question, config: CiragConfig) -> Program[Prediction]:
    """The first module alone, which distillation imitates: steps, and no answer."""
    question = asked.question
    evidence, steps, parse_errors = Evidence(config.normalization), [], collections.Counter[str]()
    yield from collect(question, evidence, steps, config, parse_errors)
    return _prediction(steps, (), parse_errors, config)


def collect(
    question: str,
    evidence: Evidence,
    steps: list[Step],
    config: CiragConfig,
    parse_errors: collections.Counter[str],
) -> Program[None]:
    """Rounds of construction and integration, appended to ``steps``, until a_{t+1} is none."""
    query, asked = question, {question}
    for _ in range(config.max_steps):
        found: Retrieved = yield Retrieve(query, config.num_passages)
        linked = (yield from follow(question, steps, evidence, config)) if config.link_bonus else ()
        passages = tuple({p.id: p for p in (*found.passages, *linked)}.values())
        evidence.see(passages)
        if config.units == "sentence":
            candidates = yield from split(query, passages, config)
        else:
            ranked = yield from construct(query, passages, config, parse_errors)
            candidates = Candidates(ranked.texts, ranked.scores)
        if config.link_bonus:
            candidates = prefer(linked, candidates, config)
        if config.only_new:
            candidates = drop_kept(candidates, steps, config)
        if config.integrator == "aligner":
            decision, text = extend_chain(question, steps, candidates, evidence, config), ""
        else:
            decision, text = yield from integrate(
                question, steps, candidates.facts, config, parse_errors
            )
        evidence.keep(decision.kept)
        steps.append(_step(query, passages, candidates, decision, text))
        if decision.next_query is None:
            break
        query = decision.next_query
        chain = [evidence.text(fact) for step in steps for fact in step.kept]
        chained = query_text(question, list(dict.fromkeys(chain)), config.units)
        if config.next_query == "chain":
            query = chained
        if query in asked and config.on_repeat == "stop":
            break
        if query in asked and config.on_repeat == "chain":
            query = chained
        asked.add(query)


# --------------------------------------------------------------------------------- construction


class Candidates(NamedTuple):
    """What a round may keep, best first, with the ranker's scores."""

    facts: tuple[Fact, ...]
    scores: tuple[float, ...]


def construct(
    query: str,
    passages: Sequence[Passage],
    config: CiragConfig,
    parse_errors: collections.Counter[str],
) -> Program[Ranked[Triple]]:
    """D_t -> T^_t: the triples of the passages, merged by surface, the N nearest to a_t."""
    extracted: Extracted = yield Extract(tuple(passages))
    parse_errors["passage_without_triples"] += sum(1 for t in extracted.triples if t == ())
    parse_errors["passage_not_extracted"] += sum(1 for t in extracted.triples if t is None)
    found = (triple for triples in extracted.triples for triple in triples or ())
    stated = (triple for triple in found if any(triple_key(triple, config.normalization)))
    # In the order of the passages, so that the first statement of each is the best ranked one.
    triples = tuple(fact.triple for fact in merge_sources(stated, config.normalization))
    if not config.use_reranker or not triples:
        return Ranked(triples, tuple(0.0 for _ in triples))
    return (yield Rank(query, triples, _num_ranked(config), "triples"))


def split(query: str, passages: Sequence[Passage], config: CiragConfig) -> Program[Candidates]:
    """D_t -> its sentences, the N nearest to a_t: candidates that need no extraction."""
    places = places_of(passages)
    if config.integrator == "model":  # It is shown them, in later rounds too.
        places = {text: dataclasses.replace(place, text=text) for text, place in places.items()}
    if not config.use_reranker or not places:
        return Candidates(tuple(places.values()), tuple(0.0 for _ in places))
    ranked: Ranked[str] = yield Rank(query, tuple(places), _num_ranked(config), "triples")
    return Candidates(tuple(places[text] for text in ranked.texts), ranked.scores)


def follow(
    question: str, steps: Sequence[Step], evidence: Evidence, config: CiragConfig
) -> Program[tuple[Passage, ...]]:
    """The passages that the question and the facts kept so far name, but for those of the chain."""
    texts = [evidence.text(fact) for step in steps for fact in step.kept]
    named: Retrieved = yield Follow((question, *texts), 2 * config.num_passages)
    visited = {place_of(fact)[0] for fact in _chain(steps)}
    return tuple(passage for passage in named.passages if passage.id not in visited)


def prefer(linked: Sequence[Passage], candidates: Candidates, config: CiragConfig) -> Candidates:
    """The N best candidates where those of linked passages have the bonus."""
    ids = {passage.id for passage in linked}
    scores = [
        score + config.link_bonus * (place_of(fact)[0] in ids)
        for fact, score in zip(candidates.facts, candidates.scores, strict=True)
    ]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: config.num_candidates]
    return Candidates(tuple(candidates.facts[i] for i in best), tuple(scores[i] for i in best))


def drop_kept(candidates: Candidates, steps: Sequence[Step], config: CiragConfig) -> Candidates:
    """The candidates that no earlier round kept."""
    kept = {fact_key(fact, config.normalization) for step in steps for fact in step.kept}
    pairs = zip(candidates.facts, candidates.scores, strict=True)
    new = [(f, score) for f, score in pairs if fact_key(f, config.normalization) not in kept]
    return Candidates(tuple(fact for fact, _ in new), tuple(score for _, score in new))


def _num_ranked(config: CiragConfig) -> int:
    """Candidates asked of the ranker: all (0) where links change their order afterwards."""
    return 0 if config.link_bonus else config.num_candidates


# ---------------------------------------------------------------------------------- integration


def integrate(
    question: str,
    steps: Sequence[Step],
    candidates: Sequence[Any],
    config: CiragConfig,
    parse_errors: collections.Counter[str],
) -> Program[tuple[prompts.Decision, str]]:
    """K_D(x, T^, I, H): thought, core facts T~_t and the next query a_{t+1}."""
    if config.integrator == "top_k":
        return top_k(question, candidates), ""
    messages = prompts.integration_messages(
        question,
        steps,
        candidates,
        normalization=config.normalization,
        prompt_format=config.prompt_format,
        few_shot=config.few_shot,
        units=config.units,
    )
    if config.keep_above:
        text, truncated = yield from _choose(messages, len(candidates), config)
    elif config.prefilled_headers:
        text, truncated = yield from _fill_sections(messages, config)
    else:
        response: Generated = yield Generate(
            messages,
            "integrator",
            max_tokens=config.decision_tokens,
            stop=prompts.stops(config.prompt_format),
        )
        text, truncated = response.text, response.finish_reason == "length"
    decision = prompts.parse_decision(
        text,
        candidates,
        normalization=config.normalization,
        prompt_format=config.prompt_format,
        cutoff=config.match_cutoff,
        truncated=truncated,
    )
    if not decision.has_question and text.strip() and config.retry:
        again: Generated = yield Generate(
            prompts.ask_for_question(messages, text, config.prompt_format),
            "integrator",
            max_tokens=64,
        )
        reply = prompts.parse_reply(
            again.text,
            prompt_format=config.prompt_format,
            truncated=again.finish_reason == "length",
        )
        decision = dataclasses.replace(
            decision,
            next_query=reply.next_query,
            has_question=reply.has_question,
            parse_errors=decision.parse_errors + reply.parse_errors,
        )
        parse_errors["asked_again"] += 1
    parse_errors.update(decision.parse_errors)
    parse_errors["no_decision"] += not decision.has_question  # it ends the rounds, but did not stop
    return decision, text


def top_k(question: str, candidates: Sequence[Any]) -> prompts.Decision:
    """What the top-k baseline decides, given candidates by falling score: the first three are kept,
    and the question is asked again.
    """
    return prompts.Decision("", tuple(candidates[:TOP_K]), question, True, ())


def extend_chain(
    question: str,
    steps: Sequence[Step],
    candidates: Candidates,
    evidence: Evidence,
    config: CiragConfig,
) -> prompts.Decision:
    """The aligner's decision: the best candidate that is not in the chain extends it.

    The next query is the question and the chain. Kept are that fact and, up to ``keep`` new ones,
    the best beside it.
    """
    chain = _chain(steps)
    in_chain = {fact_key(fact, config.normalization) for fact in chain}
    kept = {fact_key(fact, config.normalization) for step in steps for fact in step.kept}
    pairs = [
        (fact, fact_key(fact, config.normalization))
        for fact, score in zip(candidates.facts, candidates.scores, strict=True)
        if score >= config.stop_below
    ]
    best = next((fact for fact, key in pairs if key not in in_chain), None)
    if best is None:
        return prompts.Decision("", (), None, True, ())
    new = [fact for fact, key in pairs if key not in kept][: config.keep]
    texts = [evidence.text(fact) for fact in (*chain, best)]
    query = query_text(question, texts, config.units)
    return prompts.Decision("", tuple(dict.fromkeys((best, *new))), query, True, ())


def _chain(steps: Sequence[Step]) -> list[Fact]:
    """What was kept first in every round."""
    return [step.kept[0] for step in steps if step.kept]


def _choose(
    messages: tuple[Message, ...], num_candidates: int, config: CiragConfig
) -> Program[tuple[str, bool]]:
    """A compact response whose list is chosen by probability, and whether it was cut off."""
    choices = [*map(str, range(1, num_candidates + 1)), compact.NONE]
    scored: Scored = yield Score(
        (*messages, Message("assistant", compact.KEEP)),
        tuple(f" {choice}\n" for choice in choices),
        "integrator",
        continue_final=True,
    )
    logprob_N = np.asarray(scored.logprobs, np.float64)
    weight_N = np.exp(logprob_N - logprob_N.max())
    share_N = weight_N / weight_N.sum()
    *names, _ = choices
    kept = [name for name, p in zip(names, share_N, strict=False) if p >= config.keep_above]
    question = compact.SECTIONS[1]
    text = f"{compact.KEEP} {' '.join(kept) or compact.NONE}\n{question.opening}"
    response: Generated = yield Generate(
        (*messages, Message("assistant", text)),
        "integrator",
        max_tokens=config.decision_tokens or question.max_tokens,
        stop=question.stop,
        continue_final=True,
    )
    return text + response.text.rstrip(), response.finish_reason == "length"


def _fill_sections(messages: tuple[Message, ...], config: CiragConfig) -> Program[tuple[str, bool]]:
    """An integration response written section by section, and whether a section was cut off."""
    text, truncated = "", False
    for section in prompts.sections(config.prompt_format):
        text += section.opening
        response: Generated = yield Generate(
            (*messages, Message("assistant", text)),
            "integrator",
            max_tokens=config.decision_tokens or section.max_tokens,
            stop=section.stop,
            continue_final=True,
        )
        text += response.text.rstrip() + section.closing
        truncated |= response.finish_reason == "length"
    return text, truncated


def _step(
    query: str,
    passages: Sequence[Passage],
    candidates: Candidates,
    decision: prompts.Decision,
    response: str,
) -> Step:
    return Step(
        query,
        tuple(passage.id for passage in passages),
        candidates.facts,
        candidates.scores,
        decision.thought,
        decision.kept,
        decision.next_query,
        response,
    )


def _prediction(
    steps: Sequence[Step],
    attempts: Sequence[Attempt],
    parse_errors: collections.Counter[str],
    config: CiragConfig,
) -> Prediction:
    answer, granularity = outcome(attempts, config)
    ranked = rank_facts(steps, config.normalization)
    return Prediction(
        answer=answer,
        granularity=granularity,
        passages=rank_passages(ranked, steps),
        sentences=rank_sentences(ranked),
        triples=tuple(fact for fact in ranked if isinstance(fact, Triple)),
        steps=tuple(steps),
        attempts=tuple(attempts),
        parse_errors={kind: count for kind, count in sorted(parse_errors.items()) if count},
    )
