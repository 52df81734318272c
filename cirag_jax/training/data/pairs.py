"""Pairs that a cross-encoder is trained on: which texts, which negatives, which of them when.

Positives are what the benchmarks annotate: a question and each of its gold passages; a sub-question
of the decomposition and its passage; either of them and the triple that states the fact it asks
for. The text of a triple is what the runtime gives its rerankers. Negatives come from the
question's own pool and from all passages (or triples) that a bi-encoder finds near.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cirag_jax.datasets import annotations, load
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.errors import UserError
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.pairs import PairTokens, pad_pairs
from cirag_jax.retrieval.rankers import TripleText
from cirag_jax.retrieval.search import ExactIndex
from cirag_jax.types import Config, Dataset, Question, SubQuestion, Triple

Kind = Literal["passage", "triple"]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A query, one text that is relevant to it, and texts that are not.

    ``own`` are texts of the question's own pool, ``mined`` of everything else, both nearest first
    by the bi-encoder. ``gold`` are all positives of the question, its sub-questions' included: no
    easy negatives.
    """

    kind: Kind
    query: str
    positive: str
    own: tuple[str, ...]
    mined: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()


class Batch(NamedTuple):
    """One step's pairs, sorted by length.

    ``chunks`` are (``tokens_BT``, ``types_BT``, ``lengths_B``, ``label_B``, ``weight_B``); a
    padding row weighs 0 and the weights of all rows sum to 1.
    """

    chunks: tuple[tuple[np.ndarray, ...], ...]
    tokens: int
    padded_tokens: int


# -------------------------------------------------------------------------------- which questions


def reserved(question: Question) -> bool:
    """Whether a question is kept to tune or to test on, and never trained on."""
    return question.fold in ("tune", "test")


def training_questions(dataset: Dataset, data: Config) -> tuple[Question, ...]:
    """Questions of ``data``'s split with gold passages, except those of the reserved folds."""
    selected = load.select_questions(dataset, data)
    kept = tuple(q for q in selected if q.supporting and not reserved(q))
    if not kept:
        raise UserError(
            f"none of the {len(selected)} selected questions of {dataset.name} can be trained on: "
            "each lacks gold passages (`supporting`) or is of fold tune or test"
        )
    return kept


def may_train_triples(dataset: Dataset, question: Question) -> bool:
    """Whether pairs of this question and triples are trained on.

    Where a data set has folds (MuSiQue), only its fold ``train``.
    """
    has_folds = any(q.fold for q in dataset.questions)
    return question.fold == "train" or not has_folds


# ----------------------------------------------------------------------------------------- targets


def passage_targets(dataset: Dataset, questions: Sequence[Question]) -> list[Target]:
    """Questions and sub-questions with their passages; ``own``: the other passages, unordered.

    For a sub-question the passages of other hops are negatives too.
    """
    targets: list[Target] = []
    for question in questions:
        gold, made = question.supporting or (), list[Target]()
        pool = dict.fromkeys(question.context or gold)

        def text_of(pid: str) -> str:
            return chains_lib.passage_text(dataset.corpus[pid])

        rest = tuple(text_of(pid) for pid in pool if pid not in gold)
        made += [Target("passage", question.question, text_of(pid), rest) for pid in gold]
        for sub_question, step in _sub_questions(question):
            if step.supporting:
                others = tuple(text_of(pid) for pid in pool if pid != step.supporting)
                made.append(Target("passage", sub_question, text_of(step.supporting), others))
        targets += _with_gold(made)
    return targets


def triple_targets(
    dataset: Dataset, questions: Sequence[Question], normalization: Any
) -> list[Target]:
    """Constraints (questions and sub-questions) with the triples that satisfy them.

    A triple from a step's passage that names its answer is no negative: extraction
    states a fact several times. A data set without extracted triples (2WikiMultihopQA) gives its
    annotated evidences as positives and has no pool; one with some gives those alone.
    """
    write, targets = TripleText("tuple", normalization), list[Target]()
    for question in questions:
        pool = _triple_pool(dataset, question)
        positives = gold_triples(dataset, question)
        answers = [*question.answers, *(s.answer for s in question.decomposition or ())]
        rest = _negatives(pool, positives, answers, set(question.supporting or ()), write)
        made = [Target("triple", question.question, write(t), rest) for t in positives]
        for sub_question, step in _sub_questions(question):
            if not step.supporting:
                continue
            alone = dataclasses.replace(
                question,
                question=sub_question,
                supporting=(step.supporting,),
                evidences=None,
                supporting_sentences=None,
                decomposition=(dataclasses.replace(step, question=sub_question),),
            )
            found = gold_triples(dataset, alone)
            rest = _negatives(pool, found, [step.answer], {step.supporting}, write)
            made += [Target("triple", sub_question, write(t), rest) for t in found]
        targets += _with_gold(made)
    return targets


def _with_gold(targets: Sequence[Target]) -> list[Target]:
    """The targets of one question, which know each other's positives."""
    gold = tuple(dict.fromkeys(target.positive for target in targets))
    return [dataclasses.replace(target, gold=gold) for target in targets]


def gold_triples(dataset: Dataset, question: Question) -> tuple[Triple, ...]:
    """The triples of the question's silver chain: extracted ones, where anything was extracted.

    Among extracted negatives, the style of an annotated triple would give it away.
    """
    chain = chains_lib.chain_of(dataset, question, "triple")
    if chain is None:
        return ()
    pool = _triple_pool(dataset, question)
    if not dataset.triples:
        pool = [Triple(*evidence) for evidence in question.evidences or ()]
    known = {chains_lib.triple_text(triple): triple for triple in pool}
    return tuple(known[step.text] for step in chain.steps if step.text in known)


def _triple_pool(dataset: Dataset, question: Question) -> list[Triple]:
    ids = dict.fromkeys([*(question.context or ()), *(question.supporting or ())])
    return [triple for pid in ids for triple in dataset.triples.get(pid, ())]


def _negatives(
    pool: Sequence[Triple],
    positives: Sequence[Triple],
    answers: Sequence[str],
    gold_passages: set[str],
    write: Callable[[Triple], str],
) -> tuple[str, ...]:
    taken = {write(triple) for triple in positives}
    named = [answer.lower() for answer in answers if answer]
    texts = {}
    for triple in pool:
        text = write(triple)
        whole = f"{triple.head} {triple.relation} {triple.tail}".lower()
        states_it = triple.passage_id in gold_passages and any(name in whole for name in named)
        if text not in taken and not states_it:
            texts[text] = None
    return tuple(texts)


def _sub_questions(question: Question) -> list[tuple[str, SubQuestion]]:
    """Sub-questions with ``#k`` replaced by the k-th answer, and their steps."""
    steps = question.decomposition or ()
    answers = {index: step.answer for index, step in enumerate(steps)}
    return [(annotations.fill(step.question, answers), step) for step in steps]


# ------------------------------------------------------------------------------------------ mining


def mine(
    targets: Sequence[Target],
    everything: Sequence[str],
    encoder: Encoder,
    depth: int,
    progress: Callable[[int], Any] | None = None,
) -> list[Target]:
    """Sorts ``own`` by the bi-encoder, nearest first, and fills ``mined`` from ``everything``.

    The targets are of one kind. Texts that are positive for the same query, or in its own pool, are
    not mined; ``depth`` texts are kept of either sort. See `Encoder.encode` for ``progress``.
    """
    if not targets:
        return []
    texts = list(dict.fromkeys([*everything, *(t for x in targets for t in (x.positive, *x.own))]))
    row = {text: index for index, text in enumerate(texts)}
    vectors_ND = encoder.encode(texts, "passage", progress)
    queries = list(dict.fromkeys(target.query for target in targets))
    query_QD = encoder.encode(queries, "query")
    near_QK, _ = ExactIndex(vectors_ND[: len(set(everything))]).search(query_QD, depth + 64)
    place = {query: index for index, query in enumerate(queries)}
    positives: dict[str, set[str]] = {}
    for target in targets:
        positives.setdefault(target.query, set()).add(target.positive)
    result = []
    for target in targets:
        query = place[target.query]
        score_N = vectors_ND[[row[text] for text in target.own]] @ query_QD[query]
        order = np.argsort(-score_N, kind="stable")[:depth]
        own = tuple(target.own[index] for index in order)
        left_out = positives[target.query] | set(target.own)
        near = (texts[index] for index in near_QK[query] if index >= 0)
        mined = tuple(text for text in near if text not in left_out)[:depth]
        result.append(dataclasses.replace(target, own=own, mined=mined))
    return result


# ---------------------------------------------------------------------------------------- batches


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a step's pairs are drawn: so many positives, and for each so many negatives of each sort.

    ``own`` are from its own pool, ``mined`` from everything, ``easy`` ones are positives of another
    question, drawn from the same step. ``seed`` is of the order of targets and of the negatives.
    """

    targets_per_step: int
    own: int
    mined: int
    easy: int
    seed: int


def pairs_of_step(
    targets: Sequence[Target], step: int, sampling: Sampling
) -> list[tuple[str, str, bool]]:
    """(query, text, relevant) of a step, a pure function of its number.

    Targets come in a new order every epoch; where a pool has fewer texts than asked for, the other
    one fills up.
    """
    wanted = sampling.own + sampling.mined
    pairs = []
    first = step * sampling.targets_per_step
    numbers = range(first, first + sampling.targets_per_step)
    drawn = [_target(targets, number, sampling.seed) for number in numbers]
    for number, target in zip(numbers, drawn, strict=True):
        rng = np.random.default_rng((sampling.seed, number, 1))
        own = _draw_texts(target.own, sampling.own, rng)
        mined = _draw_texts(target.mined, wanted - len(own), rng)
        if len(own) + len(mined) < wanted:
            rest = [text for text in target.own if text not in own]
            own = own + _draw_texts(rest, wanted - len(own) - len(mined), rng)
        others = _easy(target, drawn, {*own, *mined})
        easy = _draw_texts(others, sampling.easy, rng)
        pairs.append((target.query, target.positive, True))
        pairs += [(target.query, text, False) for text in own + mined + easy]
    return pairs


def _target(targets: Sequence[Target], number: int, seed: int) -> Target:
    """The target in this place of the endless sequence of epochs."""
    epoch, place = divmod(number, len(targets))
    return targets[_permutation(seed, epoch, len(targets))[place]]


@functools.lru_cache(maxsize=2)  # a step may begin in one epoch and end in the next
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch's targets."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def _easy(target: Target, drawn: Sequence[Target], taken: set[str]) -> list[str]:
    """Positives of other questions, of the same kind; a text of the own pool may be relevant."""
    known = {target.positive, *target.gold, *target.own, *taken}
    same = {t.positive for t in drawn if t.query == target.query}
    texts = dict.fromkeys(t.positive for t in drawn if t.kind == target.kind)
    return [text for text in texts if text not in known and text not in same]


def _draw_texts(texts: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    chosen: Any = ()
    if texts:
        chosen = rng.choice(len(texts), min(count, len(texts)), replace=False)
    return [texts[int(index)] for index in chosen]


def pack(
    rows: Sequence[PairTokens],
    labels: Sequence[bool],
    buckets: Sequence[int],
    chunk_rows: int,
    pad_id: int,
) -> Batch:
    """Chunks of ``chunk_rows`` rows, shortest first, each padded to the bucket that holds its
    longest row.

    No row is longer than the last of the ascending ``buckets``, each of which is compiled once;
    ``labels`` say which pairs are relevant.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].tokens_T))
    chunks = []
    for start in range(0, len(order), chunk_rows):
        part = order[start : start + chunk_rows]
        bucket = next(b for b in buckets if b >= len(rows[part[-1]].tokens_T))
        arrays = pad_pairs([rows[i] for i in part], chunk_rows, bucket, pad_id)
        label_B = np.zeros((chunk_rows,), np.float32)
        weight_B = np.zeros((chunk_rows,), np.float32)
        label_B[: len(part)] = [labels[i] for i in part]
        weight_B[: len(part)] = 1.0 / len(rows)
        chunks.append((*arrays, label_B, weight_B))
    return Batch(
        tuple(chunks),
        sum(len(row.tokens_T) for row in rows),
        sum(chunk[0].size for chunk in chunks),
    )
