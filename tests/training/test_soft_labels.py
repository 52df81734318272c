"""An aligner learns what a joint scorer thinks of the candidates of its searches."""

import json
import pathlib

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy.special import softmax

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.workdir import open_cross_encoder, open_encoder, trained_on
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.training import aligner, choices, preemption, soft_labels
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DEPTH = 4


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _config(trained, scorer, **changes):
    workdir, data, model = trained
    values = {
        "model.spec": model, "data.dir": data, "dev.questions": 2, "batch_size": 8,
        "num_negatives": 2, "num_steps": 6, "eval_every": 0, "head.rounds": 0, "mesh.data": 1,
        "distill.joint": scorer, "distill.checkpoint": workdir, "distill.depth": _DEPTH, **changes,
    }  # fmt: skip
    given = [f"--config.{key}={value}" for key, value in values.items()]
    return load_config(str(_ROOT / "configs/aligner.py:linked"), given)


def _sets(config):
    return [aligner.split_questions(one, config) for one in load.load_datasets(config.data)]


def test_shares_are_the_scorers_of_what_its_searches_chose_from(trained, scorer, tmp_path):
    config = _config(trained, scorer, **{"distill.weight": 0.3})
    ((dataset, train, dev),) = sets = _sets(config)
    soft = soft_labels.soft_examples(config, tmp_path, sets)
    assert soft.keys() <= {question.id for question in train}
    assert not soft.keys() & {question.id for question in dev}

    searched = ConfigDict({"checkpoint": str(trained[0]), "depth": _DEPTH, "corpus": "all"})
    searched.update({"query_max_length": 256, "unit_max_length": 128})
    found, _ = choices.choices_of(searched, tmp_path, [(dataset, train, ())])
    model, _ = open_cross_encoder(str(scorer))
    examples = [example for question in soft for example in soft[question]]
    assert len(examples) == len(found) > 5
    for choice in found:
        (example,) = (e for e in soft[choice.question_id] if e.query == choice.query)
        assert example.candidates == choice.texts and len(choice.texts) == _DEPTH
        (logit_K,) = score_groups(model, None, [choice.query], [choice.texts])
        np.testing.assert_allclose(example.shares, softmax(logit_K), rtol=1e-6)
        assert example.weight == 0.3
    assert max(max(example.shares) for example in examples) > 1.2 / _DEPTH


def test_what_was_read_stays_in_the_workdir(trained, scorer, tmp_path, monkeypatch):
    read, score = [], soft_labels.score_groups
    monkeypatch.setattr(
        soft_labels, "score_groups", lambda *a, **k: (read.append(1), score(*a, **k))[1]
    )
    config = _config(trained, scorer)
    first = soft_labels.soft_examples(config, tmp_path, _sets(config))
    assert soft_labels.soft_examples(config, tmp_path, _sets(config)) == first and len(read) == 1
    (file,) = tmp_path.glob("logits-*.npy")
    damaged = np.load(file)
    damaged[0, 0] = -1  # Its bits are no number.
    np.save(file, damaged)
    assert soft_labels.soft_examples(config, tmp_path, _sets(config)) == first and len(read) == 2


def test_a_step_learns_from_chains_and_soft_examples(trained, scorer, tmp_path, one_device):
    def losses(name, **changes):
        config = _config(trained, scorer, **changes)
        assert aligner.train_and_evaluate(config, tmp_path / name)["complete"]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]

    both, plain = losses("both"), losses("plain", **{"distill.joint": "null"})
    soft = losses("soft", **{"distill.weight": 1e9})  # Nothing but the soft examples counts.
    config = _config(trained, scorer, **{"distill.weight": 3.0})
    sets, encoder = _sets(config), load_encoder(str(trained[2]))
    given = aligner.training_chains(sets, config, tmp_path)
    examples = soft_labels.soft_examples(config, tmp_path, sets)
    mesh = sharding.make_mesh(1, 1, 1)
    first = next(aligner.make_batches(config, *given, encoder, mesh, examples))
    counts = (first.weight_B == 1).sum(), (first.weight_B == 3).sum()
    assert min(counts) > 0 and soft[0] != plain[0]
    wanted = np.average([plain[0], soft[0]], weights=counts)
    np.testing.assert_allclose(both[0], wanted, rtol=1e-6)

    train = {question.id for question in sets[0].train}
    # The scorer's training held out one question more; the head learnt from those held out.
    taught = train | (trained_on(str(scorer)) or set()) | (trained_on(str(trained[0])) or set())
    assert trained_on(str(tmp_path / "both")) == taught
    assert trained_on(str(tmp_path / "plain")) == train < taught


def test_resumed_equals_uninterrupted_bit_for_bit(
    trained, scorer, tmp_path, one_device, monkeypatch
):
    config = _config(trained, scorer)
    # Of a process that was killed: no step of another run.
    (tmp_path / "whole/checkpoints/3.orbax-checkpoint-tmp").mkdir(parents=True)
    aligner.train_and_evaluate(config, tmp_path / "whole")
    calls = iter([False] * 2 + [True] * 9)
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: next(calls))
    assert aligner.train_and_evaluate(config, tmp_path / "cut")["step"] == 3
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: False)
    assert aligner.train_and_evaluate(config, tmp_path / "cut")["complete"]
    monkeypatch.setattr(aligner, "training_chains", None)  # What takes long is not begun.
    with pytest.raises(UserError, match=r"was started with distill\.depth=4, not 3"):
        other = _config(trained, scorer, **{"distill.depth": 3})
        aligner.train_and_evaluate(other, tmp_path / "cut")
    states = [open_encoder(str(tmp_path / name))[0].state for name in ("cut", "whole")]
    for a, b in zip(*map(tiny.arrays, states), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill.checkpoint": "null"}, r"distill\.joint needs config\.distill\.checkpoint"),
        ({"distill.depth": 1}, r"config\.distill\.depth=1 must be at least 2"),
        ({"distill.steps_per_question": 0}, r"config\.distill\.steps_per_question=0"),
        ({"distill.weight": 0}, r"config\.distill\.weight=0"),
        ({"head.corpus": "some"}, r"config\.head\.corpus"),
        ({"data.units": "triple"}, r"distill\.checkpoint=.* ranks sentences, but .*units=triple"),
    ],
)
def test_what_cannot_be_distilled_is_said(trained, scorer, tmp_path, one_device, changes, message):
    with pytest.raises(UserError, match=message):
        aligner.train_and_evaluate(_config(trained, scorer, **changes), tmp_path)
