import dataclasses
import json
import logging
import os

import hypothesis
import pytest
from hypothesis import strategies as st

from cirag_jax.datasets.jsonl import read_corpus, read_dataset, write_dataset
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple

PASSAGES = [
    {"id": "p1", "title": "Ule", "text": "The Ule is a river. It is long."},
    {"id": "p2", "title": "Tarn", "text": "ab", "sentences": ["a", "", "b"], "extra": 1},
]
QUESTIONS = [
    {"id": "q1", "question": "Which river?", "answers": ["Ule", "the Ule"]},
    {
        "id": "q2",
        "question": "Where?",
        "answers": [],
        "hops": 2,
        "type": None,
        "split": "dev",
        "supporting": ["p2"],
        "supporting_sentences": [["p2", 2]],
        "context": ["p1", "p2"],
        "evidences": [["Tarn", "river", "Ule"]],
        "decomposition": [{"question": "a", "answer": "b", "supporting": "p1"}],
        "reasoning": "ignored",
    },
]
OPENIE = [
    {"passage_id": "p1", "entities": ["Ule"], "triples": [["It", "is", "long"]]},
    {"passage_id": "p2", "entities": [], "triples": []},
]


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("questions", QUESTIONS), ("corpus", PASSAGES), ("openie", OPENIE)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_read_dataset_absent_and_null_fields_are_none(folder):
    dataset = read_dataset(folder)
    assert dataset.name == folder.name
    assert dataset.questions[0] == Question("q1", "Which river?", ("Ule", "the Ule"))
    assert dataset.questions[1] == Question(
        "q2",
        "Where?",
        (),
        hops=2,
        split="dev",
        supporting=("p2",),
        supporting_sentences=(("p2", 2),),
        context=("p1", "p2"),
        evidences=(("Tarn", "river", "Ule"),),
        decomposition=(SubQuestion("a", "b", "p1"),),
    )
    assert list(dataset.corpus) == ["p1", "p2"]
    assert dataset.corpus["p1"].sentences is None
    assert dataset.corpus["p2"].sentences == ("a", "", "b")


def test_read_dataset_triples_get_their_sentences(folder):
    assert read_dataset(folder).triples == {
        "p1": (Triple("It", "is", "long", "p1", 1),),
        "p2": (),
    }


def test_read_dataset_ignores_gold_triples(folder):
    (folder / "openie.jsonl").rename(folder / "gold_triples.jsonl")
    assert read_dataset(folder).triples == {}


def test_read_dataset_drops_and_counts_malformed_triples(folder, caplog):
    good = ["a", "b", "c"]
    rows = [
        {"passage_id": "p1", "triples": [["a", "b"], good, ["a", 1, "c"], "abc", ["", "b", "c"]]}
    ]
    write_rows(folder / "openie.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        triples = read_dataset(folder).triples["p1"]
    assert [(t.head, t.relation, t.tail) for t in triples] == [tuple(good)]
    assert "dropped 4 triples" in caplog.text


def test_read_dataset_replaces_and_counts_unknown_triple_sentences(folder, caplog):
    triples = [["It", "is", "long"], ["Ule", "is", "a"], ["It", "is", "long"]]
    row = {"passage_id": "p1", "triples": triples, "triple_sentences": [2, 1, 99]}
    write_rows(folder / "openie.jsonl", [row])
    with caplog.at_level(logging.WARNING):
        found = read_dataset(folder).triples["p1"]
    assert [triple.sentence for triple in found] == [1, 1, 1]
    assert "2 triple_sentences are out of range" in caplog.text


def test_read_dataset_expands_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read_dataset(f"~/{folder.name}") == read_dataset(folder)
    assert read_corpus(f"~/{folder.name}") == read_corpus(folder)


def test_read_dataset_merges_lines_of_one_passage(folder):
    triple, other = ["Ule", "is", "long"], ["Ule", "is", "a river"]
    rows = [
        {"passage_id": "p1", "triples": [triple]},
        {"passage_id": "p1", "triples": [other, triple]},
    ]
    write_rows(folder / "openie.jsonl", rows)
    assert [t.tail for t in read_dataset(folder).triples["p1"]] == ["long", "a river"]


def test_read_dataset_drops_and_counts_unknown_sentences(folder, caplog):
    # p1 has no sentences; the splitter finds two.
    pairs = [["p1", 1], ["p1", 2], ["p2", 2], ["p2", 3]]
    write_rows(folder / "questions.jsonl", [{**QUESTIONS[1], "supporting_sentences": pairs}])
    with caplog.at_level(logging.WARNING):
        (question,) = read_dataset(folder).questions
    assert question.supporting_sentences == (("p1", 1), ("p2", 2))
    assert caplog.text.count("dropped 2 supporting_sentences") == 1


def drop_fields(row, field):
    return {key: value for key, value in row.items() if key != field}


Q, P = QUESTIONS[1], PASSAGES[1]
BAD_ROWS = [
    ("questions", drop_fields(Q, "id"), "'id' is missing"),
    ("questions", drop_fields(Q, "question"), "'question' is missing"),
    ("questions", drop_fields(Q, "answers"), "'answers' is missing"),
    ("questions", {**Q, "id": " "}, "'id' is empty"),
    ("questions", {**Q, "id": 7}, "'id' must be a string, not an integer"),
    ("questions", {**Q, "id": "q1"}, "'id' repeats the id 'q1'"),
    ("questions", {**Q, "question": None}, "'question' must be a string, not null"),
    ("questions", {**Q, "answers": "Ule"}, "'answers' must be a list, not a string"),
    ("questions", {**Q, "answers": ["a", 3]}, "'answers[1]' must be a string, not an integer"),
    ("questions", {**Q, "aliases": ["Nobody"]}, "'aliases' has 'Nobody', which answers does not"),
    ("questions", {**Q, "hops": "2"}, "'hops' must be an integer, not a string"),
    ("questions", {**Q, "hops": True}, "'hops' must be an integer, not a boolean"),
    ("questions", {**Q, "split": ["dev"]}, "'split' must be a string, not a list"),
    ("questions", {**Q, "supporting": ["p9"]}, "'supporting[0]' names passage 'p9'"),
    ("questions", {**Q, "context": ["p1", "p9"]}, "'context[1]' names passage 'p9'"),
    ("questions", {**Q, "supporting_sentences": [["p9", 0]]}, "'supporting_sentences[0][0]'"),
    (
        "questions",
        {**Q, "supporting_sentences": [["p1"]]},
        "'supporting_sentences[0]' must be a pair",
    ),
    ("questions", {**Q, "supporting_sentences": [["p1", -1]]}, "must not be negative"),
    ("questions", {**Q, "same_sentences": [[["p9", 0]]]}, "'same_sentences[0][0][0]' names"),
    (
        "questions",
        {**Q, "same_sentences": [[["p2", 2], ["p1", 2]]]},
        "'same_sentences[0][1]' names sentence 2 of the shorter passage 'p1'",
    ),
    ("questions", {**Q, "evidences": [["a", "b"]]}, "'evidences[0]' must be a triple"),
    ("questions", {**Q, "evidences": [["a", "b", 3]]}, "'evidences[0][2]' must be a string"),
    (
        "questions",
        {**Q, "decomposition": [{"question": "a"}]},
        "'decomposition[0].answer' is missing",
    ),
    (
        "questions",
        {**Q, "decomposition": [{"question": "a", "answer": "b", "supporting": "p9"}]},
        "'decomposition[0].supporting' names passage 'p9'",
    ),
    ("corpus", drop_fields(P, "id"), "'id' is missing"),
    ("corpus", drop_fields(P, "title"), "'title' is missing"),
    ("corpus", drop_fields(P, "text"), "'text' is missing"),
    ("corpus", {**P, "id": "p1"}, "'id' repeats the id 'p1'"),
    ("corpus", {**P, "text": 5}, "'text' must be a string, not an integer"),
    ("corpus", {**P, "sentences": "a"}, "'sentences' must be a list, not a string"),
    ("corpus", {**P, "sentences": [None]}, "'sentences[0]' must be a string, not null"),
    ("openie", {"triples": []}, "'passage_id' is missing"),
    ("openie", {"passage_id": "p9", "triples": []}, "'passage_id' names passage 'p9'"),
    ("openie", {"passage_id": "p2", "triples": {}}, "'triples' must be a list, not an object"),
    (
        "openie",
        {"passage_id": "p2", "triples": [], "triple_sentences": [0]},
        "'triple_sentences' must have one entry per triple (0), not 1",
    ),
]


@pytest.mark.parametrize(("name", "row", "problem"), BAD_ROWS)
def test_read_dataset_bad_field_is_named_with_file_and_line(folder, name, row, problem):
    path = folder / f"{name}.jsonl"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    path.write_text(first + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_dataset(folder)
    message = str(error.value)
    assert message.startswith(f"{path}:2: field ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["questions", "corpus", "openie"])
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "caf\xe9"}', ":2: byte 12 is not valid UTF-8."),
        (b'{"id": "x", "te', ":2: invalid or truncated JSON"),
        (b"FIRST {}", ":2: invalid or truncated JSON (trailing characters"),
        (b'["id"]', ":2: must be a JSON object, not a list."),
        (b'{"id": "\\ud800"}', ":2: invalid or truncated JSON"),
        (b'{"x": ' + b"[" * 100_000, ":2: unusable JSON (RecursionError)."),
    ],
)
def test_read_dataset_bad_line_is_named(folder, name, line, problem):
    path = folder / f"{name}.jsonl"
    first = path.read_bytes().splitlines()[0]
    path.write_bytes(first + b"\n" + line.replace(b"FIRST", first) + b"\n")
    with pytest.raises(UserError) as error:
        read_dataset(folder)
    assert str(error.value).startswith(f"{path}{problem}")


@pytest.mark.parametrize("name", ["questions.jsonl", "corpus.jsonl"])
def test_read_dataset_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} does not exist"):
        read_dataset(folder)


def test_read_dataset_unneeded_files_may_be_missing(folder):
    whole = read_dataset(folder)
    assert read_dataset(folder, questions=False) == dataclasses.replace(whole, questions=())
    assert read_dataset(folder, corpus=False) == whole  # An existing corpus file is read.
    (folder / "questions.jsonl").rename(folder / "aside")
    assert read_dataset(folder, questions=False).corpus == whole.corpus
    (folder / "aside").rename(folder / "questions.jsonl")
    (folder / "corpus.jsonl").unlink()
    alone = read_dataset(folder, corpus=False)
    assert [q.id for q in alone.questions] == [q.id for q in whole.questions]
    assert (alone.corpus, alone.triples) == ({}, {})


def test_write_dataset_without_passages_writes_only_questions(tmp_path, folder):
    asked = Question("q", "?", ("a",))
    alone = Dataset("alone", (asked,), {}, {})
    write_dataset(alone, tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["questions.jsonl"]
    assert read_dataset(tmp_path / "alone", corpus=False) == alone
    before = {path: path.read_bytes() for path in folder.glob("*.jsonl")}
    with pytest.raises(UserError, match=r"corpus\.jsonl exists, but alone has no passages"):
        write_dataset(alone, folder)
    assert {path: path.read_bytes() for path in folder.glob("*.jsonl")} == before


@pytest.mark.parametrize("name", ["questions.jsonl", "corpus.jsonl", "openie.jsonl"])
def test_read_dataset_empty_file_is_named(folder, name):
    (folder / name).write_text("\n \n")
    with pytest.raises(UserError, match=f"{name} is empty"):
        read_dataset(folder)


def test_read_dataset_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        read_dataset(tmp_path / "nowhere")


def test_write_dataset_killed_write_is_not_readable(folder, monkeypatch):
    dataset = read_dataset(folder)
    replace = os.replace

    def killed(source, target):
        if str(target).endswith("questions.jsonl"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(dataset, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.jsonl", "openie.jsonl"]
    with pytest.raises(UserError, match=r"questions\.jsonl does not exist"):
        read_dataset(folder)


def test_write_dataset_removes_old_triples_and_keeps_other_files(folder):
    (folder / "notes.txt").write_text("mine")
    dataset = dataclasses.replace(read_dataset(folder), triples={})
    write_dataset(dataset, folder)
    assert read_dataset(folder) == dataset
    assert (folder / "notes.txt").read_text() == "mine"


def test_write_dataset_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_dataset(Dataset("d", (), {}, {}), tmp_path / "file" / "folder")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FILLED = TEXT.filter(str.strip)
MAYBE = st.none() | TEXT


@st.composite
def datasets(draw):
    sentences = st.none() | st.lists(TEXT, max_size=3).map(tuple)
    ids = draw(st.lists(FILLED, min_size=1, max_size=4, unique=True))
    corpus = {pid: Passage(pid, draw(TEXT), draw(TEXT), draw(sentences)) for pid in ids}
    some_ids = st.none() | st.lists(st.sampled_from(ids), max_size=3).map(tuple)
    places = [(pid, i) for pid in ids for i in range(len(corpus[pid].sentences or ()))]
    pairs = st.lists(st.sampled_from(places), max_size=3).map(tuple) if places else st.just(())
    step = st.builds(SubQuestion, TEXT, TEXT, st.none() | st.sampled_from(ids))
    question = st.builds(
        Question,
        id=FILLED,
        question=FILLED,
        answers=st.lists(TEXT, max_size=2).map(tuple),
        type=MAYBE,
        hops=st.none() | st.integers(0, 9),
        split=MAYBE,
        fold=MAYBE,
        setting=MAYBE,
        supporting=some_ids,
        supporting_sentences=st.none() | pairs,
        same_sentences=st.none() | st.lists(pairs, max_size=2).map(tuple),
        context=some_ids,
        evidences=st.none() | st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=2).map(tuple),
        decomposition=st.none() | st.lists(step, max_size=2).map(tuple),
    )
    questions = draw(st.lists(question, min_size=1, max_size=3, unique_by=lambda q: q.id))
    last = {pid: len(sentences_of(passage)) - 1 for pid, passage in corpus.items()}
    known = {pid: st.integers(0, place) if place >= 0 else st.none() for pid, place in last.items()}
    triples = {
        pid: tuple(
            Triple(draw(FILLED), draw(FILLED), draw(FILLED), pid, draw(known[pid]))
            for _ in range(draw(st.integers(0, 2)))
        )
        for pid in draw(st.lists(st.sampled_from(ids), unique=True))
    }
    return Dataset("folder", tuple(questions), corpus, triples)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(datasets())
def test_write_dataset_any_dataset_is_read_back(tmp_path_factory, dataset):
    folder = tmp_path_factory.mktemp("round") / "folder"
    write_dataset(dataset, folder)
    read = read_dataset(folder)
    assert read == dataset
    assert list(read.corpus) == list(dataset.corpus)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("2wikimultihopqa", (1101, 7034, 0)),
        ("musique", (567, 11320, 1886)),
        ("hotpotqa", (861, 16924, 0)),
        ("popqa", (1000, 1475, 0)),
    ],
)
def test_read_dataset_real_folders(shared_data, name, counts):
    dataset = read_dataset(shared_data / name)
    assert (len(dataset.questions), len(dataset.corpus), len(dataset.triples)) == counts


def test_read_dataset_real_folder_without_corpus_is_refused(shared_data):
    with pytest.raises(
        UserError, match=r"bamboogle/corpus\.jsonl does not exist; put passages there"
    ):
        read_dataset(shared_data / "bamboogle")
