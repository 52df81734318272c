"""Training pairs of the cross-encoder.

Positive pairs come from annotations: a question and a gold passage, a sub-question and its passage,
or a (sub-)question and the triple that states its answer. Triples have the same text as in
reranking. Negatives are passages or triples from the question's own pool, and the passages or
triples of all questions that a bi-encoder ranks highest.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cirag_jax.datasets import annotations, load
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.errors import UserError
from cirag_jax.retrieval.buckets import smallest_bucket
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.pairs import PairTokens, pad_pairs
from cirag_jax.retrieval.rankers import TripleText
from cirag_jax.retrieval.search import ExactIndex
from cirag_jax.training.data.splits import HELD_OUT_FOLDS
from cirag_jax.types import Config, Dataset, Question, SubQuestion, Triple

Kind = Literal["passage", "triple"]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A query with a positive and negatives.

    ``own`` are negatives from the question's pool, and ``mined`` are negatives from all other
    texts; both are sorted by the bi-encoder, best first. ``gold`` are all positives of the question
    and its sub-questions, which must not be used as easy negatives.
    """

    kind: Kind
    query: str
    positive: str
    own: tuple[str, ...]
    mined: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()


class Batch(NamedTuple):
    """The pairs of a step, sorted by length.

    ``chunks`` are (``tokens_BT``, ``types_BT``, ``lengths_B``, ``label_B``, ``weight_B``). Padding
    rows have weight 0, and the weights of all rows sum to 1.
    """

    chunks: tuple[tuple[np.ndarray, ...], ...]
    tokens: int
    padded_tokens: int


def training_questions(dataset: Dataset, data: Config) -> tuple[Question, ...]:
    """Returns the selected questions that have gold passages and are not in `HELD_OUT_FOLDS`."""
    selected = load.select_questions(dataset, data)
    kept = tuple(q for q in selected if q.supporting and q.fold not in HELD_OUT_FOLDS)
    if not kept:
        raise UserError(
            f"none of the {len(selected)} selected questions of {dataset.name} can be used for "
            "training: each lacks gold passages (`supporting`) or is in fold tune or test"
        )
    return kept


def may_train_triples(dataset: Dataset, question: Question) -> bool:
    """Returns whether a question is in fold ``train`` or the dataset has no folds."""
    return question.fold == "train" or not any(q.fold for q in dataset.questions)


def passage_targets(dataset: Dataset, questions: Sequence[Question]) -> list[Target]:
    """Returns questions and sub-questions with their gold passages as positives.

    ``own`` are the other passages of the context, unordered. For a sub-question they include the
    gold passages of other hops.
    """
    targets: list[Target] = []
    for question in questions:
        gold, new = question.supporting or (), list[Target]()
        pool = dict.fromkeys(question.context or gold)

        def text_of(pid: str) -> str:
            return chains_lib.passage_text(dataset.corpus[pid])

        # By text, because several ids may have the same text.
        texts = dict.fromkeys(map(text_of, pool))
        positives = dict.fromkeys(map(text_of, gold))
        rest = tuple(text for text in texts if text not in positives)
        new += [Target("passage", question.question, text, rest) for text in positives]
        for sub_question, step in _sub_questions(question):
            if step.supporting:
                positive = text_of(step.supporting)
                others = tuple(text for text in texts if text != positive)
                new.append(Target("passage", sub_question, positive, others))
        targets += _with_gold(new)
    return targets


def triple_targets(
    dataset: Dataset, questions: Sequence[Question], normalization: Any
) -> list[Target]:
    """Returns questions and sub-questions with the triples that answer them as positives.

    Triples from the gold passage that name the answer are not used as negatives, because extraction
    often states a fact several times. In a dataset without extracted triples (2WikiMultihopQA),
    annotated evidences are the positives, and the pool has no negatives.
    """
    write, targets = TripleText("tuple", normalization), list[Target]()
    for question in questions:
        pool = _triple_pool(dataset, question)
        positives = gold_triples(dataset, question)
        answers = [*question.answers, *(s.answer for s in question.decomposition or ())]
        rest = _negatives(pool, positives, answers, set(question.supporting or ()), write)
        new = [Target("triple", question.question, write(t), rest) for t in positives]
        for sub_question, step in _sub_questions(question):
            if not step.supporting:
                continue
            single_hop = dataclasses.replace(
                question,
                question=sub_question,
                supporting=(step.supporting,),
                evidences=None,
                supporting_sentences=None,
                decomposition=(dataclasses.replace(step, question=sub_question),),
            )
            positives = gold_triples(dataset, single_hop)
            rest = _negatives(pool, positives, [step.answer], {step.supporting}, write)
            new += [Target("triple", sub_question, write(t), rest) for t in positives]
        targets += _with_gold(new)
    return targets


def _with_gold(targets: Sequence[Target]) -> list[Target]:
    """Sets ``gold`` of the targets of one question."""
    gold = tuple(dict.fromkeys(target.positive for target in targets))
    return [dataclasses.replace(target, gold=gold) for target in targets]


def gold_triples(dataset: Dataset, question: Question) -> tuple[Triple, ...]:
    """Returns the triples of the question's silver chain (derived from annotations).

    They are extracted triples if the dataset has any, because annotated triples differ in style
    from extracted negatives.
    """
    chain = chains_lib.chain_of(dataset, question, "triple")
    if chain is None:
        return ()
    pool = _triple_pool(dataset, question)
    if not dataset.triples:
        pool = [Triple(*evidence) for evidence in question.evidences or ()]
    by_text = {chains_lib.triple_text(triple): triple for triple in pool}
    return tuple(by_text[step.text] for step in chain.steps if step.text in by_text)


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
    answers = [answer.lower() for answer in answers if answer]

    def states_answer(triple: Triple) -> bool:
        words = f"{triple.head} {triple.relation} {triple.tail}".lower()
        return triple.passage_id in gold_passages and any(answer in words for answer in answers)

    # By text, because passages that are not gold may state the same.
    excluded = {write(triple) for triple in (*positives, *filter(states_answer, pool))}
    texts = dict.fromkeys(map(write, pool))
    return tuple(text for text in texts if text not in excluded)


def _sub_questions(question: Question) -> list[tuple[str, SubQuestion]]:
    """Returns (text, sub-question) pairs; in the text, the k-th answer replaces ``#k``."""
    steps = question.decomposition or ()
    answers = {index: step.answer for index, step in enumerate(steps)}
    return [(annotations.fill(step.question, answers), step) for step in steps]


def mine(
    targets: Sequence[Target],
    corpus: Sequence[str],
    encoder: Encoder,
    depth: int,
    progress: Callable[[int], Any] | None = None,
) -> list[Target]:
    """Sorts ``own`` with the bi-encoder, best first, and mines negatives from ``corpus``.

    All targets must be of one kind. Positives of a query and texts of its pool are not mined.
    ``own`` and ``mined`` are cut to ``depth`` texts each. See `Encoder.encode` for ``progress``.
    """
    if not targets:
        return []
    texts = list(dict.fromkeys([*corpus, *(t for x in targets for t in (x.positive, *x.own))]))
    row = {text: index for index, text in enumerate(texts)}
    vectors_ND = encoder.encode(texts, "passage", progress)
    queries = list(dict.fromkeys(target.query for target in targets))
    query_QD = encoder.encode(queries, "query")
    near_QK, _ = ExactIndex(vectors_ND[: len(set(corpus))]).search(query_QD, depth + 64)
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
        excluded = positives[target.query] | set(target.own)
        near = (texts[index] for index in near_QK[query] if index >= 0)
        mined = tuple(text for text in near if text not in excluded)[:depth]
        result.append(dataclasses.replace(target, own=own, mined=mined))
    return result


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The number of positives per step, and the numbers of negatives per positive.

    ``own`` negatives come from the question's pool, ``mined`` negatives from all texts; ``easy``
    negatives are positives of other questions in the step.
    """

    targets_per_step: int
    own: int
    mined: int
    easy: int
    seed: int


def pairs_of_step(
    targets: Sequence[Target], step: int, sampling: Sampling
) -> list[tuple[str, str, bool]]:
    """Returns the pairs (query, text, is relevant) of a step; steps are counted from 0.

    Targets have a new order in every epoch. If ``own`` has too few texts, more are drawn from
    ``mined``, and vice versa.
    """
    num_hard = sampling.own + sampling.mined
    pairs = []
    first = step * sampling.targets_per_step
    numbers = range(first, first + sampling.targets_per_step)
    drawn = [_target(targets, number, sampling.seed) for number in numbers]
    for number, target in zip(numbers, drawn, strict=True):
        rng = np.random.default_rng((sampling.seed, number, 1))
        own = _draw_texts(target.own, sampling.own, rng)
        mined = _draw_texts(target.mined, num_hard - len(own), rng)
        if len(own) + len(mined) < num_hard:
            rest = [text for text in target.own if text not in own]
            own = own + _draw_texts(rest, num_hard - len(own) - len(mined), rng)
        easy = _draw_texts(_easy(target, drawn, {*own, *mined}), sampling.easy, rng)
        pairs.append((target.query, target.positive, True))
        pairs += [(target.query, text, False) for text in own + mined + easy]
    return pairs


def _target(targets: Sequence[Target], number: int, seed: int) -> Target:
    """Returns the target at index ``number`` of the endless sequence of epochs."""
    epoch, place = divmod(number, len(targets))
    return targets[_permutation(seed, epoch, len(targets))[place]]


@functools.lru_cache(maxsize=2)  # A step may begin in one epoch and end in the next.
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _easy(target: Target, drawn: Sequence[Target], hard_negatives: set[str]) -> list[str]:
    """Returns positives of other questions, except texts of the target's pool (maybe relevant)."""
    same_query = (t.positive for t in drawn if t.query == target.query)
    excluded = {target.positive, *target.gold, *target.own, *hard_negatives, *same_query}
    texts = dict.fromkeys(t.positive for t in drawn if t.kind == target.kind)
    return [text for text in texts if text not in excluded]


def _draw_texts(texts: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    if not texts:
        return []
    chosen = rng.choice(len(texts), min(count, len(texts)), replace=False)
    return [texts[int(index)] for index in chosen]


def pack(
    rows: Sequence[PairTokens],
    labels: Sequence[bool],
    buckets: Sequence[int],
    chunk_rows: int,
    pad_id: int,
) -> Batch:
    """Packs rows, shortest first, into chunks of ``chunk_rows`` padded rows.

    The length of a chunk is the smallest of the ascending ``buckets`` that its longest row fits
    into.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].tokens_T))
    chunks = []
    for start in range(0, len(order), chunk_rows):
        part = order[start : start + chunk_rows]
        bucket = smallest_bucket(len(rows[part[-1]].tokens_T), buckets)
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
