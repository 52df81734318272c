"""The built-in dataset: counts, provenance, necessary chains, disjoint splits."""

import collections
import hashlib
import json
import pathlib

import pytest

from cirag_jax.datasets import demo
from cirag_jax.datasets.demo.__main__ import main
from cirag_jax.datasets.jsonl import read_dataset
from cirag_jax.types import Dataset, Question
from experiments.demo_dataset.text import fold

# Update after a deliberate change of the dataset, and with it the counts and measurements in
# docs/demo_dataset.md.
FINGERPRINT = "6edea2b1301c5ffc"


def requirements() -> dict[str, str]:
    """The pinned versions of the sources, by name."""
    file = pathlib.Path(__file__).parents[2] / "experiments/demo_dataset/requirements.txt"
    lines = file.read_text("utf-8").splitlines()
    return dict(sorted(line.split("==") for line in lines if line and line[0] != "#"))


def fingerprint(dataset: Dataset) -> str:
    """Returns a hash of every passage, triple and question."""
    digest = hashlib.sha256()
    for part in (dataset.corpus, dataset.triples, dataset.questions):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """The dataset, loaded only once."""
    return demo.build()


def of_split(dataset: Dataset, split: str | None) -> list[Question]:
    """Returns the questions of one split."""
    return [question for question in dataset.questions if question.split == split]


def test_demo_has_the_documented_size(dataset: Dataset) -> None:
    assert len(dataset.corpus) >= 3000
    sizes = collections.Counter(question.split for question in dataset.questions)
    assert sizes["train"] >= 2000 and sizes["dev"] >= 300 and sizes["test"] >= 500
    assert set(sizes) == {"train", "dev", "test"}
    for split in sizes:
        found = {(q.type, q.hops) for q in of_split(dataset, split)}
        assert found == {
            ("bridge", 2),
            ("bridge", 3),
            ("bridge", 4),
            ("comparison", 2),
            ("bridge_comparison", 4),
        }


def test_demo_ids_titles_and_questions_are_unique(dataset: Dataset) -> None:
    assert all(key == passage.id for key, passage in dataset.corpus.items())
    titles = collections.Counter(passage.title for passage in dataset.corpus.values())
    assert [title for title, times in titles.items() if times > 1] == []
    assert len({q.id for q in dataset.questions}) == len(dataset.questions)
    for split in ("train", "dev", "test"):
        texts = [q.question for q in of_split(dataset, split)]
        assert len(set(texts)) == len(texts)


def test_demo_names_are_ambiguous(dataset: Dataset) -> None:
    heads = collections.Counter(triples[0].head for triples in dataset.triples.values())
    assert sum(times > 1 for times in heads.values()) >= 50
    assert heads["Georgia"] >= 2


def test_demo_sentences_and_triples_match(
    dataset: Dataset,
) -> None:
    assert list(dataset.triples) == list(dataset.corpus)
    for passage in dataset.corpus.values():
        assert passage.sentences and passage.text == " ".join(passage.sentences)
        triples = dataset.triples[passage.id]
        assert {t.sentence for t in triples} == set(range(len(passage.sentences)))
        for triple in triples:
            assert triple.passage_id == passage.id and triple.sentence is not None
            sentence = passage.sentences[triple.sentence]
            assert triple.tail.casefold() in sentence.casefold()
            assert triple.head in passage.title or triple.head in passage.sentences[0]


def test_demo_sentences_are_well_formed(dataset: Dataset) -> None:
    for passage in dataset.corpus.values():
        for sentence in passage.sentences or ():
            assert sentence[0] == sentence[0].upper() and sentence[-1] == "."
            assert not sentence.endswith("..") or sentence.endswith("...")
            for slip in ("None", "{", "}", "  ", " ,", "the the ", "The the "):
                assert slip not in sentence, (slip, sentence)


def test_demo_evidences_are_triples_of_gold_passages_in_order(dataset: Dataset) -> None:
    for question in dataset.questions:
        assert question.evidences and question.supporting and question.context
        assert question.supporting_sentences
        assert len(question.evidences) == question.hops
        stated = {
            (t.head, t.relation, t.tail): (t.passage_id, t.sentence)
            for identifier in question.supporting
            for t in dataset.triples[identifier]
        }
        places = [stated[evidence] for evidence in question.evidences]
        assert [p for p, _ in places] == list(question.supporting)
        assert tuple(dict.fromkeys(places)) == question.supporting_sentences


def test_demo_context_has_gold_passages_and_distractors(dataset: Dataset) -> None:
    for question in dataset.questions:
        context = question.context or ()
        assert set(question.supporting or ()) <= set(context) <= set(dataset.corpus)
        assert len(set(context)) == len(context)
        assert len(context) == len(question.supporting or ()) + 8


def test_demo_answer_is_only_in_the_last_passage(dataset: Dataset) -> None:
    for question in dataset.questions:
        answer = question.answers[0]
        assert answer and all(question.answers)
        if question.type == "bridge":
            *early, last = [dataset.corpus[p].text for p in question.supporting or ()]
            assert answer.casefold() in last.casefold()
            word = f" {fold(answer)} "
            assert not any(word in f" {fold(text)} " for text in early)
            assert word not in f" {fold(question.question)} "
        else:
            assert answer in {head for head, _, _ in (question.evidences or ())[:2]}
            assert answer.casefold() in question.question.casefold()


def test_demo_only_chain_passages_link_its_bridges(dataset: Dataset) -> None:
    linked = collections.defaultdict(set)
    for identifier, triples in dataset.triples.items():
        for t in triples:
            linked[fold(t.head), fold(t.tail)].add(identifier)
    for question in dataset.questions:
        evidences = question.evidences or ()
        if question.type != "bridge":
            continue
        for (_, _, tail), (head, _, _) in zip(evidences, evidences[1:], strict=False):
            assert fold(tail) == fold(head) or tail.startswith(head)
        for (head, _, tail), gold in zip(evidences, question.supporting or (), strict=True):
            assert linked[fold(head), fold(tail)] == {gold}


def test_demo_questions_name_only_the_first_passage(dataset: Dataset) -> None:
    for question in dataset.questions:
        text = f" {fold(question.question)} "
        for _, _, tail in (question.evidences or ())[: (question.hops or 0) - 1]:
            if question.type == "bridge":
                assert f" {fold(tail)} " not in text, question


def paths(question: Question) -> list[tuple[tuple[str, str, str], ...]]:
    """Returns the chains of a question: two for a bridge comparison, otherwise one."""
    evidences = question.evidences or ()
    if question.type == "bridge_comparison":
        return [evidences[0::2], evidences[1::2]]
    return [evidences]


def sections(path: tuple[tuple[str, str, str], ...]) -> set[tuple[tuple[str, str, str], ...]]:
    """Returns all sections of a path that have at least two triples."""
    return {
        path[start:stop] for start in range(len(path)) for stop in range(start + 2, len(path) + 1)
    }


def test_demo_splits_share_no_chain(dataset: Dataset) -> None:
    whole = {s: {p for q in of_split(dataset, s) for p in paths(q)} for s in SPLITS}
    pieces = {s: {r for path in whole[s] for r in sections(path)} for s in SPLITS}
    for one in SPLITS:
        for other in SPLITS:
            if one != other:
                assert not whole[one] & pieces[other]


def test_demo_splits_start_from_disjoint_entities(dataset: Dataset) -> None:
    starts = {}
    for split in SPLITS:
        starts[split] = {
            (question.supporting or ())[at]
            for question in of_split(dataset, split)
            for at in range(1 if question.type == "bridge" else 2)
        }
    assert not starts["train"] & starts["dev"]
    assert not starts["train"] & starts["test"]
    assert not starts["dev"] & starts["test"]


def test_demo_unseen_relations_are_not_in_training_questions(dataset: Dataset) -> None:
    learnt = {fact for q in of_split(dataset, "train") for fact in q.evidences or ()}
    assert {q.fold for q in of_split(dataset, "train")} == {None}
    for split, least in (("dev", 80), ("test", 130)):
        folds = collections.Counter(question.fold for question in of_split(dataset, split))
        assert set(folds) == {"seen", "unseen"} and folds["unseen"] >= least
        for question in of_split(dataset, split):
            asked = set(question.evidences or ())
            assert (question.fold == "unseen") == (not asked & learnt)


SPLITS = ("train", "dev", "test")


def test_demo_has_the_pinned_hash(dataset: Dataset) -> None:
    assert fingerprint(dataset) == FINGERPRINT, (
        "The built-in dataset changed. If this was intended, set FINGERPRINT to the new value and "
        "bring docs/demo_dataset.md up to date."
    )


def test_typed_triples_equal_the_triples_of_the_passages(dataset: Dataset) -> None:
    stated = [triple for triples in dataset.triples.values() for triple in triples]
    typed = list(demo.typed_triples())
    assert [t.triple for t in typed] == stated
    entities = demo.entities()
    for one in typed:
        entity = entities[one.head]
        assert one.type.partition(".")[0] == entity.kind and one.triple.head == entity.name
        assert one.target is None or entities[one.target].triples
        if one.target is not None:
            name = entities[one.target].name
            assert name.casefold() in one.triple.tail.casefold() or one.triple.tail in name
    assert sum(one.target is not None for one in typed) > 5000


def test_entities_passages_use_the_spoken_name(dataset: Dataset) -> None:
    entities = demo.entities().values()
    assert [e.triples[0].triple.passage_id for e in entities] == list(dataset.corpus)
    for entity in entities:
        assert entity.spoken_name in (entity.name, f"the {entity.name}")
    assert demo.entities()["country:NL"].spoken_name == "the Netherlands"


def test_entities_that_start_questions_are_marked(dataset: Dataset) -> None:
    by_passage = {e.triples[0].triple.passage_id: e for e in demo.entities().values()}
    for question in dataset.questions:
        assert question.supporting
        assert by_passage[question.supporting[0]].starts_questions
    assert not all(entity.starts_questions for entity in by_passage.values())


def test_notice_lists_every_source_with_its_version() -> None:
    notice = " ".join((demo.FOLDER / "NOTICE").read_text("utf-8").split())
    assert [n for n, version in requirements().items() if f"{n} {version}" not in notice] == []
    assert (demo.FOLDER / "LGPL-2.1.txt").is_file()


def test_demo_command_writes_a_readable_folder(
    dataset: Dataset, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--out={tmp_path / 'data'}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["passages"] == len(dataset.corpus)
    again = read_dataset(tmp_path / "data")
    assert again.questions == dataset.questions
    assert dict(again.corpus) == dict(dataset.corpus)
    assert dict(again.triples) == dict(dataset.triples)
