"""CIRAG: iterative construction-integration, then adaptive cascaded generation (paper, section 4).

Names follow the paper: x is the question, a_t the query of round t, D_t its passages, T^_t the
candidate triples, T~_t the core triples; the pools C, S, D hold core triples, sentences, passages.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cirag_jax.datasets.chains import query_text
from cirag_jax.errors import UserError, check_choice
from cirag_jax.llm.types import Ability, Message
from cirag_jax.methods import c2rag_stop
from cirag_jax.methods.c2rag_config import C2ragConfig, Rule
from cirag_jax.methods.cascade import GRANULARITIES, cascade, outcome
from cirag_jax.methods.evidence import (
    Evidence,
    Fact,
    fact_key,
    place_of,
    places_of,
    rank_facts,
    rank_passages,
    rank_sentences,
)
from cirag_jax.prompts import cirag as prompts
from cirag_jax.prompts import compact, reading
from cirag_jax.runtime.requests import (
    Extract,
    Extracted,
    Follow,
    Generate,
    Generated,
    Needs,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.triples.normalization import Normalization, merge_sources, triple_key
from cirag_jax.types import (
    Attempt,
    Granularity,
    Passage,
    Prediction,
    Question,
    Step,
    Triple,
)

# The fields that say how the integrator's conversations read: a student is asked as it was trained.
PROMPT_FIELDS = ("units", "normalization", "prompt_format", "few_shot")
INTEGRATORS = ("model", "aligner", "top_k", "top_k_chain")
ON_REPEAT = ("ask", "stop", "chain")
NEXT_QUERIES = ("written", "chain")
STOPS = ("integrator", "c2rag")
TOP_K = 3


@dataclasses.dataclass(frozen=True)
class CiragConfig:
    """CIRAG's switches; the defaults are the paper's (its Appendix B.2 and our specification).

    Attributes:
      max_steps: L, rounds of construction-integration; 0: answer from the first retrieval alone.
      num_passages: K, passages retrieved a round.
      units: of the candidates: triple, or sentence where nobody extracted triples (as KiRAG-Sent);
        the cascade then begins at sentences, and a language model needs prompt_format=compact.
      num_candidates: N, candidates a round.
      use_reranker: without it all of them are candidates, in passage order.
      granularities: steps of the cascade, any subset of triple, sentence, passage, in this order.
      force_answer: where every granularity refuses, ask the last one again without letting it
        refuse (the passages, where its pool is empty).
      wide_refusal: also take paraphrases of "Unanswerable" for a refusal.
      prompt_format: multi_turn, paper (one turn, history last), or compact (ours: candidates are
        kept by number, in two thirds of the tokens).
      normalization: normalisation of triples: ascii (the paper's case study) or unicode.
      match_cutoff: least similarity at which a fact that is no candidate is taken for one.
      retry: ask once more for a missing question section.
      on_repeat: what follows a next query that was asked before: ask it again (paper), ``stop``, or
        ask the question with what was kept (``chain``, ours): the same query finds the same.
      next_query: what a round searches with: the query that the integrator has written (paper), or
        the question and what was kept (``chain``, ours), whatever it writes; it still says when to
        stop.
      only_new: facts kept in earlier rounds are no candidates again. Ours.
      prefilled_headers: write the headers for the integrator and have it fill the sections one
        by one; small models then keep the format. A server must support continuing an
        assistant's turn.
      few_shot: show the integrator a worked example, which the paper's prompt has not.
      keep_above: above 0: every candidate is kept whose number is at least so probable as the whole
        list, "none" being one more; compact format only. 0: those that the integrator writes.
      integrator: model; or, without a language model, aligner: in every round keep the candidate
        that the ranker, an aligner, puts first, and search with question and chain (KiRAG without
        its constructor); or what a trained integrator must beat: top_k keeps the three best and
        asks the question again, top_k_chain the question with what was kept.
      stop_below: the aligner stops where its best new candidate scores less; -1: never.
      keep: new facts that the aligner keeps a round; the best of a round extends the chain.
      link_bonus: above 0: the passages that the question and the kept facts name by their titles
        are searched beside the retrieved ones, and their facts score so much more until the chain
        has been there. Ours.
      stop: what ends the rounds before L: the integrator's having nothing to ask (paper), or c2rag:
        that the core triples ground a plan of the question; see `methods.c2rag_stop`. Ours. Where
        the plan cannot be used, the integrator's own stop counts.
      gamma, neff_rule, min_score, plan_schema: of `C2ragConfig`, for ``stop=c2rag``.
      reader_format: thought (an example, reasoning before the answer); as readers are trained,
        chain (the facts that lead to the answer, then the answer) or brief (the answer alone).
      decision_tokens: most tokens of an integration response; 0: the role's.
      answer_tokens: most tokens of an answer; 0: the role's.
    """

    max_steps: int = 4
    num_passages: int = 10
    units: Literal["triple", "sentence"] = "triple"
    num_candidates: int = 30
    use_reranker: bool = True
    granularities: tuple[str, ...] = GRANULARITIES
    force_answer: bool = False
    wide_refusal: bool = False
    prompt_format: str = "multi_turn"
    normalization: Normalization = "ascii"
    match_cutoff: float = 0.8
    retry: bool = True
    on_repeat: str = "ask"
    next_query: str = "written"
    only_new: bool = False
    prefilled_headers: bool = False
    few_shot: bool = False
    keep_above: float = 0.0
    integrator: str = "model"
    stop_below: float = -1.0
    keep: int = 1
    link_bonus: float = 0.0
    stop: str = "integrator"
    gamma: float = C2ragConfig.gamma
    neff_rule: Rule = C2ragConfig.neff_rule
    min_score: float = C2ragConfig.min_score
    plan_schema: bool = C2ragConfig.plan_schema
    reader_format: str = "thought"
    decision_tokens: int = 0
    answer_tokens: int = 0

    def __post_init__(self):
        if not self.granularities or list(self.granularities) != [
            v for v in GRANULARITIES if v in self.granularities
        ]:
            raise UserError(
                f"granularities={self.granularities!r} must be some of {', '.join(GRANULARITIES)}, "
                "in this order."
            )
        if not 0.0 <= self.match_cutoff <= 1.0:
            raise UserError(f"match_cutoff={self.match_cutoff} must lie in [0, 1].")
        if self.prompt_format not in prompts.FORMATS:
            raise UserError(
                f"prompt_format={self.prompt_format!r} must be one of {', '.join(prompts.FORMATS)}."
            )
        if not 0.0 <= self.keep_above <= 1.0:
            raise UserError(f"keep_above={self.keep_above} must lie in [0, 1].")
        if self.keep_above and (self.prompt_format != "compact" or self.prefilled_headers):
            raise UserError("keep_above needs prompt_format=compact, without prefilled_headers.")
        if self.integrator not in INTEGRATORS:
            raise UserError(
                f"integrator={self.integrator!r} must be one of {', '.join(INTEGRATORS)}."
            )
        if self.on_repeat not in ON_REPEAT:
            raise UserError(f"on_repeat={self.on_repeat!r} must be one of {', '.join(ON_REPEAT)}.")
        if self.next_query not in NEXT_QUERIES:
            raise UserError(
                f"next_query={self.next_query!r} must be one of {', '.join(NEXT_QUERIES)}."
            )
        if self.units not in ("triple", "sentence"):
            raise UserError(f"units={self.units!r} must be triple or sentence.")
        by_model = self.units == "sentence" and self.integrator == "model"
        if by_model and self.prompt_format != "compact":
            raise UserError(
                f"units=sentence needs prompt_format=compact, not {self.prompt_format}, or "
                "integrator=aligner, top_k or top_k_chain."
            )
        if not self.pools:
            raise UserError("units=sentence has no triples to read: granularities needs another.")
        if (self.integrator == "aligner" or self.link_bonus) and not self.use_reranker:
            raise UserError("integrator=aligner needs use_reranker; so does link_bonus.")
        check_choice("stop", self.stop, STOPS)
        if self.checks_plan and self.units != "triple":
            raise UserError("stop=c2rag looks the plan up in triples: it needs units=triple.")
        if self.keep < 1 or self.link_bonus < 0:
            raise UserError("keep must be >= 1, link_bonus >= 0.")
        reading.check_reader_format(self.reader_format)
        if self.normalization not in ("ascii", "unicode"):
            raise UserError(f"normalization={self.normalization!r} must be ascii or unicode.")
        if self.max_steps < 0 or self.num_passages < 1 or self.num_candidates < 1:
            raise UserError("max_steps must be >= 0, num_passages and num_candidates >= 1.")
        if self.checks_plan:
            self.sufficiency  # noqa: B018  # Refuses what C2RAG does.

    @property
    def checks_plan(self) -> bool:
        """Whether the core triples are checked against a plan."""
        return self.stop == "c2rag" and self.max_steps > 0

    @functools.cached_property
    def sufficiency(self) -> C2ragConfig:
        """How a plan is made and grounded, where that is the stop signal."""
        return C2ragConfig(
            normalization=self.normalization,
            plan_schema=self.plan_schema,
            plan_failure="empty",
            gamma=self.gamma,
            neff_rule=self.neff_rule,
            min_score=self.min_score,
            rerank_texts=False,
        )

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that can hold something, in the order of the cascade."""
        empty = ("triple",) if self.units == "sentence" else ()
        return tuple(g for g in GRANULARITIES if g in self.granularities and g not in empty)

    @property
    def needs(self) -> Needs:
        """Without rounds there are no triples, so nothing to rank or to integrate."""
        rounds = self.max_steps > 0
        asks = rounds and self.integrator == "model"
        abilities: dict[str, tuple[Ability, ...]] = {}
        if asks and self.keep_above:
            abilities["integrator"] = ("continue_final", "score")
        elif asks and self.prefilled_headers:
            abilities["integrator"] = ("continue_final",)
        rankers = ("triples",) if rounds and self.use_reranker else ()
        planner = ()
        if self.checks_plan:
            planner, own = ("planner",), self.sufficiency.needs
            abilities |= own.abilities
            rankers = tuple(dict.fromkeys((*rankers, *own.rankers)))
        return Needs(
            roles=(*planner, *(("integrator", "reader") if asks else ("reader",))),
            abilities=abilities,
            rankers=rankers,
            units=self.units if rankers else None,
            links=rounds and self.link_bonus > 0,
            triples=rounds and self.units == "triple",
        )


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
    query, asked, plan = question, {question}, None
    if config.checks_plan:
        plan = yield from c2rag_stop.make_plan(question, config.sufficiency, parse_errors)
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
        elif config.integrator == "top_k_chain":
            best = [fact for step in steps for fact in step.kept] + [*candidates.facts[:TOP_K]]
            texts = [evidence.text(fact) for fact in dict.fromkeys(best)]
            decision, text = top_k(question, candidates.facts, texts, config.units), ""
        else:
            decision, text = yield from integrate(
                question, steps, candidates.facts, config, parse_errors
            )
        evidence.keep(decision.kept)
        notes: Mapping[str, Any] = {}
        if plan is not None:
            verdict = yield from c2rag_stop.check(plan, evidence.triples)
            decision, notes = _stop_if(verdict, decision), verdict.notes
        steps.append(_step(query, passages, candidates, decision, text, notes))
        if decision.next_query is None:
            break
        query = decision.next_query
        repeats = query in asked
        if repeats and config.on_repeat == "stop":
            break
        if config.next_query == "chain" or (repeats and config.on_repeat == "chain"):
            texts = [evidence.text(fact) for step in steps for fact in step.kept]
            query = query_text(question, list(dict.fromkeys(texts)), config.units)
        asked.add(query)


def _stop_if(verdict: c2rag_stop.Verdict, decision: prompts.Decision) -> prompts.Decision:
    """The decision, whose a_{t+1} is none exactly where the facts suffice."""
    query = None if verdict.suffices else decision.next_query or verdict.query
    return dataclasses.replace(decision, next_query=query)


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


def top_k(
    question: str,
    candidates: Sequence[Any],
    chain: Sequence[str] = (),
    units: Literal["triple", "sentence"] = "triple",
) -> prompts.Decision:
    """What the top-k baseline decides, given candidates by falling score.

    Args:
      question: x, which it asks again.
      candidates: of which it keeps the first three.
      chain: texts of what was kept, to be asked with the question.
      units: of the texts.
    """
    query = query_text(question, chain, units) if chain else question
    return prompts.Decision("", tuple(candidates[:TOP_K]), query, True, ())


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
    notes: Mapping[str, Any],
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
        notes=notes,
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
