"""Decision quality of an integrator, step by step, on the histories of a teacher (teacher forcing).

At every step of every trajectory the model gets what the teacher had: the question, the teacher's
own decisions so far and the candidates that retrieval really gave. So a step is scored by itself,
and all steps of all trajectories decode together. The steps are programs of the runtime: batches,
resumption and isolated failures are the scheduler's and the journal's, and the prompt, the
prefilled headers and the parser are those of `integrators.ask_model`.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.datasets.chains import query_text
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import Overlap, Ratio, overlap_ratios, ratio
from cirag_jax.methods.cirag import integrators
from cirag_jax.methods.cirag.compact import Units
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
class Decided:
    """What a model decided at one step.

    ``next_query`` is None to end, or where ``has_question`` is False: it says neither what to ask
    next nor that nothing is to be asked. ``parse_errors`` are kinds of malformed output, as
    `methods.cirag.prompts.parse_decision` names them; ``error`` says why there is no decision.
    """

    thought: str
    kept: tuple[Triple | Sentence, ...]
    next_query: str | None = None
    has_question: bool = True
    parse_errors: tuple[str, ...] = ()
    response: str = ""
    error: str | None = None

    @property
    def stops(self) -> bool:
        """Whether it says that no further question is needed."""
        return self.error is None and self.has_question and self.next_query is None


Decisions = Sequence[Sequence[Decided]]  # of each trajectory, of each of its steps


# -------------------------------------------------------------------------------------- decoding


def jobs(trajectories: Sequence[Trajectory], settings: CiragConfig) -> list[list[Job]]:
    """A program a step that asks role ``integrator`` for its decision, the teacher's history given.

    ``trajectories`` have the real candidates of every step, one a question. ``retry`` of
    ``settings`` is off here: the one response counts.
    """
    settings = dataclasses.replace(settings, retry=False)
    return [[_job(t, index, settings) for index in range(len(t.steps))] for t in trajectories]


def read(jobs: Sequence[Sequence[Job]], records: Mapping[str, Record]) -> list[list[Decided]]:
    """The decision of every step; a request that failed gives one with its ``error``."""
    return [[_decided(records[job.id]) for job in row] for row in jobs]


def _job(trajectory: Trajectory, index: int, settings: CiragConfig) -> Job:
    """A step's program; a step that was given something else is another program."""
    steps, step = trajectory.steps[:index], trajectory.steps[index]
    given = codec.encode([trajectory.question, steps, step.candidates])
    return Job(
        f"{trajectory.question_id}#{index + 1}@{codec.digest(codec.dump(given))[:16]}",
        {"question": trajectory.question_id, "step": index + 1},
        lambda: _decide(trajectory.question, steps, step.candidates, settings),
    )


def _decide(
    question: str, steps: Sequence[Step], candidates: Sequence[Fact], settings: CiragConfig
) -> Program[dict[str, Any]]:
    """One integration call, as the journal holds its outcome."""
    decision = yield from integrators.ask_model(State(question, settings, steps), candidates)
    return codec.encode(
        Decided(
            decision.thought,
            decision.kept,
            decision.next_query,
            decision.has_question,
            decision.parse_errors,
            decision.response,
        )
    )


def _decided(record: Record) -> Decided:
    failed = Decided("", (), has_question=False, error=record.error)
    return record.result(Decided) or failed


def top_k(
    trajectories: Sequence[Trajectory], chain: bool = False, units: Units = "triple"
) -> list[list[Decided]]:
    """The baselines without a model, `integrators.keep_top`.

    With ``chain`` the next query has what the teacher kept before, and what this step keeps.
    """
    found: list[list[Decided]] = []
    for trajectory in trajectories:
        found.append([])
        before: list[Fact] = []
        for step in trajectory.steps:
            made = integrators.keep_top(trajectory.question, step.candidates)
            query = made.next_query
            if chain:
                known = dict.fromkeys((*before, *made.kept))
                query = query_text(trajectory.question, list(map(_text, known)), units)
            found[-1].append(Decided(made.thought, made.kept, query))
            before += step.kept
    return found


def _text(fact: Fact) -> str:
    match fact:
        case Triple():
            return triple_line(fact, "ascii")
        case Sentence():
            return fact.text or ""
    return fact


def aligner(trajectories: Sequence[Trajectory], settings: CiragConfig) -> list[list[Decided]]:
    """What ``integrator=aligner`` decides after the teacher's rounds, `integrators.extend_chain`.

    Args:
      trajectories: of a teacher, with the scores of the aligner that ranked their candidates.
      settings: with ``units``, ``normalization`` and ``stop_below``.
    """
    return [[_aligner(t, index, settings) for index in range(len(t.steps))] for t in trajectories]


def _aligner(trajectory: Trajectory, index: int, settings: CiragConfig) -> Decided:
    step = trajectory.steps[index]
    state = State(trajectory.question, settings, trajectory.steps[:index])
    made = integrators.extend_chain(state, Candidates(step.candidates, step.scores))
    return Decided(made.thought, made.kept, made.next_query)


def teachers_own(trajectories: Sequence[Trajectory]) -> list[list[Decided]]:
    """What the teacher decided: what its scores are, where they are not 1 by definition."""
    return [[Decided(s.thought, s.kept, s.next_query) for s in t.steps] for t in trajectories]


def nothing(trajectories: Sequence[Trajectory]) -> list[list[Decided]]:
    """Keeps no candidate and stops: what means over steps give for nothing."""
    return [[Decided("", ()) for _ in t.steps] for t in trajectories]


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
    """Scores decisions against those of the teacher; the bootstrap's groups are the questions.

    A model that writes no facts keeps none, as in CIRAG's loop; a step whose request failed earns
    0. ``teacher/f1`` is the main figure: the mean over steps, where both keeping nothing is 1.

    Triples are equal by ``normalization``. ``gold`` has the annotated core facts of every step,
    None where there are none. ``query_cosine`` needs ``similarity`` of two queries,
    ``query_recall`` needs ``search`` and the gold passages (``supporting``) by question id; what is
    missing is not scored.

    Returns:
      ``teacher/...`` and ``gold/...``: the scores of `overlap_ratios` for the core facts.
      ``query_f1`` (SQuAD's token F1) and ``query_cosine``: next query against the teacher's, where
      the teacher asks one; a model that then stops or writes none earns 0. ``query_recall``: share
      of the gold passages that no round has retrieved yet which the next query retrieves, where
      the teacher asks one and there are any. ``stop_accuracy``: of
      whether to stop, over all steps; a response without a question section is wrong either way.
      ``stop_precision`` and ``stop_recall``; ``stop_unsolved``: stops where the teacher asks on.
      ``false_keeps``: steps at which the teacher keeps nothing and the model something.
      ``parse_rate``: responses without any problem.
    """
    index: dict[str, int] = {}
    groups = [index.setdefault(t.question_id, len(index)) for t in trajectories for _ in t.steps]
    pairs = [
        (step, decided)
        for trajectory, row in zip(trajectories, decisions, strict=True)
        for step, decided in zip(trajectory.steps, row, strict=True)
    ]

    def over(tops: Sequence[float], bottoms: Sequence[float] | None = None) -> Ratio:
        return ratio(tops, bottoms or [1.0] * len(pairs), groups, len(index))

    kept = [_overlap(decided, step.kept, normalization) for step, decided in pairs]
    found = _prefixed("teacher/", overlap_ratios(kept, groups, len(index)))
    if gold is not None:
        wanted = [facts for row in gold for facts in row]
        kept = [
            None if facts is None else _overlap(decided, facts, normalization)
            for facts, (_, decided) in zip(wanted, pairs, strict=True)
        ]
        if any(overlap is not None for overlap in kept):
            found |= _prefixed("gold/", overlap_ratios(kept, groups, len(index)))
    found |= _queries(pairs, over, similarity)
    if search is not None:
        wanted = _not_yet_retrieved(trajectories, supporting or {})
        if any(wanted):
            recalls = _query_recalls([d.next_query for _, d in pairs], wanted, search)
            found["query_recall"] = over(recalls, [float(bool(ids)) for ids in wanted])
    ends = [float(step.next_query is None) for step, _ in pairs]
    stops = [float(decided.stops) for _, decided in pairs]
    both = [a * b for a, b in zip(ends, stops, strict=True)]
    right = [
        float(decided.has_question and decided.stops == (step.next_query is None))
        for step, decided in pairs
    ]
    none = [float(not step.kept) for step, _ in pairs]
    false = [n * bool(decided.kept) for n, (_, decided) in zip(none, pairs, strict=True)]
    parsed = [float(not decided.parse_errors and decided.error is None) for _, decided in pairs]
    return {
        **found,
        "stop_accuracy": over(right),
        "stop_precision": over(both, stops),
        "stop_recall": over(both, ends),
        "stop_unsolved": over(
            [stop * (1 - end) for stop, end in zip(stops, ends, strict=True)],
            [1 - end for end in ends],
        ),
        "false_keeps": over(false, none),
        "parse_rate": over(parsed),
    }


def _overlap(decided: Decided, wanted: Sequence[Fact], normalization: Normalization) -> Overlap:
    gold = {fact_key(fact, normalization) for fact in wanted}
    if decided.error is not None:
        return Overlap(0, 0, len(gold), failed=True)
    mine = {fact_key(fact, normalization) for fact in decided.kept}
    return Overlap(len(mine & gold), len(mine), len(gold))


def _queries(
    pairs: Sequence[tuple[Step, Decided]],
    over: Callable[[Sequence[float], Sequence[float]], Ratio],
    similarity: Similarity | None,
) -> dict[str, Ratio]:
    asks = [float(step.next_query is not None) for step, _ in pairs]
    texts = [
        (decided.next_query, step.next_query)
        if decided.next_query is not None and step.next_query is not None
        else None
        for step, decided in pairs
    ]
    f1 = [answers.f1(text[0], [text[1]]) if text else 0.0 for text in texts]
    found = {"query_f1": over(f1, asks)}
    if similarity is not None:
        cosine_N = iter(similarity([text for text in texts if text]))
        found["query_cosine"] = over(
            [float(next(cosine_N)) if text else 0.0 for text in texts], asks
        )
    return found


def _not_yet_retrieved(
    trajectories: Sequence[Trajectory], supporting: Mapping[str, Sequence[str]]
) -> list[set[str]]:
    """Of each step the gold passages that its next query is to find; none where there is none."""
    found = []
    for trajectory in trajectories:
        missing = set(supporting.get(trajectory.question_id, ()))
        for step in trajectory.steps:
            missing = missing - set(step.passages)
            found.append(set() if step.next_query is None else missing)
    return found


def _query_recalls(
    queries: Sequence[str | None], wanted: Sequence[set[str]], search: Search
) -> list[float]:
    asked = [(i, query) for i, query in enumerate(queries) if query is not None and wanted[i]]
    recalls = [0.0] * len(queries)
    results = search([query for _, query in asked]) if asked else ()
    for (index, _), ids in zip(asked, results, strict=True):
        recalls[index] = len(wanted[index] & set(ids)) / len(wanted[index])
    return recalls


def _prefixed(prefix: str, ratios: Mapping[str, Ratio]) -> dict[str, Ratio]:
    return {prefix + name: found for name, found in ratios.items()}


def parse_errors(decisions: Decisions) -> dict[str, int]:
    """How often each kind of malformed output was met, and ``failed`` requests."""
    counts: collections.Counter[str] = collections.Counter()
    for decided in (decided for row in decisions for decided in row):
        counts.update(
            set(decided.parse_errors) | ({"failed"} if decided.error is not None else set())
        )
    return dict(sorted(counts.items()))
