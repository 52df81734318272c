import collections
import dataclasses

import jax
import numpy as np
import pytest

from cirag_jax.datasets.chains import Chain, Unit
from cirag_jax.errors import UserError
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data.pools import (
    Example,
    Layout,
    Sampling,
    batches,
    build_batch,
    chains_and_pools,
    num_examples,
    rows_per_chunk,
    sample_examples,
)
from cirag_jax.types import Dataset, Passage, Question, Triple
from tests import tiny

LAYOUT = Layout(
    num_queries=4,
    num_candidates=12,
    negatives="cross_device",
    mask_false_negatives=True,
    micro_batches=1,
    device_groups=1,
    chunk_tokens=32,
    bucket_lengths=(4, 8, 16),
)


def tokenize(texts, role):
    """Returns one token per word: a hash, which has no collisions in these tests."""
    return [np.array([sum(map(ord, w)) % 97 + 1 for w in t.split()], np.int32) for t in texts]


def unit(text, passage="p"):
    return Unit(text, passage)


BRIDGE = Chain("q", "question", (unit("a"), unit("b"), unit("c")), ((), (0,), (1,)), False)
COMPARISON = Chain("q", "question", (unit("a"), unit("b"), unit("c")), ((), (), ()), True)
POOL = [unit(t) for t in ("a", "b", "c", "n1", "n2", "n3", "n3")]


def _draws(chain, sampling, count=200):
    for seed in range(count):
        yield from sample_examples(chain, POOL, "triple", sampling, np.random.default_rng(seed))


CORPUS = {name: Passage(name, name, f"{name} is here.") for name in "abx"}
EVIDENCES = (("A", "leads to", "B"), ("B", "lies in", "C"))
EXTRACTED = {
    "a": (Triple("A", "goes to", "B", "a"),),
    "b": (Triple("B", "is in", "C", "b"),),
    "x": (Triple("X", "is", "Y", "x"),),
}


def _usable(triples, kind="triple", negatives="own"):
    question = Question(
        *("q", "Where does A lead?", ("C",)),
        context=("a", "b", "x"),
        supporting=("a", "b"),
        evidences=EVIDENCES,
    )
    dataset = Dataset("made", (question,), CORPUS, triples)
    chains, pools = chains_and_pools(dataset, [question], kind, negatives)
    return [step.text for step in chains[0].steps], [unit.text for unit in pools[0]]


def test_chains_and_pools_have_units_of_own_passages():
    steps = ["<A; goes to; B>", "<B; is in; C>"]
    assert _usable(EXTRACTED) == (steps, [*steps, "<X; is; Y>"])
    assert _usable({}, "sentence")[1] == [f"{name}: {name} is here." for name in "abx"]


@pytest.mark.parametrize(
    ("missing", "negatives", "words"),
    [
        ("abx", "own", "none of the 1 chains of made can be used: 1 have triples that were not"),
        ("a", "in_batch", "1 have triples that were not extracted from their passages"),
        ("x", "own", "1 have no triple as a negative"),
    ],
)
def test_chains_and_pools_without_usable_chain_is_refused(missing, negatives, words):
    triples = {name: facts for name, facts in EXTRACTED.items() if name not in missing}
    with pytest.raises(UserError, match=words):
        _usable(triples, negatives=negatives)
    if missing == "x":
        assert len(_usable(triples, negatives="in_batch")[1]) == 2


def test_chains_and_pools_copy_of_a_step_is_no_negative():
    question = Question("q", "?", ("x",), supporting=("a",), context=("a", "twin"))
    corpus = {"a": CORPUS["a"], "twin": dataclasses.replace(CORPUS["a"], id="twin")}
    dataset = Dataset("made", (question,), corpus, {})
    with pytest.raises(UserError, match="1 have no passage as a negative"):
        chains_and_pools(dataset, [question], "passage", "own")


def test_chains_and_pools_reports_dropped_chains(capsys):
    dataset = tiny.dataset()
    missing_ids = set(dataset.questions[0].supporting or ())
    triples = {key: facts for key, facts in dataset.triples.items() if key not in missing_ids}
    dataset = dataclasses.replace(dataset, triples=triples)
    kept, pools = chains_and_pools(dataset, dataset.questions, "triple")
    num_dropped = len(dataset.questions) - len(kept)
    assert num_dropped and dataset.questions[0].id not in {chain.question_id for chain in kept}
    assert f"{num_dropped} of {len(dataset.questions)} chains dropped" in capsys.readouterr().err
    for chain, pool in zip(kept, pools, strict=True):
        assert set(chain.steps) <= set(pool)


def test_sample_bridge_prefixes_follow_the_chain():
    drawn = {(e.query, e.positives) for e in _draws(BRIDGE, Sampling(2, 2))}
    assert drawn == {
        ("question", ("a",)),
        ("question\nknowledge triples: a.", ("b",)),
        ("question\nknowledge triples: a. b.", ("c",)),
    }


def test_sample_annotation_order_draws_uniformly_from_all_combinations():
    """Two steps of a comparison give two bare and two chained queries (B6)."""
    chain = dataclasses.replace(COMPARISON, steps=COMPARISON.steps[:2], parents=((), ()))
    sampling = Sampling(2, 0, order="annotation")
    kinds = []
    for seed in range(600):
        pair = sample_examples(chain, POOL, "triple", sampling, np.random.default_rng(seed))
        assert len({(example.query, example.positives[0]) for example in pair}) == 2
        kinds.append(sorted("knowledge" in example.query for example in pair))
    mixed = sum(kind == [False, True] for kind in kinds) / len(kinds)
    assert 0.6 < mixed < 0.73  # 4 of 6 pairs
    assert [False, False] in kinds and [True, True] in kinds
    for count, most in ((9, 4), (3, 3)):
        sampling = dataclasses.replace(sampling, prefixes_per_question=count)
        assert {len(list(_draws(chain, sampling, 1)))} == {most}


def _queries(batch, layout):
    """Returns the token ids of all queries of a batch."""
    rows = (zip(*chunk[:3], strict=True) for chunk in batch.chunks)
    return [ids[mask > 0] for chunk in rows for ids, mask, row in chunk if row < layout.num_queries]


def test_batches_epoch_of_prefixes_visits_every_prefix_once():
    chains = [BRIDGE, dataclasses.replace(BRIDGE, question_id="r", question="other")]
    layout = dataclasses.replace(LAYOUT, num_queries=2, num_candidates=6)
    settings = (Sampling(1, 1, order="printed"), layout, tokenize, 0, 0)
    iterator = batches(chains, [POOL] * 2, "triple", *settings, epoch="prefixes")
    visited = [tuple(ids) for _ in range(6) for ids in _queries(next(iterator), layout)]
    assert num_examples(chains, "prefixes") == 6 and num_examples(chains, "questions") == 2
    for start in (0, 6):  # two epochs
        assert len(set(visited[start : start + 6])) == 6
    with pytest.raises(UserError, match="but there are only 3"):
        batches(
            [BRIDGE], [POOL], "triple", Sampling(1, 1), LAYOUT, tokenize, 0, 0, epoch="prefixes"
        )


def test_sample_dependency_order_draws_any_ready_step():
    chain = dataclasses.replace(BRIDGE, parents=((), (), (0, 1)))  # Two roots, then their join.
    drawn = {(e.query, frozenset(e.positives)) for e in _draws(chain, Sampling(3, 0))}
    assert drawn == {
        ("question", frozenset("ab")),
        ("question\nknowledge triples: a.", frozenset("b")),
        ("question\nknowledge triples: b.", frozenset("a")),
        ("question\nknowledge triples: a. b.", frozenset("c")),
        ("question\nknowledge triples: b. a.", frozenset("c")),
    }


def test_sample_annotation_order_permutes_comparisons():
    drawn = {
        (e.query.partition(": ")[2], e.positives[0])
        for e in _draws(COMPARISON, Sampling(3, 0, order="annotation"))
    }
    singles = {("", x) for x in "abc"}  # h = 0: any single step.
    pairs = {("a.", "b"), ("b.", "a")}  # h = 1: permutations of the first two.
    triples = {
        (f"{x}. {y}.", z) for x in "abc" for y in "abc" for z in "abc" if len({x, y, z}) == 3
    }
    assert drawn == singles | pairs | triples


def test_sample_printed_order_takes_first_units():
    expected = {("question", ("a",))} | {
        (f"question\nknowledge triples: {prefix}.", (following,))
        for prefix, following in (("a", "b"), ("a. b", "c"))
    }
    for chain in (BRIDGE, COMPARISON):
        actual = {(e.query, e.positives) for e in _draws(chain, Sampling(3, 0, order="printed"))}
        assert actual == expected


def test_sample_negatives_are_distinct_and_not_gold():
    for seed in range(50):
        examples = sample_examples(
            BRIDGE, POOL, "triple", Sampling(2, 2), np.random.default_rng(seed)
        )
        assert examples[0].negatives == examples[1].negatives
        assert len(set(examples[0].negatives)) == 2
        assert set(examples[0].negatives) <= {"n1", "n2", "n3"}


def test_sample_chain_negatives_are_other_steps():
    drawn = {n for e in _draws(BRIDGE, Sampling(1, 5, chain_negatives=True)) for n in e.negatives}
    assert drawn == {"b", "c", "n1", "n2", "n3"}  # "a" is in the prefix or is the positive.
    for example in _draws(BRIDGE, Sampling(1, 5, chain_negatives=True), 20):
        assert not set(example.negatives) & set(example.positives)


@pytest.mark.parametrize(("chain_negatives", "more"), [(False, set()), (True, {"c"})])
def test_sample_prefix_pools_replace_the_pool(chain_negatives, more):
    prefix_pools = tuple(
        tuple(map(unit, ("a", "b", "c", f"far {n}", f"near {n}"))) for n in range(3)
    )
    sampling = Sampling(3, 9, order="printed", chain_negatives=chain_negatives)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        examples = sample_examples(BRIDGE, POOL, "triple", sampling, rng, prefix_pools)
        negatives = {example.positives[0]: {*example.negatives} for example in examples}
        assert negatives["a"] - {"b"} == {"far 0", "near 0"} | more
        assert negatives["b"] == {"far 1", "near 1"} | more
        assert negatives["c"] == {"far 2", "near 2"}


EXAMPLES = [
    Example("q one", ("pos a", "pos b"), ("neg 1",)),
    Example("q two words", ("pos b",), ("neg 1", "neg 2")),
    Example("q three", ("pos a",), ("neg 3",)),
]
NAMES = ["pos a", "neg 1", "pos b", "neg 2", "neg 3"]  # Candidates in order of first use.


def _counts(**changes):
    batch = build_batch(EXAMPLES, dataclasses.replace(LAYOUT, **changes), tokenize, 0)
    return [
        {NAMES[c]: int(n) for c, n in enumerate(row[:5]) if n} for row in batch.count_BC[:3]
    ], batch


def test_batch_cross_device_masks_positives_and_repeats():
    counts, batch = _counts()
    everything = dict.fromkeys(NAMES, 1)
    without_b = {k: 1 for k in NAMES if k != "pos b"}  # Also a positive of the first query.
    assert counts == [without_b, everything, everything]
    assert [NAMES[i] for i in batch.positive_B[:3]] == ["pos a", "pos b", "pos a"]
    np.testing.assert_array_equal(batch.weight_B, [1, 1, 1, 0])


def test_batch_unmasked_counts_false_negatives_and_repeats():
    counts, _ = _counts(mask_false_negatives=False)
    assert counts[0] == {"pos a": 2, "neg 1": 2, "pos b": 1, "neg 2": 1, "neg 3": 1}


def test_batch_own_negatives_exclude_other_queries():
    counts, _ = _counts(negatives="own")
    assert counts == [
        {"pos a": 1, "neg 1": 1},
        {"pos b": 1, "neg 1": 1, "neg 2": 1},
        {"pos a": 1, "neg 3": 1},
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"negatives": "in_batch", "negative_groups": 2},
        {"negatives": "cross_device", "micro_batches": 2},  # Two queries in each micro-batch.
    ],
)
def test_batch_groups_of_two_queries(changes):
    counts, _ = _counts(**changes)
    first = {"pos a": 1, "neg 1": 1, "neg 2": 1}
    assert counts == [first, {**first, "pos b": 1}, {"pos a": 1, "neg 3": 1}]


def test_batch_in_batch_groups_are_within_micro_batches():
    counts, _ = _counts(negatives="in_batch", negative_groups=2, micro_batches=2)
    assert counts[0] == {"pos a": 1, "neg 1": 1}  # There is one query per group.


def test_batches_in_batch_candidates_do_not_depend_on_devices():
    chains = [dataclasses.replace(BRIDGE, question=f"question {i}") for i in range(4)]
    pools = [[*BRIDGE.steps, unit(f"negative {i}")] for i in range(4)]
    layout = dataclasses.replace(LAYOUT, num_queries=8, num_candidates=24, negatives="in_batch")

    def counts(**changes):
        changed = dataclasses.replace(layout, **changes)
        batch = next(batches(chains, pools, "triple", Sampling(2, 1), changed, tokenize, 0, 0))
        return batch.count_BC.tolist()

    for groups in (1, 2, 4):
        expected = counts(negative_groups=groups)
        for devices in (2, 4, 8):
            assert counts(negative_groups=groups, device_groups=devices) == expected
    assert counts(negative_groups=2) != counts(negative_groups=4) != counts(negative_groups=1)


def test_batches_groups_hold_whole_questions():
    """Each group has queries of only one chain, although two of its four queries are missing."""
    chains = [
        Chain(f"q{i}", f"question {i}", (unit(f"a{i}"), unit(f"b{i}")), ((), (0,)), False)
        for i in range(4)
    ]
    pools = [[*chain.steps, unit(f"n{i}")] for i, chain in enumerate(chains)]
    layout = dataclasses.replace(LAYOUT, num_queries=16, num_candidates=40, micro_batches=4)
    batch = next(batches(chains, pools, "triple", Sampling(4, 1), layout, tokenize, 0, 0))
    count_BC = batch.count_BC[batch.weight_B > 0]
    assert (count_BC.sum(axis=1) == 3).all()  # The positives a and b, and n.
    assert ((count_BC.sum(axis=0) == 2) | (count_BC.sum(axis=0) == 0)).all()
    # With one group, all queries share their candidates.
    whole = dataclasses.replace(layout, micro_batches=1)
    batch = next(batches(chains, pools, "triple", Sampling(4, 1), whole, tokenize, 0, 0))
    assert (batch.count_BC[batch.weight_B > 0].sum(axis=1) == 12).all()


def test_batch_every_text_has_one_row():
    batch = build_batch(EXAMPLES, LAYOUT, tokenize, 0)
    rows = {}
    for chunk in batch.chunks:
        assert chunk.tokens_BT.shape == (
            rows_per_chunk(chunk.tokens_BT.shape[1], 1, LAYOUT),
            chunk.tokens_BT.shape[1],
        )
        for tokens, mask, row in zip(chunk.tokens_BT, chunk.mask_BT, chunk.row_B, strict=True):
            if row == 16:  # The unused last row takes the padding.
                assert not mask.any()
                continue
            assert row not in rows
            rows[int(row)] = tokens[mask > 0].tolist()
    texts = {i: e.query for i, e in enumerate(EXAMPLES)} | {4 + i: t for i, t in enumerate(NAMES)}
    assert rows == {row: tokenize([text], "query")[0].tolist() for row, text in texts.items()}
    assert batch.tokens == sum(map(len, rows.values()))


def test_batch_text_beyond_the_longest_bucket_is_refused():
    example = Example("word " * 17, ("pos a",), ())
    with pytest.raises(UserError, match="a text of 17 tokens does not fit the 16 tokens of a row"):
        build_batch([example], LAYOUT, tokenize, 0)


def test_rows_per_chunk_depend_on_devices_and_texts():
    assert {rows_per_chunk(8, num_texts, LAYOUT) for num_texts in range(1, 99)} == {4}
    layout = dataclasses.replace(LAYOUT, num_queries=8, device_groups=8)
    rows = {num_texts: rows_per_chunk(8, num_texts, layout) for num_texts in (1, 8, 9, 16, 17, 99)}
    assert rows == {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 99: 32}
    assert rows_per_chunk(64, 1, layout) == 8  # Longer than chunk_tokens, so one row per device.
    # Large chunks are halved on one device, too, down to 2,048 tokens.
    layout = dataclasses.replace(LAYOUT, chunk_tokens=16384)
    rows = {num_texts: rows_per_chunk(128, num_texts, layout) for num_texts in (1, 16, 17, 65, 999)}
    assert rows == {1: 16, 16: 16, 17: 32, 65: 128, 999: 128}


def test_batches_tokenize_each_text_of_a_role_once(monkeypatch):
    asked = []

    def record(texts, role):
        asked.extend((text, role) for text in texts)
        return tokenize([f"{role} {text}" for text in texts], role)

    def draw():
        settings = (Sampling(2, 2), LAYOUT, record, 0, 0)
        iterator = batches([BRIDGE, COMPARISON], [POOL] * 2, "triple", *settings)
        return [next(iterator) for _ in range(8)]

    cached = draw()
    assert len(asked) == len({*asked}) and {role for _, role in asked} == {"query", "passage"}
    monkeypatch.setattr(pools_lib, "tokenize_once", lambda tokenize: tokenize)
    jax.tree.map(np.testing.assert_array_equal, cached, draw())
    assert len(asked) > len({*asked})


def _iterator(seed=0, prefixes=2):
    chains = [dataclasses.replace(BRIDGE, question=f"question {i}") for i in range(5)]
    sampling = Sampling(prefixes, 2)
    return batches(chains, [POOL] * 5, "triple", sampling, LAYOUT, tokenize, 0, seed)


def _same(a, b):
    return all(
        np.array_equal(x.tokens_BT, y.tokens_BT) and np.array_equal(x.row_B, y.row_B)
        for x, y in zip(a.chunks, b.chunks, strict=True)
    ) and np.array_equal(a.count_BC, b.count_BC)


def test_batches_resume_from_state():
    first = _iterator()
    for _ in range(3):
        next(first)
    state = first.get_state()
    expected = [next(first) for _ in range(4)]
    second = _iterator()
    second.set_state(state)
    assert all(_same(a, b) for a, b in zip(expected, (next(second) for _ in range(4)), strict=True))


def _mixed(asked):
    """Returns batches of 2 and 5 chains with the weights 3 and 1; appends the queries."""

    def record(texts, role):
        asked.extend(texts if role == "query" else ())
        return tokenize(texts, role)

    sizes = {"large": 2, "small": 5}
    chains = [
        dataclasses.replace(BRIDGE, question=f"{name} {i}")
        for name, size in sizes.items()
        for i in range(size)
    ]
    layout = dataclasses.replace(LAYOUT, num_queries=4, num_candidates=12)
    settings = ("triple", Sampling(1, 1), layout, record, 0, 0)
    mixture = {"sizes": [*sizes.values()], "weights": (3, 1)}
    return batches(chains, [POOL] * 7, *settings, **mixture)


def test_batches_mixture_has_exact_shares_and_resumes(monkeypatch):
    # Otherwise, only the first occurrence of a text is tokenized.
    monkeypatch.setattr(pools_lib, "tokenize_once", lambda tokenize: tokenize)
    asked, again = [], []
    iterator = _mixed(asked)
    for _ in range(3):
        next(iterator)
    state = iterator.get_state()
    expected = [next(iterator) for _ in range(7)]
    questions = [" ".join(text.split()[:2]) for text in asked[:40]]
    assert collections.Counter(q.split()[0] for q in questions) == {"large": 30, "small": 10}
    small = [q for q in questions if q.startswith("small")]
    assert len(set(small[:5])) == len(set(small[5:])) == 5  # two passes, each complete
    second = _mixed(again)
    second.set_state(state)
    assert all(_same(a, b) for a, b in zip(expected, (next(second) for _ in range(7)), strict=True))


def test_batches_differ_by_epoch_and_seed():
    iterator, other = _iterator(), _iterator(seed=1)
    first = [next(iterator) for _ in range(5)]
    assert not all(
        _same(a, b) for a, b in zip(first, [next(iterator) for _ in range(5)], strict=True)
    )
    assert not all(_same(a, b) for a, b in zip(first, [next(other) for _ in range(5)], strict=True))


def test_batches_single_question():
    assert next(_iterator(prefixes=4)).count_BC.shape[0] == LAYOUT.num_queries


def test_batches_too_few_chains_are_refused():
    with pytest.raises(
        UserError, match="a step needs 2 training questions .* only 1; .* at most 2,"
    ):
        batches([BRIDGE], [POOL], "triple", Sampling(2, 2), LAYOUT, tokenize, 0, 0)
