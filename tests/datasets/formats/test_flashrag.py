import dataclasses
import json

import pytest

from cirag_jax.datasets import export, formats, prepare
from cirag_jax.datasets.jsonl import read_dataset
from cirag_jax.errors import UserError
from tests.datasets.formats import writing

CORPUS = (
    {"id": 0, "contents": '"Skerry Light"\nIt was lit in 1871.\nIt stands on Brum.'},
    {"id": "1", "contents": "Brum\nAn island."},
    {"id": "2", "contents": "No title here"},
)


def test_flashrag_round_trip_is_exact(tmp_path):
    dataset = dataclasses.replace(writing.dataset(), triples={})
    formats.write("flashrag", dataset, tmp_path / "out")
    back = formats.read(tmp_path / "out")
    assert back.corpus == dataset.corpus
    # Questions without a split are written as those of the test split.
    assert {q.id: q for q in back.questions} == {q.id: q for q in dataset.questions}
    row = json.loads((tmp_path / "out/corpus.jsonl").read_text().splitlines()[0])
    assert row["contents"].startswith('"Skerry Light"\nIt was lit')


def test_flashrag_answers_and_ids_of_all_kinds_are_read(tmp_path):
    writing.lines(
        tmp_path / "test.jsonl",
        {"id": "a", "question": "one?", "golden_answers": ["x", 7, ["y"], None, " "]},
        {"id": 3, "question": "two?", "golden_answers": "z", "metadata": None},
        {"question": "three?", "golden_answers": 1.5},
        {"id": "d", "question": "four?", "golden_answers": None},
    )
    writing.lines(tmp_path / "wiki.jsonl.gz", *CORPUS)
    dataset = formats.read(tmp_path)
    assert [(q.id, q.answers) for q in dataset.questions] == [
        ("a", ("x", "7", "y")), ("3", ("z",)), ("test_2", ("1.5",)), ("d", ()),
    ]  # fmt: skip
    assert {q.split for q in dataset.questions} == {"test"}
    assert [(p.id, p.title, p.text) for p in dataset.corpus.values()] == [
        ("0", "Skerry Light", "It was lit in 1871.\nIt stands on Brum."),
        ("1", "Brum", "An island."),
        ("2", "", "No title here"),
    ]


def test_flashrag_gold_titles_of_benchmarks_are_found_in_the_corpus(tmp_path):
    context = {"title": ["Brum", "Osk"], "content": [["An island."], ["A county."]]}
    facts = {"title": ["Skerry Light", "Brum"], "sent_id": [0, 0]}
    steps = [{"support_paragraph": {"title": "Brum", "paragraph_text": "An island."}}]
    metadata = (
        {"type": "bridge", "supporting_facts": facts, "context": context},
        {"supporting_facts": [["Brum", 0]]},
        {"question_decomposition": steps},
        {"supporting_facts": {"title": ["Osk"], "sent_id": [0]}},  # Not in the corpus.
        {"supporting_facts": "unusable", "context": 7, "question_decomposition": [3]},
    )
    rows = [
        {"id": str(i), "question": "?", "golden_answers": [], "metadata": value}
        for i, value in enumerate(metadata)
    ]
    writing.lines(tmp_path / "dev.jsonl", *rows)
    writing.lines(tmp_path / "corpus.jsonl", *CORPUS)
    questions = formats.read(tmp_path).questions
    assert [q.supporting for q in questions] == [("0", "1"), ("1",), ("1",), None, None]
    assert questions[0].supporting_sentences == (("0", 0), ("1", 0))
    assert questions[0].type == "bridge" and questions[0].context is None


def test_flashrag_without_corpus_has_the_passages_of_the_metadata(tmp_path):
    context = {"title": ["Brum", "Osk"], "sentences": [["An island. ", "Small."], ["A county."]]}
    metadata = {"context": context, "supporting_facts": {"title": ["Osk"], "sent_id": [0]}}
    row = {"id": "a", "question": "?", "golden_answers": ["x"], "metadata": metadata}
    writing.lines(tmp_path / "train.jsonl", row, {**row, "id": "b"})
    dataset = formats.read(tmp_path)
    assert [(p.title, p.text) for p in dataset.corpus.values()] == [
        ("Brum", "An island. Small."), ("Osk", "A county."),
    ]  # fmt: skip
    first = dataset.questions[0]
    assert first.context == tuple(dataset.corpus) and first.supporting == tuple(dataset.corpus)[1:]


def test_flashrag_results_give_dataset_and_run(tmp_path, capsys):
    documents = [{**CORPUS[1], "score": 2.0}, {**CORPUS[0], "score": 1.0}, {**CORPUS[1]}]
    item = {"id": "q", "question": "?", "golden_answers": ["x"]}
    output = {"retrieval_result": documents, "pred": "x", "metric_score": {"em": 1.0}}
    writing.value(tmp_path / "run/intermediate_data.json", [{**item, "output": output}])
    (tmp_path / "run/metric_score.txt").write_text("em: 1.0\n")
    code = prepare.main([f"--source={tmp_path / 'run'}", f"--out={tmp_path / 'data'}"])
    assert code == 0, capsys.readouterr().err
    dataset = read_dataset(tmp_path / "data")
    assert dataset.questions[0].context == ("1", "0") and list(dataset.corpus) == ["1", "0"]
    run = (tmp_path / "data/run.trec").read_text().splitlines()
    assert [line.split()[:4] for line in run] == [["q", "Q0", "1", "1"], ["q", "Q0", "0", "2"]]


def test_flashrag_results_of_a_run_are_written(tmp_path, capsys):
    writing.lines(
        tmp_path / "w/predictions.jsonl",
        {"id": "q2", "answer": "a poet", "passages": ["p4", "p 1"], "granularity": None},
    )
    dataset = dataclasses.replace(writing.dataset(), triples={})
    formats.write("flashrag", dataset, tmp_path / "data")
    flags = ["--format=flashrag", f"--run={tmp_path / 'w'}", f"--data_dir={tmp_path / 'data'}"]
    assert export.main([*flags, f"--out={tmp_path / 'out'}"]) == 0, capsys.readouterr().err
    (item,) = json.loads((tmp_path / "out/intermediate_data.json").read_text())
    assert item["golden_answers"] == ["a poet"] and item["output"]["pred"] == "a poet"
    documents = item["output"]["retrieval_result"]
    assert [d["id"] for d in documents] == ["p4", "p 1"]
    assert documents[0]["contents"] == '"Osk"\nA poet.'
    assert formats.open_reader(tmp_path / "out").rankings() == {"q2": ["p4", "p 1"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a", "golden_answers": ["x"]}, ":2: field 'question' is missing"),
        ({"id": "a", "question": None, "golden_answers": []}, ":2: field 'question' is null"),
        ({"id": "a", "question": " ", "golden_answers": []}, ":2: field 'question' is empty"),
        ({"id": "a", "question": ["?"], "golden_answers": []}, "must be a string, not a list"),
        (
            {"id": "a", "question": "?", "golden_answers": [{"a": 1}]},
            r"field 'golden_answers\[0\]' must be a string, a number or a list, not an object",
        ),
        ({"id": "0", "question": "?", "golden_answers": []}, ":2: field 'id' repeats the id '0'"),
    ],
)
def test_flashrag_bad_question_names_file_line_and_field(tmp_path, row, message):
    good = {"id": "0", "question": "?", "golden_answers": []}
    writing.lines(tmp_path / "test.jsonl", good, row)
    writing.lines(tmp_path / "corpus.jsonl", *CORPUS)
    with pytest.raises(UserError, match=f"test.jsonl{message}|{message}"):
        formats.read(tmp_path)


def test_flashrag_repeated_passages_are_skipped_unless_they_differ(tmp_path, caplog):
    writing.lines(tmp_path / "corpus.jsonl", *CORPUS, CORPUS[1], {"id": "9", "contents": ""})
    dataset = formats.read(tmp_path, questions=False)
    assert list(dataset.corpus) == ["0", "1", "2", "9"]
    writing.lines(tmp_path / "corpus.jsonl", *CORPUS, {"id": "1", "contents": "Brum\nA town."})
    with pytest.raises(UserError, match="corpus.jsonl:4: field 'id' repeats the id '1' with"):
        formats.read(tmp_path, questions=False)
