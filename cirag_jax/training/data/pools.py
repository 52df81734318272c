"""Training batches of the aligner: prefixes of silver chains, their positives and negatives.

Records are addressed by step (a Grain pipeline over chains), so that the iterator's whole state is
a few integers in the checkpoint. What a query is contrasted with becomes a matrix of counts here,
on the host (see ``contrastive_loss``); the device sees each distinct text once.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Literal

import grain
import numpy as np

from cirag_jax import io
from cirag_jax.datasets.chains import (
    Chain,
    Unit,
    UnitKind,
    pool_of,
    query_text,
    silver_chains,
    units_of,
)
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Question

# More than anyone waits for; without an end, batches of one overflow grain's count.
_EPOCHS = 1 << 32

NEGATIVES = ("own", "in_batch", "cross_device")
ORDERS = ("dependency", "printed", "annotation")
Tokenize = Callable[[Sequence[str], Literal["query", "passage"]], list[np.ndarray]]
# What the negatives of each prefix of a chain are drawn from, by the number of its steps.
PrefixPools = tuple[tuple[Unit, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How a chain becomes training queries.

    ``order="dependency"`` draws any partial chain whose steps have what they need; every step that
    can come next is a positive. ``order="printed"`` is KiRAG's paper: the first h annotated steps,
    and the next one. ``order="annotation"`` is its released code: the same, but for comparison
    questions any single step at h = 0 and any permutation of the first h + 1 for h > 0.
    ``chain_negatives`` lets the question's other chain units be drawn as negatives.
    """

    prefixes_per_question: int
    num_negatives: int
    order: Literal["dependency", "printed", "annotation"] = "dependency"
    chain_negatives: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One query of the contrastive loss.

    ``positives`` are all texts that may come next, the sampled target first; ``negatives`` are hard
    negatives from the question's own pool.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of similar length that go through the encoder together.

    ``tokens_BT`` int32 and ``mask_BT`` bool; ``row_B`` int32 is each row's place in the batch's
    table of embeddings (padding rows point at the last, unused place).
    """

    tokens_BT: np.ndarray
    mask_BT: np.ndarray
    row_B: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: ``B`` queries and ``C`` distinct candidates, both padded to fixed numbers.

    The table of embeddings has ``B + C + 1`` rows: queries, candidates, and one row that padding
    writes to. Other fields are the arguments of ``contrastive_loss``.
    """

    chunks: tuple[Chunk, ...]
    positive_B: np.ndarray
    count_BC: np.ndarray
    weight_B: np.ndarray
    tokens: int  # Real tokens in the batch, distinct texts only.

    @property
    def padded_tokens(self) -> int:
        """Tokens that the encoder computes, padding included."""
        return sum(chunk.tokens_BT.size for chunk in self.chunks)


def chains_and_pools(
    dataset: Dataset, questions: Sequence[Question], kind: UnitKind, negatives: str = "in_batch"
) -> tuple[list[Chain], list[tuple[Unit, ...]]]:
    """The chains that can be learnt from, and the units of each question's own passages.

    A chain of triples is left out where an annotated triple replaces one that was not extracted:
    among extracted negatives, its style gives it away. With ``negatives="own"``, so is a chain
    whose passages have no other unit: its loss is 0. How many were left out is said.
    """
    chains = silver_chains(dataset, questions, kind)
    by_id = {question.id: question for question in questions}
    pools = [pool_of(dataset, by_id[chain.question_id], kind) for chain in chains]
    usable = list(zip(chains, pools, strict=True))
    reasons = []
    if kind == "triple":
        extracted = [
            (chain, pool)
            for chain, pool in usable
            if all(step in units_of(dataset, step.passage_id, "triple") for step in chain.steps)
        ]
        if len(extracted) < len(usable):
            reasons.append(
                f"{len(usable) - len(extracted)} have triples that were not extracted from their "
                "passages (launch/extract.py extracts them; config.data.units=sentence needs none)"
            )
        usable = extracted
    if negatives == "own":
        contrasted = [pair for pair in usable if set(pair[1]) - set(pair[0].steps)]
        if len(contrasted) < len(usable):
            reasons.append(f"{len(usable) - len(contrasted)} have no {kind} that is a negative")
        usable = contrasted
    if not usable:
        raise UserError(
            f"none of the {len(chains)} chains of {dataset.name} can be used: {'; '.join(reasons)}."
        )
    if reasons:
        left_out = len(chains) - len(usable)
        io.say(f"{left_out} of {len(chains)} chains left out: {'; '.join(reasons)}")
    return [chain for chain, _ in usable], [pool for _, pool in usable]


def sample_examples(
    chain: Chain,
    pool: Sequence[Unit],
    kind: UnitKind,
    sampling: Sampling,
    rng: np.random.Generator,
    of_prefixes: PrefixPools = (),
) -> list[Example]:
    """Draws distinct prefix lengths of one chain, and negatives that its prefixes share.

    Sharing halves the texts to encode. With ``chain_negatives`` each prefix has its own, because
    what is gold depends on it; so it has with ``of_prefixes``, which replace the pool. Pure in
    ``rng``: the same generator state gives the same examples.
    """
    draw = random.Random(int(rng.integers(2**63)))
    lengths = draw.sample(
        range(len(chain.steps)), min(sampling.prefixes_per_question, len(chain.steps))
    )
    gold = {unit.text for unit in chain.steps}
    shared = _draw_negatives(draw, pool, gold, sampling.num_negatives)
    examples = []
    for length in lengths:
        prefix, following = _sample_prefix(chain, length, sampling.order, draw)
        found = [chain.steps[step].text for step in prefix]
        positives = [chain.steps[step].text for step in following]
        negatives = shared
        if sampling.chain_negatives or of_prefixes:
            excluded = {*found, *positives} if sampling.chain_negatives else gold
            of_prefix = of_prefixes[length] if of_prefixes else pool
            negatives = _draw_negatives(draw, of_prefix, excluded, sampling.num_negatives)
        query = query_text(chain.question, found, kind)
        examples.append(Example(query, tuple(positives), negatives))
    return examples


def _draw_negatives(
    draw: random.Random, pool: Sequence[Unit], excluded: set[str], count: int
) -> tuple[str, ...]:
    others = list(dict.fromkeys(unit.text for unit in pool if unit.text not in excluded))
    return tuple(draw.sample(others, min(count, len(others))))


def _sample_prefix(
    chain: Chain, length: int, order: str, draw: random.Random
) -> tuple[list[int], list[int]]:
    """A partial chain of ``length`` steps, and the steps that can follow, the target first."""
    prefix: list[int] = []
    if order != "dependency":
        steps = list(range(len(chain.steps)))
        if chain.comparison and order == "annotation":
            head = steps if length == 0 else steps[: length + 1]
            steps = draw.sample(head, len(head))
            return steps[:length], steps[length:]
        return steps[:length], [length]
    for _ in range(length):
        prefix.append(draw.choice(chain.next_steps(prefix)))
    following = list(chain.next_steps(prefix))
    draw.shuffle(following)
    return prefix, following


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed sizes and the negatives of every batch.

    Attributes:
      num_queries: B, a multiple of ``micro_batches * device_groups``.
      num_candidates: C, the most distinct candidates that a batch can have.
      negatives: ``own`` (the query's own positive and hard negatives), ``in_batch`` (those of all
        queries on the same device) or ``cross_device`` (of the whole batch).
      mask_false_negatives: leave out texts that are another positive of the query, and count equal
        texts once. KiRAG's released code does neither.
      micro_batches: above 1, negatives stay within the micro-batch (``accumulation="official"``).
      device_groups: devices that share the batch.
      chunk_tokens: tokens that go through each device's encoder at once, padding included.
      bucket_lengths: sequence lengths that the encoder is compiled for, ascending.
    """

    num_queries: int
    num_candidates: int
    negatives: str
    mask_false_negatives: bool
    micro_batches: int
    device_groups: int
    chunk_tokens: int
    bucket_lengths: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Parts of a batch: one for each device in each micro-batch."""
        return self.micro_batches * self.device_groups

    def __post_init__(self) -> None:
        if self.num_queries % self.groups:
            raise UserError(
                f"the batch of {self.num_queries} queries does not divide into "
                f"{self.micro_batches} micro-batches on {self.device_groups} devices; choose "
                "config.batch_size as a multiple"
            )


def build_batch(
    examples: Sequence[Example],
    layout: Layout,
    tokenize: Tokenize,
    pad_id: int,
    group_of: Sequence[int] | None = None,
) -> Batch:
    """Lays examples out as one batch: distinct texts, who sees whom, and chunks by length.

    ``group_of`` says which of ``layout.groups`` each example is in; None: the rows of a full batch
    are divided evenly.
    """
    if group_of is None:
        group_of = [i * layout.groups // layout.num_queries for i in range(len(examples))]
    candidates: dict[str, int] = {}
    for example in examples:
        for text in (example.positives[0], *example.negatives):
            candidates.setdefault(text, len(candidates))
    positive_B = np.zeros(layout.num_queries, np.int32)
    weight_B = np.zeros(layout.num_queries, np.float32)
    positive_B[: len(examples)] = [candidates[e.positives[0]] for e in examples]
    weight_B[: len(examples)] = 1.0
    tokens = tokenize([e.query for e in examples], "query") + tokenize(list(candidates), "passage")
    rows = [*range(len(examples)), *(layout.num_queries + i for i in range(len(candidates)))]
    return Batch(
        _chunks(tokens, rows, layout, pad_id),
        positive_B,
        _counts(examples, candidates, layout, group_of),
        weight_B,
        sum(map(len, tokens)),
    )


def _counts(
    examples: Sequence[Example],
    candidates: dict[str, int],
    layout: Layout,
    group_of: Sequence[int],
) -> np.ndarray:
    """count_BC: how often each candidate stands in each query's denominator."""

    def group(index: int) -> tuple[int, ...]:
        micro, device = divmod(group_of[index], layout.device_groups)
        if layout.negatives == "own":
            return (index,)
        return (micro,) if layout.negatives == "cross_device" else (micro, device)

    seen: dict[tuple[int, ...], collections.Counter[int]] = collections.defaultdict(
        collections.Counter
    )
    for index, example in enumerate(examples):
        seen[group(index)].update(
            candidates[text] for text in (example.positives[0], *example.negatives)
        )
    count_BC = np.zeros((layout.num_queries, layout.num_candidates), np.float32)
    for index, example in enumerate(examples):
        for candidate, count in seen[group(index)].items():
            count_BC[index, candidate] = 1 if layout.mask_false_negatives else count
        if layout.mask_false_negatives:
            others = [candidates[t] for t in example.positives[1:] if t in candidates]
            count_BC[index, others] = 0
    return count_BC


def _chunks(
    tokens: Sequence[np.ndarray], rows: Sequence[int], layout: Layout, pad_id: int
) -> tuple[Chunk, ...]:
    """Cuts the texts, longest first, into chunks of at most ``chunk_tokens`` padded tokens
    on each device.

    A chunk takes the bucket of its longest row, so that short rows left over fill the last places
    of a longer chunk instead of opening one of their own.
    """
    order = sorted(range(len(tokens)), key=lambda i: (-len(tokens[i]), i))
    buckets = [next(b for b in layout.bucket_lengths if b >= len(tokens[i])) for i in order]
    chunks = []
    unused = layout.num_queries + layout.num_candidates
    start = 0
    while start < len(order):
        length = buckets[start]
        size = rows_per_chunk(length, buckets[start:].count(length), layout)
        part = order[start : start + size]
        start += size
        tokens_BT = np.full((size, length), pad_id, np.int32)
        mask_BT = np.zeros((size, length), bool)
        row_B = np.full(size, unused, np.int32)
        for row, index in enumerate(part):
            tokens_BT[row, : len(tokens[index])] = tokens[index]
            mask_BT[row, : len(tokens[index])] = True
            row_B[row] = rows[index]
        chunks.append(Chunk(tokens_BT, mask_BT, row_B))
    return tuple(chunks)


def rows_per_chunk(length: int, wanted: int, layout: Layout) -> int:
    """Rows, over all devices, of a chunk for ``wanted`` texts of this bucket.

    As many as the devices take together, or a half, a quarter and so on where that holds them all,
    down to what one device takes: few sizes, so that few are compiled, and no more padding than
    with one device.
    """
    devices = layout.device_groups
    most = max(layout.chunk_tokens // length, 1)
    sizes = [devices * (most >> halved) for halved in range(devices.bit_length())]
    return min((size for size in sizes if size >= wanted), default=sizes[0])


@dataclasses.dataclass(frozen=True)
class _Sample(grain.transforms.RandomMap):
    kind: UnitKind
    sampling: Sampling

    def random_map(self, element, rng: np.random.Generator) -> list[Example]:
        chain, pool, of_prefixes = element
        return sample_examples(chain, pool, self.kind, self.sampling, rng, of_prefixes)


def check_enough(chains: int, per_batch: int) -> None:
    """Raises UserError where there are fewer chains than a batch has questions."""
    if chains < per_batch:
        raise UserError(
            f"config.batch_size needs {per_batch} questions a batch, but only {chains} have a chain"
        )


def batches(
    chains: Sequence[Chain],
    pools: Sequence[Sequence[Unit]],
    kind: UnitKind,
    sampling: Sampling,
    layout: Layout,
    tokenize: Tokenize,
    pad_id: int,
    seed: int,
    of_prefixes: Sequence[PrefixPools] = (),
) -> grain.DatasetIterator:
    """An endless iterator of ``Batch``, reshuffled every epoch, whose state is JSON-sized.

    A batch holds ``layout.num_queries // sampling.prefixes_per_question`` questions, divided
    evenly over the layout's groups: chains may have fewer prefixes than asked for. See
    `sample_examples` for ``of_prefixes``, one for each chain.
    """
    per_batch = layout.num_queries // sampling.prefixes_per_question
    check_enough(len(chains), per_batch)

    def lay_out(questions: Sequence[Sequence[Example]]) -> Batch:
        examples = [example for made in questions for example in made]
        groups = [i * layout.groups // per_batch for i, made in enumerate(questions) for _ in made]
        return build_batch(examples, layout, tokenize, pad_id, groups)

    dataset = (
        grain.MapDataset.source(
            list(zip(chains, pools, of_prefixes or [()] * len(chains), strict=True))
        )
        .seed(seed)
        .shuffle()
        .repeat(_EPOCHS)
        .random_map(_Sample(kind, sampling))
        .batch(per_batch, batch_fn=list)
        .map(lay_out)
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))
