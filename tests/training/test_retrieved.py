"""Hard negatives from the passages that a retriever finds for each prefix of a chain."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.datasets.chains import passage_text, query_text, sentence_texts
from cirag_jax.errors import UserError
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.retrieval.encode import encode
from cirag_jax.training import aligner, aligner_batches, retrieved
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data import splits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PASSAGES = 3


def _values(model_and_data, **changes):
    model, data = model_and_data
    return {
        "model.spec": model, "data.dir": data, "data.units": "sentence", "dev.questions": 0,
        "batch_size": 8, "num_negatives": 2, "num_steps": 1, "eval_every": 0, "order": "printed",
        "query_max_length": 128,
        "retrieved.model": model, "retrieved.passages": _PASSAGES, **changes,
    }  # fmt: skip


def _config(model_and_data, **changes):
    values = _values(model_and_data, **changes)
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return load_config(str(_ROOT / "configs/aligner.py"), overrides)


def _training_chains(config, workdir):
    sets = [splits.split_questions(one, config) for one in load.load_datasets(config.data)]
    return aligner_batches.training_chains(sets, config, workdir)


def test_prefix_pools_have_sentences_of_nearest_passages(model_and_data, tmp_path):
    config = _config(model_and_data)
    chains, _, prefix_pools, _ = _training_chains(config, tmp_path)
    corpus = load.load_dataset(config.data).corpus
    encoder = load_encoder(str(model_and_data[0]))
    vector_ND = encode(encoder, None, [passage_text(p) for p in corpus.values()], max_length=256)
    texts = [list(sentence_texts(passage)) for passage in corpus.values()]
    assert len(chains) > 5
    for chain, pools in zip(chains, prefix_pools, strict=True):
        assert len(pools) == len(chain.steps)
        for length, pool in enumerate(pools):
            steps = [unit.text for unit in chain.steps[:length]]
            query = query_text(chain.question, steps, "sentence")
            (query_D,) = encode(encoder, None, [query], kind="query", max_length=256)
            nearest = np.argsort(-(vector_ND @ query_D), kind="stable")[:_PASSAGES]
            assert [unit.text for unit in pool] == [text for row in nearest for text in texts[row]]
    assert any(len(set(pools)) > 1 for pools in prefix_pools)


def test_prefix_pools_exclude_passages_with_gold_sentences(model_and_data, tmp_path):
    """A gold sentence may be repeated in an overlapping chunk, which must not be a negative."""
    config = _config(model_and_data)
    dataset = load.load_dataset(config.data)
    chains, pools = pools_lib.chains_and_pools(dataset, dataset.questions[:1], "sentence")

    def retrieved_ids(dataset):
        (prefix_pools,) = retrieved.prefix_pools(config, tmp_path, dataset, chains, pools)
        return {unit.passage_id for unit in prefix_pools[0]}

    question = dataset.questions[0]
    gold = question.supporting
    assert gold
    before = retrieved_ids(dataset)
    repeats = next(id for id in before if id not in gold)
    place = (gold[0], 0)
    question = dataclasses.replace(
        question, supporting_sentences=(place,), same_sentences=((place, (repeats, 0)),)
    )
    assert retrieved_ids(dataclasses.replace(dataset, questions=(question,))) == before - {repeats}


def test_prefix_pools_without_negative_use_own_pool(model_and_data, tmp_path):
    config = _config(model_and_data, **{"data.units": "triple"})
    dataset = load.load_dataset(config.data)
    chains, pools = pools_lib.chains_and_pools(dataset, dataset.questions, "triple")
    without_triples = dataclasses.replace(dataset, triples={})
    prefix_pools = retrieved.prefix_pools(config, tmp_path, without_triples, chains, pools)
    for pool, pools_of_chain in zip(pools, prefix_pools, strict=True):
        assert set(pools_of_chain) == {pool}


def test_prefix_pools_are_read_from_workdir(model_and_data, tmp_path, monkeypatch):
    config = _config(model_and_data)
    searched, search = [], retrieved._search
    monkeypatch.setattr(retrieved, "_search", lambda *a: (searched.append(1), search(*a))[1])
    expected = _training_chains(config, tmp_path)
    assert _training_chains(config, tmp_path) == expected and len(searched) == 1
    (file,) = tmp_path.glob("retrieved-*.npy")
    rows = np.load(file)
    for damaged in (rows[:, :1], np.full_like(rows, 10**6), np.full_like(rows, -1)):
        np.save(file, damaged)
        assert _training_chains(config, tmp_path) == expected
    assert len(searched) == 4
    other = _config(model_and_data, **{"retrieved.passages": 1})
    assert _training_chains(other, tmp_path)[2] != expected[2] and len(searched) == 5


@pytest.mark.parametrize("preset", ["", ":paper"])
def test_train_retrieved_negatives_resumes(model_and_data, tmp_path, one_device, preset):
    values = _values(model_and_data, **{"model.dtype": "float32", "temperature": 0.05})
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    config = load_config(str(_ROOT / f"configs/aligner.py{preset}"), overrides)
    assert aligner.train_and_evaluate(config, tmp_path)["complete"]
    assert aligner.train_and_evaluate(config, tmp_path)["step"] == 1  # The negatives are the same.
    config.retrieved.passages = 1
    with pytest.raises(UserError, match=r"was started with retrieved\.passages=3, not 1"):
        aligner.train_and_evaluate(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retrieved.passages": 0}, r"config\.retrieved\.passages=0 must be at least 1"),
        (
            {"order": "dependency"},
            r"config\.retrieved\.model needs config\.order=printed, not dependency",
        ),
        (
            {"batch_size": 400},
            "needs at least 100 questions, .* there are 8; .*batch_size$",
        ),
    ],
)
def test_train_invalid_settings_are_refused_before_retrieval(
    model_and_data, tmp_path, one_device, monkeypatch, changes, message
):
    monkeypatch.setattr(retrieved, "prefix_pools", None)
    with pytest.raises(UserError, match=message):
        aligner.train_and_evaluate(_config(model_and_data, **changes), tmp_path)


def test_train_first_process_retrieves_for_all(model_and_data, tmp_path, command):
    settings = _values(model_and_data)
    arguments = ["--config=configs/aligner.py", *(f"--config.{k}={v}" for k, v in settings.items())]

    def outputs(workdir):
        (file,) = workdir.glob("retrieved-*")
        (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
        return file.name, json.loads(line)["train/loss"]

    single, pair, torn = (tmp_path / name for name in ("alone", "pair", "torn"))
    assert command("train.py", *arguments, f"--workdir={single}").returncode == 0
    done = command.together("train.py", *arguments, f"--workdir={pair}")
    assert [process.returncode for process in done] == [0, 0], done
    (name, loss), (of_two, loss_of_two) = outputs(single), outputs(pair)
    assert of_two == name
    np.testing.assert_allclose(loss_of_two, loss, rtol=1e-6)

    (torn / name).mkdir(parents=True)  # The path of the first process's file.
    done = command.together("train.py", *arguments, f"--workdir={torn}")
    assert all(process.returncode for process in done), done  # Neither waits forever.
    assert "process 0 of 2 failed: " in done[1].stderr
