import dataclasses

import numpy as np
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.pairs import PairTokens
from cirag_jax.training.data import pairs as data_lib
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple
from configs import retrievers
from tests import tiny


def _musique():
    """Returns two-hop questions with a decomposition, triples and folds."""
    corpus = {
        "a": Passage("a", "Ann", "Ann was born in Bo. Ann sings."),
        "b": Passage("b", "Bo", "Bo has the mayor Cy."),
        "x": Passage("x", "Xi", "Xi has the mayor Dee."),
    }
    triples = {
        "a": (Triple("Ann", "born in", "Bo", "a"), Triple("Ann", "is", "singer", "a")),
        "b": (Triple("Bo", "mayor", "Cy", "b"), Triple("Cy", "mayor of", "Bo", "b")),
        "x": (Triple("Xi", "mayor", "Dee", "x"),),
    }
    questions = [
        Question(
            f"q{fold}", "Who is the mayor of where Ann was born?", ("Cy",), hops=2, split="train",
            fold=fold, supporting=("a", "b"), context=("x", "a", "b"),
            decomposition=(
                SubQuestion("Where was Ann born?", "Bo", "a"),
                SubQuestion("Who is the mayor of #1?", "Cy", "b"),
            ),
        )
        for fold in ("train", "tune", "test", None)
    ]  # fmt: skip
    return Dataset("tiny musique", tuple(questions), corpus, triples)


def _data_config():
    return load_config("configs/cross_encoder.py", []).data


def test_training_questions_exclude_held_out_folds():
    dataset = _musique()
    kept = data_lib.training_questions(dataset, _data_config())
    assert [q.fold for q in kept] == ["train", None]
    assert [data_lib.may_train_triples(dataset, q) for q in kept] == [True, False]
    without_folds = dataclasses.replace(dataset, questions=(kept[1],))
    assert data_lib.may_train_triples(without_folds, kept[1])
    only_reserved = dataclasses.replace(dataset, questions=dataset.questions[1:3])
    with pytest.raises(UserError, match="is in fold tune or test"):
        data_lib.training_questions(only_reserved, _data_config())


def test_passage_targets_of_questions_and_sub_questions():
    dataset = _musique()
    question, texts = dataset.questions[0], {k: passage_text(p) for k, p in dataset.corpus.items()}
    own_by_pair = {
        (t.query, t.positive): t.own for t in data_lib.passage_targets(dataset, [question])
    }
    assert own_by_pair == {
        (question.question, texts["a"]): (texts["x"],),
        (question.question, texts["b"]): (texts["x"],),
        ("Where was Ann born?", texts["a"]): (texts["x"], texts["b"]),
        ("Who is the mayor of Bo?", texts["b"]): (texts["x"], texts["a"]),
    }


def test_targets_copies_of_gold_passages_are_no_negatives():
    dataset = _musique()
    corpus, triples = dict(dataset.corpus), dict(dataset.triples)
    for pid in "ab":
        corpus[f"{pid}2"] = dataclasses.replace(corpus[pid], id=f"{pid}2")
        triples[f"{pid}2"] = tuple(triple._replace(passage_id=f"{pid}2") for triple in triples[pid])
    twice = dataclasses.replace(dataset, corpus=corpus, triples=triples)
    question = dataset.questions[0]
    context = (*(question.context or ()), "a2", "b2")
    for supporting in (("a", "b"), ("a", "b", "a2", "b2")):
        copied = dataclasses.replace(question, context=context, supporting=supporting)
        assert data_lib.passage_targets(twice, [copied]) == data_lib.passage_targets(
            dataset, [question]
        )
        assert data_lib.triple_targets(twice, [copied], None) == data_lib.triple_targets(
            dataset, [question], None
        )


def test_triple_targets_negatives_do_not_state_the_answer():
    dataset = _musique()
    question = dataset.questions[0]
    own_by_pair = {
        (t.query, t.positive): t.own for t in data_lib.triple_targets(dataset, [question], "ascii")
    }
    born, sings = "('ann', 'born in', 'bo')", "('ann', 'is', 'singer')"
    mayor, of, other = "('bo', 'mayor', 'cy')", "('cy', 'mayor of', 'bo')", "('xi', 'mayor', 'dee')"
    assert own_by_pair == {
        (question.question, born): (other, sings),
        (question.question, of): (other, sings),
        ("Where was Ann born?", born): (other, sings, mayor, of),
        ("Who is the mayor of Bo?", of): (other, born, sings),
    }


def test_triple_targets_without_triples_use_evidences():
    dataset = dataclasses.replace(tiny.dataset(), triples={})
    targets = data_lib.triple_targets(dataset, dataset.questions[:1], "ascii")
    evidences = dataset.questions[0].evidences or ()
    assert [t.positive for t in targets] == [repr(evidence) for evidence in evidences]
    assert all(t.own == () for t in targets)


def test_gold_triples_are_only_extracted_ones():
    dataset = tiny.dataset()
    question = next(q for q in dataset.questions if len(q.evidences or ()) > 1)
    whole = data_lib.gold_triples(dataset, question)
    first = whole[0].passage_id
    dataset = dataclasses.replace(
        dataset, triples={key: t for key, t in dataset.triples.items() if key != first}
    )
    assert data_lib.gold_triples(dataset, question) == tuple(
        triple for triple in whole if triple.passage_id != first
    )


def test_mine_returns_nearest_other_texts(tmp_path):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path / "model"))
    encoder = open_encoder_for(config.lock())
    dataset = tiny.dataset()
    targets = data_lib.passage_targets(dataset, dataset.questions)
    corpus = [passage_text(passage) for passage in dataset.corpus.values()]
    for before, after in zip(targets, data_lib.mine(targets, corpus, encoder, 5), strict=True):
        (query,) = encoder.encode([before.query], "query")
        scores = encoder.encode(list(before.own)) @ query
        assert list(after.own) == [before.own[i] for i in np.argsort(-scores, kind="stable")[:5]]
        gold = {t.positive for t in targets if t.query == before.query}
        candidates = [t for t in corpus if t not in gold and t not in before.own]
        order = np.argsort(-(encoder.encode(candidates) @ query), kind="stable")[:5]
        assert list(after.mined) == [candidates[i] for i in order]


def _targets(count, own=6, mined=4):
    return [
        data_lib.Target(
            "passage", f"q{i}", f"p{i}",
            tuple(f"own{i}.{j}" for j in range(own)), tuple(f"mined{i}.{j}" for j in range(mined)),
        )
        for i in range(count)
    ]  # fmt: skip


def test_pairs_of_step_epoch_has_every_target_once():
    targets, sampling = _targets(12), data_lib.Sampling(5, own=2, mined=1, easy=0, seed=3)
    steps = [data_lib.pairs_of_step(targets, step, sampling) for step in range(24)]
    assert steps[17] == data_lib.pairs_of_step(targets, 17, sampling)
    pairs = [pair for step in steps for pair in step]
    assert len(pairs) == 24 * 5 * 4
    positives = [query for query, _, relevant in pairs if relevant]
    for epoch in range(10):
        assert sorted(positives[12 * epoch : 12 * epoch + 12]) == sorted(t.query for t in targets)
    assert positives[:12] != positives[12:24]
    for start in range(0, len(pairs), 4):
        query = pairs[start][0]
        texts = [text for _, text, _ in pairs[start : start + 4]]
        assert texts[0] == query.replace("q", "p") and len(set(texts)) == 4
        assert sum(text.startswith(f"own{query[1:]}.") for text in texts) == 2
        assert sum(text.startswith(f"mined{query[1:]}.") for text in texts) == 1
        assert [relevant for _, _, relevant in pairs[start : start + 4]] == [True] + [False] * 3


def test_pairs_of_step_draws_order_once_per_epoch(monkeypatch):
    targets, sampling = _targets(12), data_lib.Sampling(5, own=1, mined=0, easy=0, seed=77)
    expected = [
        targets[place].query
        for epoch in range(2)
        for place in np.random.default_rng((77, epoch)).permutation(12)
    ]
    drawn, default_rng = [], np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: (drawn.append(seed), default_rng(seed))[1]
    )
    steps = [data_lib.pairs_of_step(targets, step, sampling) for step in range(4)]
    assert [q for step in steps for q, _, relevant in step if relevant] == expected[:20]
    assert [seed for seed in drawn if len(seed) == 2] == [(77, 0), (77, 1)]


def test_pairs_of_step_gold_passage_is_not_an_easy_negative():
    """A question's gold passage is no negative, even as the positive of another target."""
    dataset = _musique()
    question = dataclasses.replace(dataset.questions[0], context=("a", "b"))
    other = dataclasses.replace(
        question, id="other", question="Who is the mayor of Xi?", supporting=("b", "x"),
        context=("b", "x"), decomposition=None,
    )  # fmt: skip
    targets = data_lib.passage_targets(dataset, [question, other])
    texts = {name: passage_text(passage) for name, passage in dataset.corpus.items()}

    def easy_negatives_of(*drawn):
        """Returns the easy negatives of the first target."""
        sampling = data_lib.Sampling(len(drawn), own=0, mined=0, easy=3, seed=0)
        pairs = data_lib.pairs_of_step(drawn, 0, sampling)
        return {text for query, text, relevant in pairs if query == drawn[0].query and not relevant}

    whole = next(t for t in targets if (t.query, t.positive) == (question.question, texts["a"]))
    part = next(t for t in targets if t.query == "Who is the mayor of Bo?")
    shared, apart = (t for t in targets if t.query == other.question)
    assert (part.positive, shared.positive, apart.positive) == (texts["b"], texts["b"], texts["x"])
    assert easy_negatives_of(whole, part) == easy_negatives_of(whole, shared) == set()
    assert easy_negatives_of(whole, part, apart) == {texts["x"]}


@pytest.mark.parametrize(
    ("own", "mined", "negatives"), [(0, 9, 3), (1, 9, 3), (9, 0, 3), (1, 1, 2)]
)
def test_pairs_of_step_short_pool_is_filled_from_other(own, mined, negatives):
    sampling = data_lib.Sampling(1, own=2, mined=1, easy=0, seed=0)
    pairs = data_lib.pairs_of_step(_targets(1, own, mined), 0, sampling)
    assert len(pairs) == len({text for _, text, _ in pairs}) == 1 + negatives


def test_pairs_of_step_easy_negatives_are_other_positives():
    targets = [*_targets(12), *(dataclasses.replace(t, kind="triple") for t in _targets(12, 1, 0))]
    targets += [dataclasses.replace(t, positive=f"second of {t.query}") for t in targets]
    sampling = data_lib.Sampling(30, own=1, mined=0, easy=2, seed=3)
    pairs = data_lib.pairs_of_step(targets, 0, sampling)
    easy = [(q, t) for q, t, relevant in pairs if not relevant and not t.startswith("own")]
    assert len(easy) == 2 * 30 and len(pairs) == 4 * 30
    for query, text in easy:
        assert query.replace("q", "p") != text != f"second of {query}"


def test_pack_chunks_hold_every_row_once():
    rng = np.random.default_rng(0)
    lengths = [3, 8, 9, 16, 16, 2, 5, 30, 31, 7]
    rows = [
        PairTokens(rng.integers(1, 9, n, np.int32), np.arange(n, dtype=np.int32) % 2)
        for n in lengths
    ]
    labels = [i % 3 == 0 for i in range(len(rows))]
    batch = data_lib.pack(rows, labels, (8, 16, 32), 4, pad_id=0)
    rows_of_chunks = []
    for tokens_BT, types_BT, lengths_B, label_B, weight_B in batch.chunks:
        assert tokens_BT.shape[0] == 4
        longest = int(lengths_B[weight_B > 0].max())
        assert tokens_BT.shape[1] == next(b for b in (8, 16, 32) if b >= longest)
        for row in np.flatnonzero(weight_B):
            n = lengths_B[row]
            rows_of_chunks.append(
                (tuple(tokens_BT[row, :n]), tuple(types_BT[row, :n]), bool(label_B[row]))
            )
            assert (tokens_BT[row, n:] == 0).all()
            np.testing.assert_allclose(weight_B[row], 1 / len(rows))
    expected = [
        (tuple(r.tokens_T), tuple(r.types_T), label) for r, label in zip(rows, labels, strict=True)
    ]
    assert sorted(rows_of_chunks) == sorted(expected)
    assert batch.tokens == sum(lengths)
    # 2 3 5 7 | 8 9 16 16 | 30 31: rows of similar length share a chunk.
    assert batch.padded_tokens == 4 * (8 + 16 + 32)
