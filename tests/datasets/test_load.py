import dataclasses

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from tests import tiny


def _data(folder, **changes):
    flags = [f"--config.data.{k}={v}" for k, v in {"dir": folder, **changes}.items()]
    return load_config("configs/aligner.py", flags).data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset_folder(tmp_path_factory.mktemp("data") / "tiny")


def test_select_questions_by_split_and_limit(folder):
    data = _data(folder, split="dev", limit=3)
    questions = load.select_questions(load.load_dataset(data), data)
    assert [q.id for q in questions] == ["q8", "q9", "q10"]


def test_select_questions_random_selection_follows_the_seed(folder):
    def drawn(**changes):
        data = _data(folder, split="train", random=True, **changes)
        return [q.id for q in load.select_questions(load.load_dataset(data), data)]

    every = drawn()
    order = {name: place for place, name in enumerate(every)}
    assert len(every) == 8
    draws = {seed: drawn(limit=4, seed=seed) for seed in range(5)}
    assert all(len(set(names)) == 4 for names in draws.values())
    assert all(names == sorted(names, key=order.get) for names in draws.values())
    assert len(set(map(tuple, draws.values()))) > 1
    assert drawn(limit=4, seed=1) == draws[1] and set(draws[1]) < set(drawn(limit=6, seed=1))
    assert drawn(limit=8) == every == drawn(limit=80)


def test_select_questions_empty_selection_lists_values(folder):
    data = _data(folder, split="test")
    with pytest.raises(UserError, match=r"config\.data\.split=test .* values: dev, train"):
        load.select_questions(load.load_dataset(data), data)


def test_select_questions_with_triples_keeps_covered_questions(folder, tmp_path):
    data = _data(folder, only_with_triples=True)
    assert len(load.select_questions(load.load_dataset(data), data)) == 8
    lines = (folder / "openie.jsonl").read_text().splitlines(keepends=True)
    for name in ("questions.jsonl", "corpus.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "openie.jsonl").write_text("".join(lines[1:]))  # Passage p0 has no triples now.
    data = _data(tmp_path, only_with_triples=True)
    kept = load.select_questions(load.load_dataset(data), data)
    assert "q0" not in {q.id for q in kept} and len(kept) < 8


def test_load_dataset_without_passages_reads_no_triples(folder, tmp_path):
    (tmp_path / "questions.jsonl").write_bytes((folder / "questions.jsonl").read_bytes())
    data = _data(tmp_path, triples=folder / "openie.jsonl")
    dataset = load.load_dataset(data, corpus=False, on_request=True)
    assert dataset.questions and dataset.triples == {}
    data.dir = None
    assert load.load_dataset(data, corpus=False, on_request=True).questions
    data.dir = str(folder)  # With only_with_triples, triples select the questions.
    assert load.load_dataset(data, corpus=False).triples


def test_select_corpus_contexts_of_hotpotqa_are_refused_unless_told():
    dataset = tiny.dataset()
    questions = [dataclasses.replace(q, setting="distractor") for q in dataset.questions[:2]]
    data = load_config("configs/methods/kirag.py:paper", []).data
    with pytest.raises(UserError, match=r"only the contexts of HotpotQA's questions \(24 passages"):
        load.select_corpus(dataset, questions, data)
    data.contexts_as_corpus = True
    assert len(load.select_corpus(dataset, questions, data).passages) == 24
    data.contexts_as_corpus = False
    for setting in ("abstracts", "answerable", None):
        others = [dataclasses.replace(q, setting=setting) for q in questions]
        assert len(load.select_corpus(dataset, others, data).passages) == 24


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", "q9\n\n q8 \n"),
        ("ids.json", '["q9", "q8"]'),
        ("dev.json", '[{"_id": "q9", "question": "?"}, {"id": "q8"}]'),
        ("dev.jsonl", '{"id": "q9"}\n"q8"\n'),
        ("dev.jsonl", '{"id": "q9", "question": "a\u2028b"}\r\n"q8"\r\n'),
    ],
)
def test_select_questions_by_file_of_ids(folder, tmp_path, name, text):
    (tmp_path / name).write_text(text, "utf-8")
    data = _data(folder, split="dev", ids=tmp_path / name)
    questions = load.select_questions(load.load_dataset(data), data)
    assert [q.id for q in questions] == ["q8", "q9"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ids.txt", "q8\nq0\nnone\n", r"2 of 3 ids are not among the \d+ selected .*first: q0"),
        ("ids.txt", "", "0 of 0 ids are not among"),
        ("ids.json", "{}", "must be a list of ids or of questions, not an object"),
        ("ids.json", "[", "is not valid JSON"),
        ("ids.json", "[1]", "item 1 has no id"),
        ("none.txt", None, "cannot be read: No such file"),
    ],
)
def test_select_questions_bad_file_of_ids_is_refused(folder, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    data = _data(folder, split="dev", ids=tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        load.select_questions(load.load_dataset(data), data)
    assert f"config.data.ids={tmp_path / name}" in str(error.value)
