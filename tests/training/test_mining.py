"""Hard negatives from an aligner's own searches."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.datasets.chains import sentence_texts
from cirag_jax.errors import UserError
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.link_head import LinkHead
from cirag_jax.retrieval.encode import encode
from cirag_jax.training import aligner, link_head, mining
from cirag_jax.training.data import pools as pools_lib

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PER_STEP = 3


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _config(model_and_data, **changes):
    model, data = model_and_data
    values = {
        "model.spec": model, "data.dir": data, "data.units": "sentence", "dev.questions": 0,
        "batch_size": 8, "num_negatives": 2, "num_steps": 1, "eval_every": 0, "head.steps": 2,
        "mining.checkpoint": model, "mining.per_step": _PER_STEP, **changes,
    }  # fmt: skip
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return load_config(str(_ROOT / "configs/aligner.py"), overrides)


def _training_chains(config, workdir):
    sets = [aligner.split_questions(one, config) for one in load.load_datasets(config.data)]
    return aligner.training_chains(sets, config, workdir)


def test_what_an_aligner_scores_highest_and_is_wrong_becomes_a_negative(model_and_data, tmp_path):
    """A search of one step, by the aligner's score alone: known without a search."""
    config = _config(model_and_data, **{"head.steps": 1})
    chains, pools = _training_chains(config, tmp_path)
    dataset = load.load_dataset(config.data)
    encoder = load_encoder(str(model_and_data[0]))
    texts = {p.id: list(sentence_texts(p)) for p in dataset.corpus.values()}
    vectors = {id: encode(encoder, None, found, max_length=128) for id, found in texts.items()}
    questions = {question.id: question for question in dataset.questions}
    assert len(chains) > 5
    for chain, pool in zip(chains, pools, strict=True):
        gold = set(questions[chain.question_id].supporting or ())
        query_D = encode(encoder, None, [chain.question], kind="query")[0]
        score = {id: vectors[id] @ query_D for id in texts if id not in gold}
        hardest = sorted(score, key=lambda id: -score[id].max())[:_PER_STEP]
        mined = [texts[id][score[id].argmax()] for id in hardest]
        own = [text for id in questions[chain.question_id].context or () for text in texts[id]]
        of_gold = [text for text in own if any(text in texts[id] for id in gold)]
        assert [unit.text for unit in pool] == [*of_gold, *mined]


def test_a_passage_that_holds_a_gold_sentence_is_no_negative(model_and_data, tmp_path):
    """In overlapping chunks a fact may stand in several passages."""
    config = _config(model_and_data)
    miner = mining.Miner(config, tmp_path)
    dataset = load.load_dataset(config.data)
    chains, own = pools_lib.chains_and_pools(dataset, dataset.questions[:1], "sentence")
    (pool,) = miner.pools(dataset, chains, own)
    question = dataset.questions[0]
    gold = question.supporting
    assert gold
    assert not {unit.passage_id for unit in pool[-_PER_STEP:]} & {*gold}
    found = pool[-1].passage_id
    place = (gold[0], 0)
    question = dataclasses.replace(
        question, supporting_sentences=(place,), same_sentences=((place, (found, 0)),)
    )
    same = dataclasses.replace(dataset, questions=(question,))
    (pool,) = miner.pools(same, chains, own)
    assert len(pool) > _PER_STEP and found not in {unit.passage_id for unit in pool}


def test_what_was_mined_stays_in_the_workdir(model_and_data, tmp_path, monkeypatch):
    config = _config(model_and_data)
    mined, make_task = [], link_head.make_task
    monkeypatch.setattr(
        link_head, "make_task", lambda *args: (mined.append(1), make_task(*args))[1]
    )
    chains, pools = _training_chains(config, tmp_path)
    assert _training_chains(config, tmp_path) == (chains, pools) and len(mined) == 1
    (file,) = tmp_path.glob("mined-*.npy")
    units = np.load(file)
    for damaged in (units[:, :1], np.full_like(units, 10**6)):
        np.save(file, damaged)
        assert _training_chains(config, tmp_path) == (chains, pools)
    assert len(mined) == 3
    other = _config(model_and_data, **{"mining.per_step": 1})
    assert _training_chains(other, tmp_path)[1] != pools and len(mined) == 4


def test_one_aligner_mines_for_the_next(model_and_data, tmp_path, one_device, monkeypatch):
    first = _config(
        model_and_data, **{"mining.checkpoint": "null", "head.rounds": 1, "head.epochs": 1}
    )
    aligner.train_and_evaluate(first, tmp_path / "first")
    searched_by_head = _config(model_and_data, **{"mining.checkpoint": tmp_path / "first"})
    scored, score = [], LinkHead.score
    monkeypatch.setattr(LinkHead, "score", lambda *args: (scored.append(1), score(*args))[1])
    assert aligner.train_and_evaluate(searched_by_head, tmp_path / "next")["complete"]
    assert len(scored) == searched_by_head.head.steps
    pools = _training_chains(searched_by_head, tmp_path / "next")[1]
    assert pools != _training_chains(_config(model_and_data), tmp_path)[1]
    assert pools != _training_chains(first, tmp_path)[1]

    triples = _config(
        model_and_data, **{"data.units": "triple", "mining.checkpoint": tmp_path / "first"}
    )
    with pytest.raises(UserError, match="first ranks sentences, but config.data.units=triple"):
        aligner.train_and_evaluate(triples, tmp_path / "triples")
    mined = len(scored)
    with pytest.raises(UserError, match=r"config\.batch_size needs 100 questions a batch"):
        large = _config(
            model_and_data, **{"mining.checkpoint": tmp_path / "first", "batch_size": 400}
        )
        aligner.train_and_evaluate(large, tmp_path / "large")
    assert len(scored) == mined
    with pytest.raises(UserError, match=r"config\.mining\.per_step=0 must be at least 1"):
        aligner.train_and_evaluate(
            _config(model_and_data, **{"mining.per_step": 0}), tmp_path / "none"
        )


@pytest.mark.slow
def test_the_first_of_several_processes_mines_for_all(model_and_data, tmp_path, command):
    model, data = model_and_data
    settings = {
        "model.spec": model, "data.dir": data, "data.units": "sentence", "num_steps": 1,
        "mining.checkpoint": model, "head.steps": 2, "batch_size": 8, "dev.questions": 0,
    }  # fmt: skip
    arguments = ["--config=configs/aligner.py", *(f"--config.{k}={v}" for k, v in settings.items())]

    def left(workdir):
        (file,) = workdir.glob("mined-*")
        (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
        return file.name, json.loads(line)["train/loss"]

    alone, pair, torn = (tmp_path / name for name in ("alone", "pair", "torn"))
    assert command("train.py", *arguments, f"--workdir={alone}").returncode == 0
    done = command.together("train.py", *arguments, f"--workdir={pair}")
    assert [one.returncode for one in done] == [0, 0], done
    (name, loss), (of_two, loss_of_two) = left(alone), left(pair)
    assert of_two == name
    np.testing.assert_allclose(loss_of_two, loss, rtol=1e-6)

    (torn / name).mkdir(parents=True)  # Where the first process would write its file.
    done = command.together("train.py", *arguments, f"--workdir={torn}")
    assert all(one.returncode for one in done), done  # Neither waits for ever.
    assert "process 0 of 2 failed: " in done[1].stderr
