import json

import pytest

from cirag_jax.datasets import formats, load
from cirag_jax.errors import UserError
from configs import common
from tests.datasets.formats import writing

CORPUS = [
    {"title": "Osk", "text": "A county. Its seat is Tarn.", "idx": 7},
    {"title": "Osk", "text": "A poet.", "idx": 8},
    {"title": "Brum", "text": "An island.", "idx": 9},
]


def read(folder, *questions, corpus=CORPUS):
    writing.value(folder / "rivers.json", list(questions))
    writing.value(folder / "rivers_corpus.json", corpus)
    return formats.read(folder)


def test_hipporag_gold_is_found_by_title_and_text(tmp_path):
    two_wiki = {
        "_id": "a",
        "type": "bridge_comparison",
        "question": "?",
        "context": [["Osk", ["A county.", "Its seat is Tarn."]], ["Brum", ["An island."]]],
        "answer": "Tarn",
        "supporting_facts": [["Osk", 1]],
        "evidences": [["Osk", "seat", "Tarn"]],
    }
    musique = {
        "id": "b",
        "question": "?",
        "paragraphs": [
            {"title": "Osk", "paragraph_text": "A poet.", "is_supporting": True, "idx": 0},
            {"title": "Brum", "paragraph_text": "An island.", "is_supporting": False, "idx": 1},
        ],
        "question_decomposition": [{"question": "x", "answer": "y"}] * 3,
        "answer": "poet",
        "answer_aliases": ["bard"],
        "answerable": True,
    }
    popqa = {
        "id": 5,
        "question": "?",
        "obj": "Tarn",
        "possible_answers": '["Tarn", "Tarn town"]',
        "o_wiki_title": "Tarn",
        "o_aliases": "[]",
        "paragraphs": [{"title": "Brum", "text": "An  island. "}],
    }
    natural = {
        "question": "?",
        "reference": ["x", "z"],
        "contexts": [
            {"title": "Osk", "text": "A poet.", "is_supporting": True},
            {"title": "Unknown", "text": "", "is_supporting": False},
        ],
    }
    dataset = read(tmp_path, two_wiki, musique, popqa, natural)
    assert [(q.id, q.supporting) for q in dataset.questions] == [
        ("a", ("7",)), ("b", ("8",)), ("5", ("9",)), ("rivers_3", ("8",)),
    ]  # fmt: skip
    assert [q.answers for q in dataset.questions] == [
        ("Tarn",), ("poet", "bard"), ("Tarn", "Tarn town"), ("x", "z"),
    ]  # fmt: skip
    a, b, _, d = dataset.questions
    assert a.hops == 4 and a.evidences == (("Osk", "seat", "Tarn"),) and a.context == ("7", "9")
    assert b.hops == 3 and b.aliases == ("bard",) and b.context == ("8", "9")
    assert d.context is None  # One of its passages is not in the corpus.


def test_hipporag_ambiguous_title_is_unknown(tmp_path):
    changed = {"title": "Osk", "paragraph_text": "Another text.", "is_supporting": True}
    unique = {"title": "Brum", "paragraph_text": "Another text.", "is_supporting": True}
    rows = [
        {"id": str(i), "question": "?", "answer": "x", "paragraphs": [paragraph]}
        for i, paragraph in enumerate((changed, unique))
    ]
    assert [q.supporting for q in read(tmp_path, *rows).questions] == [None, ("9",)]


def test_hipporag_corpus_by_title_and_without_idx(tmp_path):
    question = {"id": "a", "question": "?", "answer": 1871, "paragraphs": []}
    dataset = read(tmp_path, question, corpus={"Osk": ["A county. ", "Its seat."], "Brum": []})
    assert [(p.id, p.text) for p in dataset.corpus.values()] == [
        ("0", "A county. Its seat."), ("1", ""),
    ]  # fmt: skip
    assert dataset.questions[0].answers == ("1871",)


def test_hipporag_round_trip_with_triples(tmp_path):
    dataset = writing.dataset()
    formats.write("hipporag", dataset, tmp_path / "rivers")
    back = formats.read(tmp_path / "rivers")
    ids = dict(zip(back.corpus, dataset.corpus, strict=True))  # Rows instead of ids.
    assert [(p.title, p.text) for p in back.corpus.values()] == [
        (p.title, p.text) for p in dataset.corpus.values()
    ]
    for new, old in zip(back.questions, dataset.questions, strict=True):
        assert (new.id, new.question, new.answers) == (old.id, old.question, old.answers)
        gold = None if new.supporting is None else {ids[name] for name in new.supporting}
        assert gold == (None if old.supporting is None else {*old.supporting})
    found = {ids[name]: [t[:3] for t in facts] for name, facts in back.triples.items()}
    assert found == {"p 1": [("Skerry Light", "lit in", "1871")], "p5": []}


def test_hipporag_folder_is_config_data_dir(tmp_path):
    formats.write("hipporag", writing.dataset(), tmp_path / "rivers")
    data = common.data(split="dev")
    data.dir = str(tmp_path / "rivers")
    dataset = load.load_dataset(data)
    assert len(dataset.questions) == 3 and dataset.triples
    assert not load.load_dataset(data, questions=False).questions


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            {"id": "a", "question": "?", "paragraphs": []},
            r"rivers.json\[0\]: field 'answer' is mis",
        ),
        ({"id": "a", "question": "?", "answer": {}}, "must be a string, a number or a list"),
        (
            {"id": "a", "question": "?", "answer": "x", "supporting_facts": [["Osk"]]},
            r"rivers.json\[0\]: field 'supporting_facts'.*must be a pair",
        ),
        ({"id": "a", "question": "?", "obj": "x", "o_aliases": "[1"}, "'o_aliases' is not a JSON"),
    ],
)
def test_hipporag_bad_question_names_file_and_field(tmp_path, question, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, question)


def test_hipporag_bad_corpus_names_file(tmp_path):
    question = {"id": "a", "question": "?", "answer": "x", "paragraphs": []}
    with pytest.raises(UserError, match=r"rivers_corpus.json\[0\]: field 'text' is missing"):
        read(tmp_path, question, corpus=[{"title": "Osk"}])
    (tmp_path / "rivers_corpus.json").write_text(json.dumps(CORPUS)[:-9])
    with pytest.raises(UserError, match="rivers_corpus.json:1: invalid or truncated JSON"):
        formats.read(tmp_path)
