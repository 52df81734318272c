"""Search-R1, Tevatron, triplets of sentence-transformers, and folders of HF datasets."""

import dataclasses
import json

import pyarrow.parquet
import pytest

from cirag_jax.datasets import chains, export, formats
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question
from tests.datasets.formats import writing


def test_search_r1_questions_and_answers_of_all_kinds_are_read(tmp_path):
    def row(target, **more):
        prompt = [{"role": "user", "content": "Think first. Question: Who lit it?\n"}]
        truth = {"ground_truth": {"target": target}, "style": "rule"}
        return {"data_source": "nq", "prompt": prompt, "reward_model": truth, **more}

    writing.lines(
        tmp_path / "train.jsonl",
        row(["Osk", "a poet"], id="a", question="Who?", golden_answers=["x"]),
        row(["Osk"], extra_info={"question": "Which?", "index": 4}),
        row("['Osk', 'Tarn']"),
        row("plain"),
    )
    questions = formats.read(tmp_path, corpus=False).questions
    assert [(q.id, q.question, q.answers) for q in questions] == [
        ("a", "Who?", ("x",)),
        ("train_1", "Which?", ("Osk",)),
        ("train_2", "Who lit it?", ("Osk", "Tarn")),
        ("train_3", "Who lit it?", ("plain",)),
    ]
    assert {(q.split, q.type) for q in questions} == {("train", "nq")}


def test_search_r1_round_trip_with_template(tmp_path, capsys):
    data = writing.dataset()
    formats.write("flashrag", dataclasses.replace(data, triples={}), tmp_path / "data")
    (tmp_path / "prompt.txt").write_text("Search first. Question: {question}")
    flags = ["--format=search_r1", f"--data_dir={tmp_path / 'data'}", f"--out={tmp_path / 'out'}"]
    assert export.main([*flags, f"--template={tmp_path / 'prompt.txt'}"]) == 0, capsys.readouterr()
    (row,) = pyarrow.parquet.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert row["prompt"] == [
        {"role": "user", "content": "Search first. Question: Which county has the light?"}
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Osk", "the Osk"]}}
    back = {q.id: q for q in formats.read(tmp_path / "out", corpus=False).questions}
    for question in data.questions:
        assert back[question.id].question == question.question
        assert back[question.id].answers == question.answers


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reward_model": {"style": "rule"}, "question": "?"}, "ground_truth.target' is missing"),
        ({"reward_model": {"ground_truth": {"target": []}}, "prompt": []}, "'question' is missing"),
    ],
)
def test_search_r1_bad_row_names_file_and_line(tmp_path, row, message):
    writing.lines(tmp_path / "test.jsonl", row)
    with pytest.raises(UserError, match=f"test.jsonl:1: .*{message}"):
        formats.read(tmp_path, corpus=False)


def test_tevatron_round_trip_trains_on_passages(tmp_path):
    dataset = writing.dataset()
    formats.write("tevatron", dataset, tmp_path)
    back = formats.read(tmp_path)
    first, second = back.questions  # The third one has no positive passage.
    assert (first.id, first.supporting, first.split) == ("q2", ("p4",), "dev")
    assert second.supporting == ("p 1", "p3") and second.answers == ("Osk", "the Osk")
    assert second.context == ("p 1", "p3", "p2", "p4")
    assert {p.id: (p.title, p.text) for p in back.corpus.values()} == {
        p.id: (p.title, p.text) for p in dataset.corpus.values()
    }
    pool = chains.pool_of(back, second, "passage")
    (chain,) = chains.silver_chains(back, [second], "passage")
    assert {step.passage_id for step in chain.steps} == {"p 1", "p3"}
    assert {unit.passage_id for unit in pool} == {"p 1", "p2", "p3", "p4"}


def test_tevatron_ids_and_bad_rows(tmp_path, caplog):
    writing.lines(tmp_path / "corpus.jsonl", {"docid": 1, "text": "one"}, {"docid": 2, "text": ""})
    rows = (
        {"query_id": 5, "query_text": "?", "positive_document_ids": ["1"],
         "negative_document_ids": ["2"]},
        {"query_id": 6, "query_text": "?", "positive_document_ids": []},
    )  # fmt: skip
    writing.lines(tmp_path / "train.jsonl", *rows)
    (question,) = formats.read(tmp_path).questions
    assert (question.id, question.supporting, question.context) == ("5", ("1",), ("1", "2"))
    assert "1 queries without a positive passage were skipped" in caplog.text
    bad = {"query_id": 7, "query": "?", "positive_passages": [{"docid": "9"}]}
    writing.lines(tmp_path / "train.jsonl", *rows, bad)
    with pytest.raises(UserError, match=r"train.jsonl:3: positive_passages\[0\]: field 'text' is"):
        formats.read(tmp_path)


def test_triplets_round_trip(tmp_path):
    dataset = writing.dataset()
    formats.write("sentence_transformers", dataset, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["anchor"] == "Which county has the light?"
    assert rows[0]["positive"].startswith("Skerry Light\nIt was lit")
    back = formats.read(tmp_path)
    (question,) = [q for q in back.questions if q.split == "train"]
    titles = [back.corpus[name].title for name in question.supporting or ()]
    assert titles == ["Skerry Light", "Osk"]
    assert len(question.context or ()) == 4 and len(question.supporting or ()) == 2


def test_triplets_without_negatives_are_pairs(tmp_path):
    passages = {name: Passage(name, "", name.upper()) for name in ("one", "two")}
    question = Question("q", "Who?", ("a",), supporting=tuple(passages), context=tuple(passages))
    formats.write("sentence_transformers", Dataset("d", (question,), passages, {}), tmp_path)
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    pairs = [{"anchor": "Who?", "positive": text} for text in ("ONE", "TWO")]
    assert [json.loads(row) for row in rows] == pairs
    (back,) = formats.read(tmp_path).questions
    assert len(back.supporting or ()) == 2


def test_triplets_columns_and_bad_rows(tmp_path):
    rows = (
        {"anchor": "a?", "positive": "one", "negative_1": "two", "negative_2": "three"},
        {"anchor": "a?", "positive": "four", "negative_1": None, "negative_2": "two"},
    )
    writing.parquet(tmp_path / "train.parquet", *rows)
    dataset = formats.read(tmp_path)
    (question,) = dataset.questions
    assert [dataset.corpus[i].text for i in question.supporting or ()] == ["one", "four"]
    assert {dataset.corpus[i].text for i in question.context or ()} == {
        "one", "two", "three", "four",
    }  # fmt: skip
    writing.lines(tmp_path / "train.jsonl", rows[0], {"anchor": "b?", "positive": ""})
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(UserError, match="train.jsonl:2: field 'positive' is empty"):
        formats.read(tmp_path)


def test_hf_saved_folder_is_read(tmp_path):
    writing.arrow(
        tmp_path / "validation",
        {"id": "a", "question": "?", "answers": {"text": ["x", "y"], "answer_start": [0, 3]}},
    )
    writing.arrow(tmp_path / "passages", {"id": "1", "title": "Brum", "text": "An island."})
    writing.value(tmp_path / "dataset_dict.json", {"splits": ["validation", "passages"]})
    dataset = formats.read(tmp_path)
    (question,) = dataset.questions
    assert (question.id, question.answers, question.split) == ("a", ("x", "y"), "validation")
    assert dataset.corpus["1"].text == "An island."


def test_hf_damaged_arrow_names_file(tmp_path):
    writing.arrow(tmp_path / "test", *({"id": str(i), "question": "?"} for i in range(50)))
    path = tmp_path / "test/data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="data-00000-of-00001.arrow cannot be read"):
        formats.open_reader(tmp_path, "hf").source.rows("test").__next__()
