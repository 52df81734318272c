"""Packing examples into rows and steps, which must not change the loss and gradient."""

import collections

import jax
import numpy as np
import pytest

from cirag_jax.models import decoder, lora
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import lora_step
from cirag_jax.training.data import mixture, packing
from cirag_jax.training.data.examples import Example
from cirag_jax.training.data.packing import Layout, Row
from tests import tiny_decoder

PACKED = Layout(64, True, (16, 32, 64), 2, 1)
BUCKETS = Layout(64, False, (16, 32, 64), 4, 2)


def make_examples(lengths=(9, 30, 17, 64, 5, 40, 22, 12, 3, 33, 30, 17, 9, 5), seed=0):
    """Returns random examples; about half of the tokens, but never the first, are targets."""
    rng = np.random.default_rng(seed)
    examples = []
    for number, length in enumerate(lengths):
        weight_T = np.repeat(rng.integers(0, 2, length // 4 + 1), 4)[:length].astype(np.float32)
        weight_T[0], weight_T[-1] = 0, 1
        part_T = (rng.integers(1, 4, length) * (weight_T > 0)).astype(np.uint8)
        tokens_T = rng.integers(3, 320, length).astype(np.int32)
        examples.append(Example(tokens_T, weight_T, part_T, f"q{number}"))
    return examples


def test_pack_first_fit_decreasing():
    assert packing.pack([5, 7, 5, 2, 4, 2, 5, 1, 6], 10) == [(1, 3, 7), (8, 4), (0, 2), (6, 5)]
    assert packing.pack([], 10) == []
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        packing.pack([3, 11], 10)


def test_plan_efficiency_on_trajectory_lengths():
    # Two to four rounds of 30 candidates after an instruction of 260 tokens of SmolLM2.
    rng = np.random.default_rng(0)
    lengths = [int(260 + rng.normal(650, 90, rng.integers(2, 5)).sum()) for _ in range(400)]
    examples = [Example(np.zeros(n, np.int32), np.ones(n, np.float32), np.ones(n, np.uint8), "")
             for n in lengths]  # fmt: skip
    assert min(lengths) > 1000 and max(lengths) < 3500
    for length, least in ((8192, 0.95), (16384, 0.97)):
        plan = packing.make_plan(examples, Layout(length, True, (length,), 1, 1), 0)
        assert plan.efficiency() > least
    buckets = (*range(1280, 8192, 256), 8192)
    plan = packing.make_plan(examples, Layout(8192, False, buckets, 8, 8), 0)
    assert plan.efficiency() > 0.9


@pytest.mark.parametrize("layout", [PACKED, BUCKETS])
def test_plan_epoch_has_every_example_once(layout):
    examples = make_examples()
    plan = packing.make_plan(examples, layout, 7, num_epochs=3)
    assert plan == packing.make_plan(examples, layout, 7, num_epochs=3)
    per_epoch = len(plan.steps) // 3
    orders = []
    for epoch in range(3):
        steps = plan.steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(1 <= len(step) <= layout.rows_per_step for step in steps)
        orders.append([place for step in steps for row in step for place in row.places])
        assert sorted(orders[-1]) == list(range(len(examples)))
    assert orders[0] != orders[1] != orders[2]
    assert packing.make_plan(examples, layout, 8).steps != plan.steps[:per_epoch]
    # A longer plan begins with the shorter one, so that training can be extended.
    assert packing.make_plan(examples, layout, 7, num_steps=5).steps == plan.steps[:5]


@pytest.mark.parametrize("layout", [PACKED, BUCKETS])
def test_plan_with_weights_draws_exact_shares(layout):
    """Compares every epoch with the order of `mixture.endless`."""
    examples, settings = make_examples(), {"sizes": (4, 10), "weights": (3, 1)}
    plan = packing.make_plan(examples, layout, 7, num_epochs=4, **settings)
    order = mixture.endless([range(4), range(4, 14)], (3, 1), 7)
    places, start = [list[int]() for _ in range(4)], 0
    for step in plan.steps:
        places[start // 14] += [place for row in step for place in row.places]
        start += sum(len(row.places) for row in step)
    for epoch, drawn in enumerate(places):
        assert sorted(drawn) == sorted(order[i] for i in range(14 * epoch, 14 * epoch + 14))
    counts = collections.Counter(place for drawn in places for place in drawn)
    assert {counts[i] for i in range(4)} <= {10, 11} and {counts[i] for i in range(4, 14)} == {1, 2}
    assert plan.drawn((4, 10), len(plan.steps)) == mixture.drawn((3, 1), 56) == [42, 14]
    first = collections.Counter(place < 4 for row in plan.steps[0] for place in row.places)
    assert plan.drawn((4, 10), 1) == [first[True], first[False]]
    assert sum(plan.tokens) == sum(len(examples[i].tokens_T) for i in counts.elements())
    assert packing.make_plan(examples, layout, 7, num_steps=5, **settings).steps == plan.steps[:5]


def test_plan_ends_with_epochs_steps_or_tokens():
    examples = make_examples()
    whole = packing.make_plan(examples, PACKED, 0)
    total = sum(len(e.tokens_T) for e in examples)
    assert sum(whole.tokens) == total
    assert sum(whole.supervised) == sum(int(e.weight_T.sum()) for e in examples)
    assert whole.efficiency() == total / sum(whole.padded)
    half = packing.make_plan(examples, PACKED, 0, num_epochs=0.5)
    assert half.steps == whole.steps[: round(0.5 * len(whole.steps))]
    for budget in (sum(whole.tokens[:2]), sum(whole.tokens[:3]) - 1):
        cut = packing.make_plan(examples, PACKED, 0, num_epochs=9, max_tokens=budget)
        assert cut.steps == whole.steps[:2] and sum(cut.tokens) <= budget
    assert len(packing.make_plan(examples, PACKED, 0, max_tokens=1).steps) == 1
    with pytest.raises(ValueError, match="no examples to pack"):
        packing.make_plan([], PACKED, 0)


@pytest.mark.parametrize("layout", [PACKED, BUCKETS])
def test_micro_batches_hold_examples_and_targets(layout):
    examples = make_examples()
    seen_places = []
    for step in packing.make_plan(examples, layout, 0).steps:
        pieces = packing.micro_batches(examples, step, layout, pad_id=0)
        rows = [row for i in range(len(pieces)) for row in step[i * layout.rows_per_batch :]
                [: layout.rows_per_batch]]  # fmt: skip
        flat = [(p, r) for p in pieces for r in range(layout.rows_per_batch)][: len(rows)]
        for (piece, row), (places, _) in zip(flat, rows, strict=True):
            batch, start = piece.batch, 0
            for segment, place in enumerate(places, 1):
                example = examples[place]
                length = len(example.tokens_T)
                part = slice(start, start + length)
                np.testing.assert_array_equal(batch.tokens_BT[row, part], example.tokens_T)
                last = slice(start, start + length - 1)
                np.testing.assert_array_equal(batch.targets_BT[row, last], example.tokens_T[1:])
                np.testing.assert_array_equal(batch.mask_BT[row, last], example.weight_T[1:])
                np.testing.assert_array_equal(piece.part_BT[row, last], example.part_T[1:])
                assert batch.mask_BT[row, start + length - 1] == 0
                if layout.packing:
                    positions = batch.positions_BT[row, part]
                    np.testing.assert_array_equal(positions, np.arange(length))
                    assert (batch.segments_BT[row, part] == segment).all()
                else:
                    assert batch.lengths_B[row] == length
                seen_places.append(place)
                start += length
            assert not batch.mask_BT[row, start:].any()
            if layout.packing:
                assert not batch.segments_BT[row, start:].any()
        for piece in pieces:  # The bucket is the smallest one with room for the longest row.
            length = piece.batch.tokens_BT.shape[1]
            used = np.max(np.nonzero(piece.batch.mask_BT.any(0))) + 2  # End of the longest row.
            assert length == min(bucket for bucket in layout.buckets if bucket >= used)
        assert sum(p.tokens for p in pieces) == sum(
            len(examples[i].tokens_T) for r in step for i in r.places
        )
    assert sorted(seen_places) == list(range(len(examples)))


@pytest.fixture(scope="module")
def model():
    """A decoder's config and random weights, and an adapter with an effect."""
    config = parse_decoder_config(tiny_decoder.config("llama"), "config.json")
    state = lora.init_adapter(config, LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), state)
    return config, tiny_decoder.random_params(config), state


def sum_over_examples(model, examples, layout):
    """Returns the summed loss, the number of targets and the summed gradient of all examples."""
    config, params, state = model
    options = lora.lora_options(LoraConfig(rank=4), train=False)
    gradient = jax.jit(
        jax.value_and_grad(
            lambda state, batch: lora_step.loss(config, params, state, batch, options), has_aux=True
        )
    )
    total: tuple = (0.0, 0.0, jax.tree.map(lambda x: np.zeros(x.shape), state))
    for step in packing.make_plan(examples, layout, 0).steps:
        for piece in packing.micro_batches(examples, step, layout, pad_id=0):
            (loss, count), slope = gradient(state, piece.batch)
            added = jax.tree.map(lambda a, b: a + np.asarray(b, np.float64), total[2], slope)
            total = total[0] + float(loss), total[1] + float(count), added
    return total


def test_packed_loss_and_gradient_equal_unpacked(model):
    """Sums over other shapes round differently, by up to 2.1e-6 of the largest gradient."""
    examples = make_examples()
    expected = sum_over_examples(model, examples, Layout(64, False, (64,), 1, 1))
    for layout in (PACKED, BUCKETS, Layout(128, True, (128,), 2, 2)):
        loss, count, slope = sum_over_examples(model, examples, layout)
        assert count == expected[1]
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(expected[2]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())


def test_packed_example_ignores_its_neighbours(model):
    config, params, state = model
    first, second, other = make_examples((20, 30, 30))
    layout = Layout(64, True, (64,), 1, 1)

    @jax.jit
    def run(batch):
        return decoder.forward(
            config, params, batch.tokens_BT, positions_BT=batch.positions_BT,
            segments_BT=batch.segments_BT, adapter=lora.to_adapter(state),
        )  # fmt: skip

    def hidden(*row):
        (piece,) = packing.micro_batches(row, [Row(tuple(range(len(row))))], layout, 0)
        return np.asarray(run(piece.batch))

    a, b = hidden(first, second), hidden(first, other)
    np.testing.assert_array_equal(a[0, :20], b[0, :20])
    c = hidden(second)
    np.testing.assert_allclose(a[0, 20:50], c[0, :30], rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------- shared prefixes


def two_kinds():
    """Returns examples that share a prefix of 40 or of 50 tokens, and one without a prefix."""
    rng = np.random.default_rng(1)
    first, second = rng.integers(3, 320, 40), rng.integers(3, 320, 50)
    examples = []
    for number, example in enumerate(make_examples((9, 30, 17, 14, 25, 40, 22, 12))):
        beginning = (first, second)[number % 2]
        # The first tokens after the prefix differ, so only the prefix is shared.
        example.tokens_T[0] = 3 + number
        nothing = np.zeros(len(beginning))
        examples.append(
            Example(
                np.concatenate([beginning, example.tokens_T]).astype(np.int32),
                np.concatenate([nothing, example.weight_T]).astype(np.float32),
                np.concatenate([nothing, example.part_T]).astype(np.uint8),
                example.source,
            )
        )
    return [*examples, *make_examples((60,), seed=3)]


SHARING = Layout(128, True, (128,), 2, 1)


def test_plan_rows_hold_shared_prefix_once():
    examples = two_kinds()
    plan = packing.make_plan(examples, SHARING, 0)
    rows = [row for step in plan.steps for row in step]
    assert sorted(place for row in rows for place in row.places) == list(range(len(examples)))
    for row in rows:
        kinds = {place % 2 if place < 8 else 2 for place in row.places}
        assert len(kinds) == 1 and row.shared == (40, 50, 0)[kinds.pop()]
    # 40 + 9 + 17 + 25 + 22, 50 + 30 + 40, 50 + 14 + 12 and 60 tokens.
    assert sorted(row.size([len(e.tokens_T) for e in examples]) for row in rows) == [
        60,
        76,
        113,
        120,
    ]
    assert sum(plan.tokens) == 60 + 76 + 113 + 120
    assert sum(plan.supervised) == sum(int(e.weight_T.sum()) for e in examples)
    for step in plan.steps:
        for row, piece in zip(
            step, packing.micro_batches(examples, step, SHARING, pad_id=0), strict=True
        ):
            batch, lengths = piece.batch, [len(examples[i].tokens_T) for i in row.places]
            size = row.size([len(e.tokens_T) for e in examples])
            assert batch.shared_B.tolist() == [row.shared] and piece.tokens == size
            expected = row.shared**2 + sum(n**2 - row.shared**2 for n in lengths)
            assert piece.attended == expected
            suffixes = [examples[i].tokens_T[row.shared :] for i in row.places]
            whole = np.concatenate([examples[row.places[0]].tokens_T[: row.shared], *suffixes])
            np.testing.assert_array_equal(batch.tokens_BT[0, :size], whole)
            starts = np.flatnonzero(np.diff(batch.segments_BT[0, :size])) + 1
            assert (batch.positions_BT[0, starts] == row.shared).all()
            supervised = batch.mask_BT[0] > 0
            expected = [e.tokens_T[e.weight_T > 0] for e in (examples[i] for i in row.places)]
            np.testing.assert_array_equal(batch.targets_BT[0, supervised], np.concatenate(expected))
            expected = [e.part_T[e.weight_T > 0] for e in (examples[i] for i in row.places)]
            np.testing.assert_array_equal(piece.part_BT[0, supervised], np.concatenate(expected))


def test_plan_supervised_tokens_are_not_shared():
    examples = two_kinds()[::2][:4]
    examples[1].weight_T[36] = 1.0
    plan = packing.make_plan(examples, SHARING, 0)
    assert {row.shared for step in plan.steps for row in step} == {35}
    examples[2].weight_T[20] = 1.0  # Fewer than MIN_SHARED tokens are left.
    plan = packing.make_plan(examples, SHARING, 0)
    assert {row.shared for step in plan.steps for row in step} == {0}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_shared_prefix_loss_and_gradient_equal_unshared(family):
    """Gemma 2 uses sliding windows, here of 6 tokens."""
    config = parse_decoder_config(tiny_decoder.config(family), "config.json")
    assert (family == "gemma2") == bool(config.windowed)
    state = lora.init_adapter(config, LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), state)
    model = config, tiny_decoder.random_params(config), state
    examples = two_kinds()
    expected = sum_over_examples(model, examples, Layout(128, False, (128,), 1, 1))
    loss, count, slope = sum_over_examples(model, examples, SHARING)
    assert count == expected[1]
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())
