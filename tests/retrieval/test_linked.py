"""Linked search: its candidates, their features, and training of the link head."""

import contextlib
import dataclasses
import itertools

import jax
import ml_collections
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from cirag_jax.errors import UserError
from cirag_jax.models import link_head
from cirag_jax.models.link_head import LinkHead, LinkHeadModule, load_link_head
from cirag_jax.retrieval import linked
from cirag_jax.retrieval.candidates import FEATURES, GROUPS
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.retrieval.links import LinkWalk
from cirag_jax.training import link_head as training
from cirag_jax.training.link_head import (
    Task,
    TrainingStopped,
    check_questions,
    check_settings,
    passage_ids,
    score_by_aligner,
    train_link_head,
)
from cirag_jax.types import Feedback, Question
from configs import aligner, retrievers
from tests.retrieval.films import (
    DATASET,
    PASSAGES,
    QUESTION,
    ROW,
    Words,
    make_head,
    make_index,
)


def _steps(head, question=QUESTION.question, **options):
    """Returns the candidates of every step as a dictionary: name -> feature -> value."""
    steps = []
    make_index(head, **options).explore([question], head.score, None, steps.append)
    return [
        {
            PASSAGES[row].id: dict(zip(FEATURES, values.tolist(), strict=True))
            for row, values in zip(candidates.row_R, candidates.feature_RF, strict=True)
        }
        for candidates in steps
    ]


def test_candidates_features_of_two_steps():
    first, second = _steps(make_head(named=1.0), "Is Grey Harbour a film?", steps=2)
    assert first["Grey Harbour"]["named"] == 1 and first["Red Harbour"]["named"] == 0
    assert first["Grey Harbour"]["named_and_due"] == 1 and first["Grey Harbour"]["first_step"] == 1
    assert first["Grey Harbour"]["bm25"] == 1 and first["Grey Harbour"]["bm25_place"] == 0
    assert first["Grey Harbour"]["titles_named"] == 0.25
    best = max(first.values(), key=lambda known: known["score"])
    assert best["below_best"] == best["place"] == 0
    assert all(known["score"] == known["first_score"] for known in first.values())
    assert "Grey Harbour" not in second  # The passage is already in the chain.
    berg, other = second["Anna Berg"], second["Bo Berg"]
    # The chain has the film's sentence nearest to the question, which names nobody.
    assert (berg["named_by_chain"], berg["named_by_passages"]) == (0, 1)
    assert (other["named_by_passages"], other["names_passages"]) == (0, 0)
    assert berg["walk"] > other["walk"] and berg["walk_place"] < other["walk_place"]
    assert all(known["first_step"] == 0 for known in second.values())


def test_candidates_named_by_a_unit_or_by_its_passage():
    question = "Who made it, Grey Harbour?"
    _, second = _steps(make_head(named=1.0), question, steps=2)
    berg = second["Anna Berg"]
    assert berg["named_by_last"] == berg["named_by_chain"] == berg["named_by_passages"] == 1


def test_candidates_features_of_remaining_and_chain_words():
    question = "Was the maker of Grey Harbour, Anna, a baker?"
    first, second = _steps(make_head(named=1.0), question, steps=2)
    # The first step searches with the complete question, because the chain is still empty.
    assert first["Grey Harbour"]["left"] == 1 and first["Grey Harbour"]["words_place"] == 0
    assert {known["told"] for known in first.values()} == {0}
    assert first["Grey Harbour"]["title_asked"] == 1 and first["Red Harbour"]["title_asked"] == 0.5
    assert {known["like_chain"] for known in first.values()} == {0}
    # The film's passage covers "Grey Harbour", "made" and "Anna Berg"; "baker" remains.
    berg, film = second["Anna Berg"], second["Red Harbour"]
    assert berg["left"] > 0 and film["left"] == 0
    assert (berg["title_told"], film["title_told"]) == (1, 0.5)
    assert 0 < film["like_chain"] <= 1


def test_candidates_new_words_of_the_last_unit():
    _, second = _steps(make_head(named=1.0), "Who made it, Grey Harbour?", steps=2)
    # "Anna Berg made it" has a name that the question lacks, and only her passage has "Anna".
    others = [known["told"] for name, known in second.items() if name != "Anna Berg"]
    assert second["Anna Berg"]["told"] > max(others) > 0
    assert second["Anna Berg"]["words_place"] == 0


def test_search_chain_comes_first_in_order():
    head = make_head(named=9.0, named_by_passages=5.0, score=1.0)
    row_QK, score_QK = make_index(head, steps=2).search([QUESTION.question], 5)
    assert [PASSAGES[row].id for row in row_QK[0, :2]] == ["Grey Harbour", "Anna Berg"]
    assert len(set(row_QK[0].tolist())) == 5 and score_QK[0].tolist() == [0, -1, -2, -3, -4]


def test_search_returns_only_allowed_passages():
    allowed = [np.array([ROW["Grey Harbour"], ROW["Bo Berg"]])]
    row_QK, score_QK = make_index(make_head(named=9.0)).search([QUESTION.question], 4, allowed)
    assert [PASSAGES[row].id for row in row_QK[0, :2]] == ["Grey Harbour", "Bo Berg"]
    assert row_QK[0, 2:].tolist() == [-1, -1] and np.isneginf(score_QK[0, 2:]).all()


def test_candidates_word_places_are_among_allowed_passages():
    seen = []
    allowed = [np.array([ROW["Long Harbour"], ROW["Bo Berg"]])]
    make_index(make_head(named=1.0)).explore(["A baker?"], make_head().score, allowed, seen.append)
    known = dict(zip(seen[0].row_R.tolist(), seen[0].feature_RF, strict=True))
    # All ten people are bakers; among the allowed passages, Bo's comes first.
    assert known[ROW["Bo Berg"]][FEATURES.index("words_place")] == 0


def test_search_batch_equals_single_questions():
    index = make_index(make_head(score=1.0, named=1.0))
    texts = [question.question for question in DATASET.questions] * 8  # More than one block.
    rows, _ = index.search(texts, len(PASSAGES))
    alone, _ = index.search(texts[3:4], len(PASSAGES))
    assert rows[3].tolist() == alone[0].tolist() == rows[3 + len(DATASET.questions)].tolist()
    assert ROW["blank"] not in rows
    named, _ = index.search(["Is Blank near Grey Harbour?"], len(PASSAGES))
    assert ROW["blank"] not in named  # Its passage has no units.


def test_start_walk_seeds_share_a_word_with_the_question(monkeypatch):
    seeds = []

    def recording(self, questions, rankings, allowed=None):
        seeds.extend(rankings[0])
        return np.zeros((len(PASSAGES), len(questions)), np.float32)

    monkeypatch.setattr(LinkWalk, "probabilities", recording)
    make_index(make_head()).search(["xyzzy", "Grey"], 3)
    assert set(seeds[0]) == {-1}
    assert seeds[1][0] == ROW["Grey Harbour"] and set(seeds[1][1:]) == {-1}


def test_search_refuses_feedback():
    with pytest.raises(UserError, match="does not support relevance feedback"):
        make_index(make_head()).search(["a"], 1, None, [Feedback(1.0, ())])


def test_training_head_learns_to_follow_links(tmp_path):
    """A director's passage shares no word with the question; only the film's passage names it."""
    config = aligner.linked().head
    config.update({"epochs": 30, "batch_size": 8, "hidden": 8, "steps": 2})
    index = make_index(steps=2)
    task = Task(index, tuple(ROW), DATASET.questions[:7], DATASET.questions[7:])
    with jax.numpy_dtype_promotion("standard"):  # Optax raises a float to an integer power.
        head, found = train_link_head(config, [task], "sentence", seed=0)
        again, same = train_link_head(config, [task], "sentence", seed=0)
    assert found["dev/linked_recall@2"] == 1 and found["dev/aligner_recall@2"] < 0.7
    assert found == same

    head.save(tmp_path)
    loaded = load_link_head(tmp_path, FEATURES)
    assert loaded is not None
    assert (loaded.units, loaded.steps) == ("sentence", 2)
    x = [np.random.default_rng(0).normal(size=(5, len(FEATURES)))]
    np.testing.assert_array_equal(loaded.score(x)[0], again.score(x)[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, r"config\.head\.steps"),
        ({"corpus": "mine"}, r"config\.head\.corpus"),
        ({"held_out": -1}, r"config\.head\.held_out"),
        ({"without": ("link",)}, r"config\.head\.without"),
        ({"hide": 1.0}, r"config\.head\.hide=1\.0 must be"),
        ({}, "needs training questions with gold passages"),
    ],
)
def test_training_bad_settings_are_refused_early(fields, message):
    config = aligner.linked().head
    check_settings(config)
    check_questions(DATASET.questions)
    config.update(fields)
    with pytest.raises(UserError, match=message):
        check_settings(config)
        check_questions([Question("q", "Where?", ())])


def test_training_stops_at_any_point():
    config = aligner.linked().head
    config.update({"epochs": 3, "batch_size": 8, "hidden": 8, "steps": 2})
    task = Task(make_index(steps=2), tuple(ROW), DATASET.questions[:7], DATASET.questions[7:])

    def num_checks(limit):
        """Returns how often training checks for a stop, if check number ``limit`` stops it."""
        times = itertools.count(1)

        def check_stop():
            if next(times) == limit:
                raise TrainingStopped

        with contextlib.suppress(TrainingStopped), jax.numpy_dtype_promotion("standard"):
            train_link_head(config, [task], "sentence", 0, check_stop)
        return next(times) - 1

    # Two rounds, each with two searches and the epochs; then the epochs of each half's head, and
    # two searches for each of two measurements of two halves. A search checks at the start and at
    # the end of each of its two steps.
    search = 2 * 2
    assert num_checks(0) == 2 * (2 * search + 3) + 2 * 3 + 2 * 2 * search
    assert [num_checks(limit) for limit in (1, 3, 10)] == [1, 3, 10]


def test_explore_reports_progress(monkeypatch):
    monkeypatch.setattr(linked, "_MIN_BLOCK", 3)
    monkeypatch.setattr(linked, "_BLOCK_NUMBERS", 3 * 3 * len(PASSAGES))
    counts, index = [], make_index(steps=2)
    questions = [question.question for question in DATASET.questions[:5]]
    found = index.explore(questions, make_head().score, progress=counts.append)
    # Blocks have three and two questions. Each step has an embedding and half of the progress.
    assert counts == [0, 1, 0, 2, 0, 1, 0, 1]
    monkeypatch.undo()
    whole = index.explore(questions, make_head().score)
    assert [one.rows for one in found] == [one.rows for one in whole]


def test_training_uses_held_out_questions_in_halves():
    """The head learns to follow links from the held-out questions; only these have names."""
    config = aligner.linked().head
    config.update({"epochs": 60, "batch_size": 8, "hidden": 8, "steps": 2, "rounds": 1})
    blind = tuple(
        dataclasses.replace(question, question="Who? Where?") for question in DATASET.questions[:2]
    )
    task = Task(make_index(steps=2), tuple(ROW), blind, DATASET.questions[2:])
    with jax.numpy_dtype_promotion("standard"):
        config.held_out = 0
        _, without = train_link_head(config, [task], "sentence", seed=0)
        config.held_out = 3
        head, found = train_link_head(config, [task], "sentence", seed=0)
    assert found["dev/linked_recall@2"] == 1 > without["dev/linked_recall@2"]
    rows, _ = make_index(head, steps=2).search([QUESTION.question], 2)
    assert [PASSAGES[row].id for row in rows[0]] == ["Grey Harbour", "Anna Berg"]


def test_training_measures_halves_with_heads_of_the_other_half(monkeypatch):
    fit_head, odd = training.fit_head, []

    def recording(states, *rest):
        odd.append(sum(state.question % 2 for state in states))
        return fit_head(states, *rest)

    monkeypatch.setattr(training, "fit_head", recording)
    config = aligner.linked().head
    config.update({"epochs": 1, "batch_size": 8, "hidden": 8, "steps": 2, "rounds": 1})
    task = Task(make_index(steps=2), tuple(ROW), DATASET.questions[:1], DATASET.questions[1:])
    with jax.numpy_dtype_promotion("standard"):
        train_link_head(config, [task], "sentence", seed=0)
    # The one training question has an even index.
    both, without_even, without_odd = odd
    assert both == without_even > without_odd == 0


def test_training_head_ignores_excluded_groups():
    config = aligner.linked().head
    config.update({"epochs": 3, "batch_size": 8, "hidden": 8, "steps": 2, "rounds": 1})
    config.without = ("links", "walk")
    task = Task(make_index(steps=2), tuple(ROW), DATASET.questions[:7], ())
    with jax.numpy_dtype_promotion("standard"):
        head, _ = train_link_head(config, [task], "sentence", seed=0)
    x_RF = np.random.default_rng(0).normal(size=(5, len(FEATURES))).astype(np.float32)
    hidden = [FEATURES.index(name) for name in (*GROUPS["links"], *GROUPS["walk"])]
    changed_RF = x_RF.copy()
    changed_RF[:, hidden] += 1
    np.testing.assert_array_equal(head.score([x_RF])[0], head.score([changed_RF])[0])
    changed_RF[:, FEATURES.index("named")] += 1
    assert (head.score([x_RF])[0] != head.score([changed_RF])[0]).any()


def test_training_corpus_is_all_or_own_passages():
    questions = [dataclasses.replace(q, context=(q.id,)) for q in DATASET.questions[:2]]
    config = aligner.linked().head
    assert passage_ids(DATASET, config.corpus, questions) == tuple(DATASET.corpus)
    own = ("Grey Harbour", "Anna Berg", "Red Harbour", "Bo Berg")
    assert passage_ids(DATASET, "own", questions[:1], questions[1:]) == own


def test_training_without_gold_in_reach_is_refused():
    task = Task(make_index(), tuple(ROW), (Question("q", "Where?", ()),), ())
    with pytest.raises(UserError, match="no search for a training question"):
        train_link_head(aligner.linked().head, [task], "sentence", seed=0)


def test_head_before_training_ranks_like_the_aligner():
    ones = np.ones(len(FEATURES), np.float32)
    head = LinkHead(LinkHeadModule(0 * ones, ones, 4, nnx.Rngs(0)), FEATURES, "sentence", 2)
    x = [np.random.default_rng(0).normal(size=(n, len(FEATURES))) for n in (3, 0, 1200)]
    for ours, aligners in zip(head.score(x), score_by_aligner(x), strict=True):
        np.testing.assert_array_equal(np.argsort(ours), np.argsort(aligners))


def test_groups_have_only_known_features():
    assert {name for group in GROUPS.values() for name in group} < set(FEATURES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(b"x" * 40), "not a readable safetensors file"),
        (lambda file: _rewrite(file, features="score"), "was trained on different features"),
        (lambda file: _rewrite(file, units="word"), "field units is 'word'"),
        (lambda file: _rewrite(file, steps="-1"), "field steps is '-1'"),
        (lambda file: _rewrite(file, drop="out_H"), "tensor (out|bias|hidden)_F?H is missing or"),
        (lambda file: _rewrite(file, drop="mean_F"), "tensor mean_F is missing or"),
        (lambda file: _rewrite(file, steps="1" * 5000), "field steps is '1{80}'"),
        (lambda file: _rewrite(file, fill=np.nan), "gives numbers that are not finite"),
        (lambda file: _rewrite(file, fill=-np.inf), "gives numbers that are not finite"),
    ],
)
def test_load_damaged_head_is_refused(tmp_path, change, message):
    make_head().save(tmp_path)
    change(tmp_path / link_head.FILE)
    with pytest.raises(UserError, match=message) as refused:
        load_link_head(tmp_path, FEATURES)
    assert str(tmp_path / link_head.FILE) in str(refused.value)


def test_search_non_finite_scores_are_refused():
    head = make_head(named=1.0)
    head.module.scale_F[...] = np.zeros(len(FEATURES), np.float32)
    with pytest.raises(UserError, match=r"link_head\.safetensors gives .* not finite"):
        make_index(head).search([QUESTION.question], 2)


def _rewrite(file, drop=None, fill=None, **metadata):
    with safetensors.safe_open(file, framework="numpy") as opened:
        had = opened.metadata() | metadata
    tensors = {k: v for k, v in safetensors.numpy.load_file(file).items() if k != drop}
    if fill is not None:
        tensors["out_H"][1] = fill
    safetensors.numpy.save_file(tensors, file, metadata=had)


def test_open_retriever_linked_uses_the_encoders_head(tmp_path):
    encoder = Words()
    encoder.identity = {"model": str(tmp_path)}
    config = retrievers.retriever()
    config.kind = "linked"
    with pytest.raises(UserError, match=r"has no link_head\.safetensors"):
        open_retriever(config, PASSAGES, encoder)
    make_head(named=9.0, named_by_passages=5.0).save(tmp_path)
    row_QK, _ = open_retriever(config, PASSAGES, encoder).search([QUESTION.question], 2)
    assert [PASSAGES[row].id for row in row_QK[0]] == ["Grey Harbour", "Anna Berg"]
    for fields, message in (
        ({"units": "triple"}, "units=triple, but the aligner ranks sentences"),
        ({"folder": "somewhere"}, "set config.retriever.folder=null"),
    ):
        with pytest.raises(UserError, match=message):
            open_retriever(ml_collections.ConfigDict({**config, **fields}), PASSAGES, encoder)
