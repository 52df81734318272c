"""Scores of an integrator's decisions at each step of a teacher's trajectories (teacher forcing).

At every step the model gets the teacher's input: the question, the teacher's earlier decisions and
the retrieved candidates. Each step is therefore independent, and all steps of all trajectories are
decoded together. Each step runs as a program of the runtime, which batches requests, resumes
interrupted runs and isolates failures. `integrators.ask_model` provides the prompts and the parser.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.datasets.chains import query_text
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import Numbers, Overlap, Ratio, overlap_ratios, ratio
from cirag_jax.methods.cirag import integrators
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates, Fact, fact_key, triple_line
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Sentence, Step, Trajectory, Triple

# Cosine of each pair of queries: float64 [N].
Similarity = Callable[[Sequence[tuple[str, str]]], np.ndarray]
# Ids of the passages that each query retrieves.
Search = Callable[[Sequence[str]], Sequence[Sequence[str]]]


@dataclasses.dataclass(frozen=True, slots=True)
class StepDecision(Decision):
    """A decision at one step; ``error`` is set if there is none, because the request failed."""

    kept: tuple[Triple | Sentence, ...]
    error: str | None = None

    @property
    def stops(self) -> bool:
        """Whether the decision is to stop."""
        return self.error is None and self.has_question and self.next_query is None


Decisions = Sequence[Sequence[StepDecision]]  # one per step of each trajectory


# -------------------------------------------------------------------------------------- decoding


def jobs(trajectories: Sequence[Trajectory], settings: CiragConfig) -> list[list[Job]]:
    """Returns a job per step, which calls the role ``integrator`` with the teacher's history.

    ``settings.retry`` is ignored: only the first response counts.
    """
    settings = dataclasses.replace(settings, retry=False)
    return [[_job(t, index, settings) for index in range(len(t.steps))] for t in trajectories]


def read(jobs: Sequence[Sequence[Job]], records: Mapping[str, Record]) -> list[list[StepDecision]]:
    """Reads the decision of every step; if a request failed, the decision has an ``error``."""
    return [[_decision(records[job.id]) for job in row] for row in jobs]


def _job(trajectory: Trajectory, index: int, settings: CiragConfig) -> Job:
    """Returns a step's job; its id contains a digest of the step's input."""
    steps, step = trajectory.steps[:index], trajectory.steps[index]
    step_input = codec.encode([trajectory.question, steps, step.candidates])
    return Job(
        f"{trajectory.question_id}#{index + 1}@{codec.digest(codec.dump(step_input))[:16]}",
        {"question": trajectory.question_id, "step": index + 1},
        lambda: _decide(trajectory.question, steps, step.candidates, settings),
    )


def _decide(
    question: str, steps: Sequence[Step], candidates: Sequence[Fact], settings: CiragConfig
) -> Program[dict[str, Any]]:
    decision = yield from integrators.ask_model(State(question, settings, steps), candidates)
    return codec.encode(decision)


def _decision(record: Record) -> StepDecision:
    failed = StepDecision("", (), has_question=False, error=record.error)
    return record.result(StepDecision) or failed


def top_k(
    trajectories: Sequence[Trajectory], chain: bool = False, units: Units = "triple"
) -> list[list[StepDecision]]:
    """Returns the decisions of a baseline without a model (`integrators.keep_top`).

    With ``chain``, the next query is the question with all facts kept so far: by the teacher in
    earlier steps, and by the baseline in this step.
    """
    rows: list[list[StepDecision]] = []
    for trajectory in trajectories:
        rows.append([])
        earlier: list[Fact] = []
        for step in trajectory.steps:
            decision = integrators.keep_top(trajectory.question, step.candidates)
            query = decision.next_query
            if chain:
                facts = dict.fromkeys((*earlier, *decision.kept))
                query = query_text(trajectory.question, list(map(_text, facts)), units)
            rows[-1].append(StepDecision(decision.thought, decision.kept, query))
            earlier += step.kept
    return rows


def _text(fact: Fact) -> str:
    match fact:
        case Triple():
            return triple_line(fact, "ascii")
        case Sentence():
            return fact.text or ""
    return fact


def aligner(trajectories: Sequence[Trajectory], settings: CiragConfig) -> list[list[StepDecision]]:
    """Returns the decisions of ``integrator=aligner`` (`integrators.extend_chain`).

    The trajectories have the aligner's scores of the candidates. Of ``settings``, ``units``,
    ``normalization`` and ``stop_below`` are used.
    """
    return [[_aligner(t, index, settings) for index in range(len(t.steps))] for t in trajectories]


def _aligner(trajectory: Trajectory, index: int, settings: CiragConfig) -> StepDecision:
    step = trajectory.steps[index]
    state = State(trajectory.question, settings, trajectory.steps[:index])
    decision = integrators.extend_chain(state, Candidates(step.candidates, step.scores))
    return StepDecision(decision.thought, decision.kept, decision.next_query)


def teacher(trajectories: Sequence[Trajectory]) -> list[list[StepDecision]]:
    """Returns the teacher's decisions."""
    return [[StepDecision(s.thought, s.kept, s.next_query) for s in t.steps] for t in trajectories]


def nothing(trajectories: Sequence[Trajectory]) -> list[list[StepDecision]]:
    """Returns decisions that keep nothing and stop, a baseline for scores averaged over steps."""
    return [[StepDecision("", ()) for _ in t.steps] for t in trajectories]


# --------------------------------------------------------------------------------------- scoring


def score(
    trajectories: Sequence[Trajectory],
    decisions: Decisions,
    *,
    normalization: Normalization = "ascii",
    gold: Sequence[Sequence[Sequence[Fact] | None]] | None = None,
    similarity: Similarity | None = None,
    search: Search | None = None,
    supporting: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Ratio]:
    """Compares decisions with the teacher's; every question is one group of each `Ratio`.

    The main score is ``teacher/f1``, a mean over steps. A step scores 1 if teacher and model both
    keep nothing, and 0 if the request failed. As in CIRAG's loop, a response without facts keeps
    none.

    Args:
      trajectories: the teacher's trajectories.
      decisions: decisions of each step of each trajectory.
      normalization: normalization of triples before they are compared.
      gold: annotated core facts of each step, or None.
      similarity: cosine of pairs of queries, for ``query_cosine``.
      search: passages that queries retrieve, for ``query_recall``.
      supporting: question id -> gold passages, for ``query_recall``.

    Returns:
      ``teacher/...`` and ``gold/...``: the scores of `overlap_ratios` for core facts.
      ``query_f1`` (SQuAD's token F1) and ``query_cosine``: similarity of the next query to the
      teacher's, over steps where the teacher has a next query; a missing query scores 0.
      ``query_recall``: share of the missing gold passages that the next query retrieves, over steps
      where the teacher has a next query and gold passages are missing.
      ``stop_accuracy``, ``stop_precision`` and ``stop_recall``: agreement with the teacher about
      stopping, over all steps; a response without a question section is always wrong.
      ``stop_unsolved``: share of steps with a stop among those where the teacher continues.
      ``false_keeps``: share of steps with kept facts among those where the teacher keeps none.
      ``parse_rate``: share of responses without parse errors.
    """
    index: dict[str, int] = {}
    groups = [index.setdefault(t.question_id, len(index)) for t in trajectories for _ in t.steps]
    pairs = [
        (step, decision)
        for trajectory, row in zip(trajectories, decisions, strict=True)
        for step, decision in zip(trajectory.steps, row, strict=True)
    ]

    def over(tops: Numbers, bottoms: Numbers | None = None) -> Ratio:
        return ratio(tops, np.ones(len(pairs)) if bottoms is None else bottoms, groups, len(index))

    kept = [_overlap(decision, step.kept, normalization) for step, decision in pairs]
    scores = _prefixed("teacher/", overlap_ratios(kept, groups, len(index)))
    if gold is not None:
        gold_facts = [facts for row in gold for facts in row]
        kept = [
            None if facts is None else _overlap(decision, facts, normalization)
            for facts, (_, decision) in zip(gold_facts, pairs, strict=True)
        ]
        if any(overlap is not None for overlap in kept):
            scores |= _prefixed("gold/", overlap_ratios(kept, groups, len(index)))
    scores |= _query_scores(pairs, over, similarity)
    if search is not None:
        missing = _missing_passages(trajectories, supporting or {})
        if any(missing):
            recalls = _query_recalls([d.next_query for _, d in pairs], missing, search)
            scores["query_recall"] = over(recalls, list(map(bool, missing)))
    end_N = np.array([step.next_query is None for step, _ in pairs], np.float64)
    stop_N = np.array([decision.stops for _, decision in pairs], np.float64)
    asks_N = np.array([decision.has_question for _, decision in pairs], bool)
    empty_N = np.array([not step.kept for step, _ in pairs], np.float64)
    keeps_N = np.array([bool(decision.kept) for _, decision in pairs], np.float64)
    parsed = [not decision.parse_errors and decision.error is None for _, decision in pairs]
    return {
        **scores,
        "stop_accuracy": over(asks_N & (stop_N == end_N)),
        "stop_precision": over(end_N * stop_N, stop_N),
        "stop_recall": over(end_N * stop_N, end_N),
        "stop_unsolved": over(stop_N * (1 - end_N), 1 - end_N),
        "false_keeps": over(empty_N * keeps_N, empty_N),
        "parse_rate": over(parsed),
    }


def _overlap(
    decision: StepDecision, gold_facts: Sequence[Fact], normalization: Normalization
) -> Overlap:
    gold = {fact_key(fact, normalization) for fact in gold_facts}
    if decision.error is not None:
        return Overlap(0, 0, len(gold), failed=True)
    return Overlap.of({fact_key(fact, normalization) for fact in decision.kept}, gold)


def _query_scores(
    pairs: Sequence[tuple[Step, StepDecision]],
    over: Callable[[Numbers, Numbers], Ratio],
    similarity: Similarity | None,
) -> dict[str, Ratio]:
    asks = [float(step.next_query is not None) for step, _ in pairs]
    texts = [
        (decision.next_query, step.next_query)
        if decision.next_query is not None and step.next_query is not None
        else None
        for step, decision in pairs
    ]
    f1 = [answers.f1(text[0], [text[1]]) if text else 0.0 for text in texts]
    scores = {"query_f1": over(f1, asks)}
    if similarity is not None:
        cosine_N = iter(similarity([text for text in texts if text]))
        cosines = [float(next(cosine_N)) if text else 0.0 for text in texts]
        scores["query_cosine"] = over(cosines, asks)
    return scores


def _missing_passages(
    trajectories: Sequence[Trajectory], supporting: Mapping[str, Sequence[str]]
) -> list[set[str]]:
    """Returns, for each step, the missing gold passages that its next query should retrieve."""
    rows = []
    for trajectory in trajectories:
        missing = set(supporting.get(trajectory.question_id, ()))
        for step in trajectory.steps:
            missing = missing - set(step.passages)
            rows.append(set() if step.next_query is None else missing)
    return rows


def _query_recalls(
    queries: Sequence[str | None], missing: Sequence[set[str]], search: Search
) -> list[float]:
    searched = [(i, query) for i, query in enumerate(queries) if query is not None and missing[i]]
    recalls = [0.0] * len(queries)
    results = search([query for _, query in searched]) if searched else ()
    for (index, _), ids in zip(searched, results, strict=True):
        recalls[index] = len(missing[index] & set(ids)) / len(missing[index])
    return recalls


def _prefixed(prefix: str, ratios: Mapping[str, Ratio]) -> dict[str, Ratio]:
    return {prefix + name: score for name, score in ratios.items()}


def parse_errors(decisions: Decisions) -> dict[str, int]:
    """Counts the steps with each kind of parse error, and the steps with a ``failed`` request."""
    counts: collections.Counter[str] = collections.Counter()
    for decision in (decision for row in decisions for decision in row):
        counts.update({*decision.parse_errors, *(["failed"] if decision.error is not None else [])})
    return dict(sorted(counts.items()))
