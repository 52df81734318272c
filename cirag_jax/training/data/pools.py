"""Training batches of the aligner: prefixes of silver chains, with positives and negatives.

A silver chain is a sequence of units (triples, sentences or passages), derived from annotations or
read from a file. A Grain pipeline over chains yields the batches; its state in a checkpoint is a
few integers. The host represents the negatives of each query as a matrix of counts (see
`contrastive_loss`), and the device encodes each distinct text once.
"""

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grain
import numpy as np

from cirag_jax import io
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets.chain_files import FileChain, chains_of_files
from cirag_jax.datasets.chains import Chain, Unit, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.models.pooling import UNPOOLED
from cirag_jax.retrieval.buckets import smallest_bucket
from cirag_jax.training.data import mixture
from cirag_jax.types import Dataset, Question

# Chunks are halved while their texts fit, down to about this number of tokens per device.
_SMALLEST_CHUNK = 2048

Negatives = Literal["own", "in_batch", "cross_device"]
Order = Literal["dependency", "printed", "annotation"]
Epoch = Literal["questions", "prefixes"]
Tokenize = Callable[[Sequence[str], Literal["query", "passage"]], list[np.ndarray]]
# For each prefix of a chain, by its length: the units from which negatives are drawn.
PrefixPools = tuple[tuple[Unit, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing training queries from a chain.

    ``order="dependency"`` draws any partial chain in which each step comes after the steps that it
    depends on. Every step that may come next is a positive. ``order="printed"`` follows KiRAG's
    paper: the first h annotated steps are the prefix, and the next step is the positive.
    ``order="annotation"`` follows the released code, which differs for comparison questions: for h
    = 0, every step is a positive in turn; for h > 0, every order of the first h + 1 steps gives a
    prefix and its positive. Queries are drawn uniformly from all these combinations.
    ``chain_negatives`` allows other units of the chain as negatives.
    """

    prefixes_per_question: int
    num_negatives: int
    order: Order = "dependency"
    chain_negatives: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A query of the contrastive loss.

    ``positives`` are all possible next texts; the first one is the sampled target. ``negatives``
    are hard negatives from the question's pool.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


class Chunk(NamedTuple):
    """Texts of similar length that are encoded together.

    ``tokens_BT`` is int32 and ``mask_BT`` int8, see `pooling.embed`. ``row_B`` (int32) is each
    text's row in the batch's table of embeddings; padding uses the last row. ``passage_B`` (bool)
    is whether each text is a candidate.
    """

    tokens_BT: Any
    mask_BT: Any
    row_B: Any
    passage_B: Any


class Batch(NamedTuple):
    """A global batch of ``B`` queries and ``C`` distinct candidates, padded to fixed sizes.

    The table of embeddings has ``B + C + 1`` rows: queries, candidates, and a row for padding. The
    other arrays are arguments of `contrastive_loss`.
    """

    chunks: tuple[Chunk, ...]
    positive_B: Any
    count_BC: Any
    weight_B: Any

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return sum(int((chunk.mask_BT > 0).sum()) for chunk in self.chunks)

    @property
    def padded_tokens(self) -> int:
        """The number of processed tokens, including padding."""
        return sum(chunk.tokens_BT.size for chunk in self.chunks)


def chains_and_pools(
    dataset: Dataset,
    questions: Sequence[Question],
    kind: UnitKind,
    negatives: str = "in_batch",
    files: Mapping[str, FileChain] | None = None,
) -> tuple[list[Chain], list[tuple[Unit, ...]]]:
    """Returns the usable chains, and the units of each question's own passages.

    The chains come from annotations, or from ``files`` (`chain_files.read_chains`), whose negatives
    replace the question's units. A chain of triples is dropped if a step is an annotated triple
    that was not extracted, because its style differs from the extracted negatives. With
    ``negatives="own"``, a chain is also dropped if its passages have no other units, because the
    loss would be 0. Prints the number of dropped chains.
    """
    own: Mapping[str, tuple[Unit, ...]] = {}
    if files is None:
        chains = chains_lib.silver_chains(dataset, questions, kind)
    else:
        chains, own = chains_of_files(files, dataset, questions)
    by_id = {question.id: question for question in questions}
    pools = [
        own[i] if (i := chain.question_id) in own else chains_lib.pool_of(dataset, by_id[i], kind)
        for chain in chains
    ]
    usable, reasons = list(zip(chains, pools, strict=True)), list[str]()

    def keep(is_usable: Callable[[Chain, tuple[Unit, ...]], bool], reason: str) -> None:
        kept = [(chain, pool) for chain, pool in usable if is_usable(chain, pool)]
        if len(kept) < len(usable):
            reasons.append(f"{len(usable) - len(kept)} have {reason}")
        usable[:] = kept

    if kind == "triple":
        keep(
            lambda chain, pool: (
                chain.question_id in own
                or all(
                    step in chains_lib.units_of(dataset, step.passage_id, kind)
                    for step in chain.steps
                )
            ),
            "triples that were not extracted from their passages (extract them with "
            "launch/extract.py and set config.data.triples; config.data.units=sentence needs none)",
        )
    if negatives == "own":
        keep(lambda chain, pool: has_others(pool, chain), f"no {kind} as a negative")
    if not usable:
        raise UserError(
            f"none of the {len(chains)} chains of {dataset.name} can be used: {'; '.join(reasons)}."
        )
    if reasons:
        left_out = len(chains) - len(usable)
        io.say(f"{left_out} of {len(chains)} chains dropped: {'; '.join(reasons)}")
    return [chain for chain, _ in usable], [pool for _, pool in usable]


def has_others(units: Sequence[Unit], chain: Chain) -> bool:
    """Returns whether some unit has a text that is not a step of the chain."""
    gold = {step.text for step in chain.steps}
    return any(unit.text not in gold for unit in units)


def sample_examples(
    chain: Chain,
    pool: Sequence[Unit],
    kind: UnitKind,
    sampling: Sampling,
    rng: np.random.Generator,
    prefix_pools: PrefixPools = (),
    length: int | None = None,
) -> list[Example]:
    """Draws different prefixes of a chain, and negatives that the prefixes share.

    The prefixes have different lengths, except those of comparison questions with
    ``order="annotation"``. If ``length`` is given, the only prefix has this length.

    Sharing halves the number of texts to encode. Prefixes do not share negatives in two cases: with
    ``chain_negatives``, because the excluded units depend on the prefix, and with ``prefix_pools``,
    which replace ``pool``.
    """
    draw = random.Random(int(rng.integers(2**63)))
    lengths = [length] if length is not None else _draw_lengths(chain, sampling, draw)
    gold = {unit.text for unit in chain.steps}
    shared = _draw_negatives(draw, pool, gold, sampling.num_negatives)
    examples: list[Example] = []
    drawn: set[tuple[int, ...]] = set()
    for length in lengths:
        prefix, following = _sample_prefix(chain, length, sampling.order, draw)
        while (*prefix, following[0]) in drawn:  # The same combination of a comparison.
            prefix, following = _sample_prefix(chain, length, sampling.order, draw)
        drawn.add((*prefix, following[0]))
        prefix_texts = [chain.steps[step].text for step in prefix]
        positives = [chain.steps[step].text for step in following]
        negatives = shared
        if sampling.chain_negatives or prefix_pools:
            excluded = {*prefix_texts, *positives} if sampling.chain_negatives else gold
            prefix_pool = prefix_pools[length] if prefix_pools else pool
            negatives = _draw_negatives(draw, prefix_pool, excluded, sampling.num_negatives)
        query = chains_lib.query_text(chain.question, prefix_texts, kind)
        examples.append(Example(query, tuple(positives), negatives))
    return examples


def _draw_lengths(chain: Chain, sampling: Sampling, draw: random.Random) -> list[int]:
    """Draws the lengths of a chain's prefixes."""
    count = len(chain.steps)
    if not chain.comparison or sampling.order != "annotation":
        return draw.sample(range(count), min(sampling.prefixes_per_question, count))
    # The number of combinations of each length.
    combinations = [count, *(math.factorial(length + 1) for length in range(1, count))]
    lengths = []
    for _ in range(min(sampling.prefixes_per_question, sum(combinations))):
        (length,) = draw.choices(range(count), combinations)
        combinations[length] -= 1
        lengths.append(length)
    return lengths


def _draw_negatives(
    draw: random.Random, pool: Sequence[Unit], excluded: set[str], count: int
) -> tuple[str, ...]:
    others = list(dict.fromkeys(unit.text for unit in pool if unit.text not in excluded))
    return tuple(draw.sample(others, min(count, len(others))))


def _sample_prefix(
    chain: Chain, length: int, order: str, draw: random.Random
) -> tuple[list[int], list[int]]:
    """Returns a prefix of ``length`` steps, and the possible next steps, the target first."""
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
    """The fixed sizes of batches, and the kind of negatives.

    Attributes:
      num_queries: B.
      num_candidates: C, the maximum number of distinct candidates.
      negatives: ``own`` (only the query's hard negatives), ``in_batch`` (also texts of all queries
        in the same group) or ``cross_device`` (also texts of all queries in the batch).
      mask_false_negatives: whether other positives of the query are masked and equal texts count
        once. KiRAG's released code does neither.
      micro_batches: number of micro-batches; negatives come only from the same micro-batch
        (above 1 with ``accumulation="official"``).
      device_groups: number of devices that share the batch.
      chunk_tokens: maximum tokens per device and encoder call, including padding.
      bucket_lengths: sequence lengths that the encoder is compiled for, ascending.
      negative_groups: number of equal groups of a micro-batch, for ``in_batch``. It does not depend
        on the devices, so that the loss does not either.
      unpooled: number of tokens at the start of each query and each candidate that are not pooled.
    """

    num_queries: int
    num_candidates: int
    negatives: str
    mask_false_negatives: bool
    micro_batches: int
    device_groups: int
    chunk_tokens: int
    bucket_lengths: tuple[int, ...]
    negative_groups: int = 1
    unpooled: tuple[int, int] = (0, 0)

    @property
    def groups(self) -> int:
        """The number of groups of a batch, over all micro-batches."""
        return self.micro_batches * self.negative_groups


def build_batch(
    examples: Sequence[Example],
    layout: Layout,
    tokenize: Tokenize,
    pad_id: int,
    group_of: Sequence[int] | None = None,
) -> Batch:
    """Builds a batch from examples.

    ``group_of`` assigns each example to one of ``layout.groups``. By default the rows of a full
    batch are divided evenly.
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
    unpooled = [layout.unpooled[row >= layout.num_queries] for row in rows]
    return Batch(
        _chunks(tokens, rows, layout, pad_id, unpooled),
        positive_B,
        _counts(examples, candidates, layout, group_of),
        weight_B,
    )


def tokenize_once(tokenize: Tokenize) -> Tokenize:
    """Returns ``tokenize`` with a memory: each distinct text of a role is tokenized once.

    Ids are stored as bytes, because a NumPy array of a few numbers takes three times the memory.
    """
    known: dict[str, dict[str, bytes]] = {"query": {}, "passage": {}}

    def call(texts: Sequence[str], role: Literal["query", "passage"]) -> list[np.ndarray]:
        ids = known[role]
        unknown = [text for text in dict.fromkeys(texts) if text not in ids]
        ids.update(zip(unknown, (row.tobytes() for row in tokenize(unknown, role)), strict=True))
        return [np.frombuffer(ids[text], np.int32) for text in texts]

    return call


def _counts(
    examples: Sequence[Example], candidates: dict[str, int], layout: Layout, group_of: Sequence[int]
) -> np.ndarray:
    """Returns count_BC, how often the denominator of each query contains each candidate."""

    def group(index: int) -> tuple[int, ...]:
        micro, part = divmod(group_of[index], layout.negative_groups)
        if layout.negatives == "own":
            return (index,)
        return (micro,) if layout.negatives == "cross_device" else (micro, part)

    counts: dict[tuple[int, ...], collections.Counter[int]] = collections.defaultdict(
        collections.Counter
    )
    for index, example in enumerate(examples):
        counts[group(index)].update(
            candidates[text] for text in (example.positives[0], *example.negatives)
        )
    count_BC = np.zeros((layout.num_queries, layout.num_candidates), np.float32)
    for index, example in enumerate(examples):
        for candidate, count in counts[group(index)].items():
            count_BC[index, candidate] = 1 if layout.mask_false_negatives else count
        if layout.mask_false_negatives:
            others = [candidates[t] for t in example.positives[1:] if t in candidates]
            count_BC[index, others] = 0
    return count_BC


def _chunks(
    tokens: Sequence[np.ndarray],
    rows: Sequence[int],
    layout: Layout,
    pad_id: int,
    unpooled: Sequence[int],
) -> tuple[Chunk, ...]:
    """Cuts texts, longest first, into chunks of at most ``chunk_tokens`` padded tokens per device.

    The longest row determines the bucket of a chunk. Shorter rows fill up the last chunk of a
    bucket.
    """
    order = sorted(range(len(tokens)), key=lambda i: (-len(tokens[i]), i))
    buckets = [smallest_bucket(len(tokens[i]), layout.bucket_lengths) for i in order]
    chunks = []
    unused = layout.num_queries + layout.num_candidates
    start = 0
    while start < len(order):
        length = buckets[start]
        size = rows_per_chunk(length, buckets[start:].count(length), layout)
        part = order[start : start + size]
        start += size
        tokens_BT = np.full((size, length), pad_id, np.int32)
        mask_BT = np.zeros((size, length), np.int8)
        row_B = np.full(size, unused, np.int32)
        for row, index in enumerate(part):
            tokens_BT[row, : len(tokens[index])] = tokens[index]
            mask_BT[row, : len(tokens[index])] = 1
            mask_BT[row, : min(unpooled[index], len(tokens[index]))] = UNPOOLED
            row_B[row] = rows[index]
        chunks.append(Chunk(tokens_BT, mask_BT, row_B, row_B >= layout.num_queries))
    return tuple(chunks)


def rows_per_chunk(length: int, num_texts: int, layout: Layout) -> int:
    """Returns the number of rows of a chunk, over all devices, for ``num_texts`` texts of a bucket.

    It is the capacity of all devices, halved while all texts still fit, down to about the capacity
    of one device or `_SMALLEST_CHUNK` per device. This limits both the number of compiled sizes and
    the padding.
    """
    devices = layout.device_groups
    most = max(layout.chunk_tokens // length, 1)
    halvings = max(devices, layout.chunk_tokens // _SMALLEST_CHUNK).bit_length()
    sizes = [devices * (most >> halved) for halved in range(halvings)]
    return min((size for size in sizes if size >= num_texts), default=sizes[0])


@dataclasses.dataclass(frozen=True)
class _Sample(grain.transforms.RandomMap):
    kind: UnitKind
    sampling: Sampling

    def random_map(self, element, rng: np.random.Generator) -> list[Example]:
        chain, pool, prefix_pools, length = element
        return sample_examples(chain, pool, self.kind, self.sampling, rng, prefix_pools, length)


def num_examples(chains: Sequence[Chain], epoch: Epoch) -> int:
    """Returns the number of questions or prefixes that an epoch visits."""
    return sum(len(chain.steps) for chain in chains) if epoch == "prefixes" else len(chains)


def check_enough(num_chains: int, batch_size: int, prefixes: int) -> int:
    """Returns the number of questions per step; raises `UserError` if there are fewer chains."""
    per_batch = max(batch_size // prefixes, 1)
    if num_chains < per_batch:
        raise UserError(
            f"a step needs {per_batch} training questions with a chain (config.batch_size="
            f"{batch_size} / config.prefixes_per_question={prefixes}), but there are only "
            f"{num_chains}; add questions, set config.batch_size to at most "
            f"{num_chains * prefixes}, or lower config.dev.questions"
        )
    return per_batch


def batches(
    chains: Sequence[Chain],
    pools: Sequence[Sequence[Unit]],
    kind: UnitKind,
    sampling: Sampling,
    layout: Layout,
    tokenize: Tokenize,
    pad_id: int,
    seed: int,
    prefix_pools: Sequence[PrefixPools] = (),
    *,
    epoch: Epoch = "questions",
    sizes: Sequence[int] = (),
    weights: Sequence[float] | None = None,
) -> grain.DatasetIterator:
    """Returns an endless iterator over batches, reshuffled in every epoch; its state is JSON.

    With ``epoch="prefixes"``, an epoch has one example for every prefix of every chain. With
    ``weights``, the chains are those of several data sets, one after the other, with ``sizes``
    chains each; see `mixture.endless`. Each distinct text is tokenized once.

    A batch has ``layout.num_queries // sampling.prefixes_per_question`` questions, divided evenly
    over the groups, because chains may have fewer prefixes than requested. ``prefix_pools`` has an
    entry for each chain, see `sample_examples`.
    """
    per_batch = check_enough(
        num_examples(chains, epoch), layout.num_queries, sampling.prefixes_per_question
    )
    items = zip(chains, pools, prefix_pools or [()] * len(chains), strict=True)
    tokenize = tokenize_once(tokenize)
    sets = [
        [
            (*item, length)
            for item in itertools.islice(items, size)
            for length in (range(len(item[0].steps)) if epoch == "prefixes" else (None,))
        ]
        for size in sizes or (len(chains),)
    ]

    def lay_out(questions: Sequence[Sequence[Example]]) -> Batch:
        examples = [example for question_examples in questions for example in question_examples]
        groups = [
            i * layout.groups // per_batch
            for i, question_examples in enumerate(questions)
            for _ in question_examples
        ]
        return build_batch(examples, layout, tokenize, pad_id, groups)

    dataset = (
        mixture.endless(sets, weights, seed)
        .random_map(_Sample(kind, sampling))
        .batch(per_batch, batch_fn=list)
        .map(lay_out)
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))
