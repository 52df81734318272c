"""The dataset builders, on tiny invented files in the official formats."""

import csv
import io
import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import zipfile

import grain
import pytest

from cirag_jax.datasets.benchmarks import BENCHMARKS, data_source, prepare_builder, to_dataset
from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.evaluation.answers import golds_of

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
CONFIGS = [(name, config) for name, benchmark in BENCHMARKS.items() for config in benchmark.FILES]
# Configs whose questions have their passages in the records.
WITH_PASSAGES = [pair for pair in CONFIGS if pair[1] not in BENCHMARKS[pair[0]].CORPORA]


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Builds each config only once."""
    built = {}

    def build_one(name, config):
        if (name, config) not in built:
            data_dir = tmp_path_factory.mktemp("tfds")
            built[name, config] = prepare_builder(
                BENCHMARKS[name], config, data_dir, FIXTURES / name
            )
        return built[name, config]

    return build_one


def official(name, file_name, split=None):
    text = (FIXTURES / name / file_name).read_text(encoding="utf-8")
    if file_name.endswith(".qa.csv"):
        rows = csv.reader(io.StringIO(text), delimiter="\t")
        return [{"question": question, "answers": answers} for question, answers in rows]
    if delimiter := {".csv": ",", ".tsv": "\t"}.get(file_name[-4:]):
        return list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    if file_name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    if name.startswith("dpr"):  # Other fields, such as negative passages, are not stored.
        context = ("title", "text", "passage_id", "psg_id")
        return [
            {
                "question": row["question"],
                "answers": row["answers"],
                "positive_ctxs": [
                    {k: v for k, v in gold.items() if k in context} for gold in row["positive_ctxs"]
                ],
            }
            for row in value
        ]
    return [{"id": key, **row} for key, row in value[split].items()] if split else value


def same(decoded, expected):
    """Returns whether a decoded record equals the official one; absent fields must be None."""
    if isinstance(decoded, dict):
        return expected.keys() <= decoded.keys() and all(
            same(value, expected.get(key)) for key, value in decoded.items()
        )
    if isinstance(decoded, list):
        return len(decoded) == len(expected) and all(map(same, decoded, expected))
    # The decomposition ids are numbers in some official files and strings in others.
    return decoded == expected or (decoded is not None and decoded == str(expected))


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_source_has_every_official_field_in_order(build, name, config):
    builder = build(name, config)
    files = builder.FILES[config]
    assert list(builder.info.splits) == list(files)
    for split, file in files.items():
        expected = official(name, file.name, file.split)
        source = data_source(builder, split)
        assert len(source) == len(expected)
        for index, record in enumerate(expected):
            assert same(source[index], record), (split, source[index], record)


def test_source_hidden_fields_of_test_splits_are_none(build):
    record = data_source(build("musique", "ans"), "test")[0]
    assert record["answer"] is record["answerable"] is record["question_decomposition"] is None
    assert record["paragraphs"][0]["is_supporting"] is None


def test_convert_empty_annotations_are_unknown():
    """HotpotQA and 2Wiki write empty lists where the annotations of a split are hidden."""
    row = {
        "_id": "q", "question": "Who?", "answer": "Ada", "type": "comparison",
        "context": [["Ada", ["Ada wrote."]]], "supporting_facts": [], "evidences": [],
    }  # fmt: skip
    for name in ("two_wiki", "hotpotqa"):
        benchmark = BENCHMARKS[name]
        question, _ = benchmark.convert(convert("f", row, benchmark.Record), "test", "distractor")
        assert question.supporting is question.supporting_sentences is question.evidences is None
        assert question.context


def test_builder_writes_array_record_files(build):
    builder = build("two_wiki", "default")
    files = list(pathlib.Path(builder.data_dir).glob("*.array_record*"))
    assert len(files) == 3


def test_source_supports_random_access_by_grain(build):
    source = data_source(build("musique", "full"), "dev")
    assert [r["answerable"] for r in grain.MapDataset.source(source)] == [True, False]
    shuffled = grain.MapDataset.source(source).seed(0).shuffle().repeat(2)
    assert sorted(r["answerable"] for r in shuffled) == [False, False, True, True]
    assert pickle.loads(pickle.dumps(source))[1]["question"] == source[1]["question"]


def test_source_absent_split_is_named(build):
    with pytest.raises(UserError, match="no split 'test'; built: train, dev"):
        data_source(build("hotpotqa", "distractor"), "test")


def test_benchmarks_never_import_tensorflow(tmp_path):
    code = f"""
import sys
from cirag_jax.datasets.benchmarks import BENCHMARKS, data_source, prepare_builder, to_dataset
import grain
builder = prepare_builder(BENCHMARKS["hotpotqa"], "fullwiki", {str(tmp_path)!r},
                          {str(FIXTURES / "hotpotqa")!r})
assert len(list(grain.MapDataset.source(data_source(builder, "train")))) == 2
assert len(to_dataset(builder).questions) == 4
print([name for name in sys.modules if name.split(".")[0] == "tensorflow"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(("name", "config"), WITH_PASSAGES)
def test_to_dataset_corpus_has_every_passage_id(build, name, config):
    dataset = to_dataset(build(name, config))
    for question in dataset.questions:
        steps = [step.supporting for step in question.decomposition or () if step.supporting]
        ids = {*(question.context or ()), *(question.supporting or ()), *steps}
        assert ids <= dataset.corpus.keys()
        if question.context is not None:
            assert set(question.supporting or ()) <= set(question.context)
        for passage_id, sentence in question.supporting_sentences or ():
            assert (dataset.corpus[passage_id].sentences or ())[sentence]


def titles(dataset, ids):
    return [dataset.corpus[passage_id].title for passage_id in ids]


def test_to_dataset_hotpotqa_distractor(build):
    dataset = to_dataset(build("hotpotqa", "distractor"))
    assert len(dataset.corpus) == 6  # three of them shared by questions
    author, both, people = dataset.questions
    assert author.supporting and both.supporting
    assert titles(dataset, author.context) == [
        "The Glass Lantern",
        "Tómas Brel",
        "Orla Venn",
        "Hask",
    ]
    assert titles(dataset, author.supporting) == ["The Glass Lantern", "Orla Venn"]
    assert author.supporting_sentences == ((author.supporting[0], 0), (author.supporting[1], 1))
    lantern = dataset.corpus[author.supporting[0]]
    assert lantern.sentences
    assert lantern.sentences == (
        "The Glass Lantern is a 1961 novel by Orla Venn.",
        "It is set in Port Saffron.",
        "The book won no prize.",
    )
    assert lantern.text == " ".join(lantern.sentences)
    assert (both.answers, both.type, both.hops, both.split) == (("no",), "comparison", 2, "train")
    # The third supporting fact is out of range.
    assert both.supporting_sentences == ((both.supporting[0], 0), (both.supporting[1], 0))
    assert (people.split, people.setting) == ("dev", "distractor")


def test_to_dataset_hotpotqa_fullwiki_incomplete_gold_is_none(build):
    *_, dev, test = to_dataset(build("hotpotqa", "fullwiki")).questions
    assert (dev.id, dev.answers, dev.setting) == ("h3", ("90",), "fullwiki")
    assert dev.supporting is dev.supporting_sentences is None
    assert (test.id, test.answers, test.type) == ("h4", (), None)


def test_to_dataset_two_wiki(build):
    train, dev, test = (dataset := to_dataset(build("two_wiki", "default"))).questions
    assert [question.hops for question in (train, dev, test)] == [4, 2, 2]
    assert dev.evidences == (
        ("Dune Harvest", "director", "Pavel Odin"),
        ("Pavel Odin", "mother", "Lida Odin"),
    )
    assert titles(dataset, dev.supporting) == ["Dune Harvest", "Lida Odin"]
    assert test.evidences is test.supporting is None
    assert test.answers == ()


ALIASES = [
    {"Q_id": "Q2", "aliases": ["Earlier name"], "demonyms": []},
    {"Q_id": "Q1", "aliases": ["Lidia Odin", "Lida Odin", "L. Odin"], "demonyms": ["Odinian"]},
    {"Q_id": "Q2", "aliases": ["Dune"]},  # of two lines, the official scorer uses the last
    {"Q_id": "Q9", "aliases": ["Nobody"], "demonyms": []},
]


@pytest.mark.parametrize("archived", [False, True])
def test_to_dataset_two_wiki_aliases_beside_the_questions_are_answers(tmp_path, archived):
    folder = tmp_path / "manual"
    shutil.copytree(FIXTURES / "two_wiki", folder)
    (row,) = json.loads((folder / "dev.json").read_text("utf-8"))
    (folder / "dev.json").write_text(json.dumps([{**row, "answer_id": "Q1"}]), "utf-8")
    (folder / "id_aliases.json").write_text("\n".join(map(json.dumps, ALIASES)), "utf-8")
    if archived:
        with zipfile.ZipFile(tmp_path / "data_ids_april7.zip", "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, f"data/{file.name}")
        shutil.rmtree(folder)
        folder.mkdir()
        (tmp_path / "data_ids_april7.zip").rename(folder / "data_ids_april7.zip")
    builder = prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", folder)
    train, dev, test = to_dataset(builder).questions
    assert dev.answers == ("Lida Odin", "Lidia Odin", "L. Odin", "Odinian")
    assert dev.aliases == dev.answers[1:]
    assert (train.aliases, test.aliases) == (("Dune",), None)
    assert golds_of(dev, "two_wiki") == dev.answers and golds_of(dev, "kirag") == ("Lida Odin",)


@pytest.mark.parametrize(
    ("line", "field"),
    [('{"Q_id": 2}', "Q_id"), ('{"aliases": []}', "Q_id"),
     ('{"Q_id": "Q2", "demonyms": "Odinian"}', "demonyms")],
)  # fmt: skip
def test_builder_two_wiki_damaged_alias_is_named(tmp_path, line, field):
    folder = tmp_path / "manual"
    shutil.copytree(FIXTURES / "two_wiki", folder)
    (folder / "id_aliases.json").write_text(f'{{"Q_id": "Q1"}}\n{line}\n', "utf-8")
    with pytest.raises(UserError, match=rf"id_aliases.json:2.*{field}"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", folder)


def test_to_dataset_musique_ans(build):
    train, dev, test = (dataset := to_dataset(build("musique", "ans"))).questions
    assert (train.type, train.hops, train.answers) == ("3hop1", 3, ("Tarn", "Tarn town"))
    assert (train.aliases, dev.aliases) == (("Tarn town",), None)
    assert train.supporting and train.decomposition and train.context
    assert titles(dataset, train.supporting) == ["Skerry Light", "Brum Island", "Osk"]
    # Two passages share a title, so the gold one is identified by its paragraph.
    assert "county" in dataset.corpus[train.supporting[1]].text
    assert [step.supporting for step in train.decomposition] == list(train.supporting)
    assert dataset.corpus[train.context[0]].sentences is None
    assert dev.split == "dev"
    assert (test.supporting, test.decomposition, test.setting) == (None, None, None)


def test_to_dataset_musique_full_keeps_both_twins(build):
    dataset = to_dataset(build("musique", "full"))
    answerable, twin = (q for q in dataset.questions if q.split == "dev")
    assert [answerable.id, twin.id] == ["2hop__12_13", "2hop__12_13__2"]
    assert [answerable.setting, twin.setting] == ["answerable", "unanswerable"]
    assert twin.decomposition and twin.supporting
    assert twin.decomposition[1].supporting is None
    assert len(twin.supporting) == 1


def question_fields(dataset):
    """Returns the id, answers, type, hops and split of each question."""
    return [(q.id, q.answers, q.type, q.hops, q.split) for q in dataset.questions]


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "bamboogle",
            "default",
            [
                ("test_0", ("Ada Moen",), None, 2, "test"),
                ("test_1", ('"Salt, then bread"',), None, 2, "test"),
            ],
        ),
        (
            "web_questions",
            "default",
            [
                ("train_0", ("Old Oskan", "Brumish"), None, None, "train"),
                ("test_0", ('Songs "of" Salt (Deluxe)', "1961"), None, None, "test"),
                ("test_1", (), None, None, "test"),
            ],
        ),
        (
            "nq_open",
            "default",
            [
                ("train_0", ("1871",), None, None, "train"),
                ("dev_0", ("Tarn", "Tarn town"), None, None, "dev"),
                ("dev_1", ("Ivo Brel",), None, None, "dev"),
            ],
        ),
        (
            "popqa",
            "default",
            [
                ("71", ("mayor", "town mayor"), "occupation", 1, "test"),
                ("72", ("Tómas Harbour",), "capital", 1, "test"),
            ],
        ),
        (
            "asqa",
            "short",
            [
                ("-11", ("1803", "1871", "in 1871"), None, None, "train"),
                ("12", ("Orla Venn", "Ivo Brel"), None, None, "dev"),
            ],
        ),
        (
            "eli5",
            "default",
            [
                ("a1", ("So that sailors can tell one from another.",), None, None, "train"),
                (
                    "a2",
                    ("It takes the water that germs need.", "Germs dry out in salt."),
                    *(None, None, "dev"),
                ),
            ],
        ),
    ],
)
def test_to_dataset_benchmarks_without_passages(build, caplog, name, config, expected):
    dataset = to_dataset(build(name, config))
    assert question_fields(dataset) == expected
    assert dataset.corpus == {} and not caplog.records  # No warning about gold passages.
    assert all(q.supporting is q.context is None for q in dataset.questions)


def test_to_dataset_asqa_has_long_answers(build):
    train, dev = to_dataset(build("asqa", "long")).questions
    assert (train.question, train.setting) == ("When was Skerry Light opened?", "long")
    assert [len(q.answers) for q in (train, dev)] == [1, 2]
    assert dev.answers[0] == "Orla Venn wrote the novel, Ivo Brel the song."


def test_to_dataset_multihop_rag_names_its_articles(build):
    dataset = to_dataset(build("multihop_rag", "default"))
    assert question_fields(dataset) == [
        ("test_0", ("Ada Moen",), "inference_query", 3, "test"),
        ("test_1", ("Insufficient information.",), "null_query", None, "test"),
    ]
    sold, nothing = dataset.questions
    assert sold.supporting == ("https://news.example/1", "https://news.example/2")
    assert (nothing.supporting, nothing.context) == ((), None)
    assert titles(dataset, dataset.corpus)[2] == "Salt prices fall"  # No question needs it.
    text = dataset.corpus["https://news.example/1"].text
    assert text.startswith("The Osk Herald, 2023-10-02. Osk sold Skerry Light on Monday.\n")


def test_to_dataset_multihop_rag_without_articles_has_no_gold(tmp_path, caplog):
    folder = build_broken(tmp_path, "multihop_rag", "MultiHopRAG.json", lambda rows: None)
    (folder / "corpus.json").unlink()
    builder = prepare_builder(BENCHMARKS["multihop_rag"], "default", tmp_path / "tfds", folder)
    dataset = to_dataset(builder)
    assert "corpus.json is not in" in caplog.text
    assert [question.supporting for question in dataset.questions] == [None, ()]
    assert dataset.corpus == {}


def build_broken(tmp_path, name, file_name, change):
    """Copies the fixtures; ``change`` edits the records of one file."""
    folder = tmp_path / "manual"
    shutil.copytree(FIXTURES / name, folder)
    rows = official(name, file_name)
    change(rows)
    lines = file_name.endswith(".jsonl")
    text = "".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows)
    (folder / file_name).write_text(text)
    return folder


DEV, MUSIQUE_DEV = "hotpot_dev_distractor_v1.json", "musique_full_v1.0_dev.jsonl"


@pytest.mark.parametrize(
    ("name", "file_name", "change", "problem"),
    [
        (
            "hotpotqa",
            DEV,
            lambda r: r[0].pop("context"),
            ": question 1: field 'context' is missing",
        ),
        (
            "hotpotqa",
            DEV,
            lambda r: r[0]["context"][1].pop(),
            ": question 1: field 'context[1]' must be a pair",
        ),
        (
            "hotpotqa",
            DEV,
            lambda r: r[0].update(supporting_facts=[["Hask", "0"]]),
            ": question 1: field 'supporting_facts[0][1]' must be an integer, not a string",
        ),
        (
            "musique",
            MUSIQUE_DEV,
            lambda r: r[1]["paragraphs"][2].pop("title"),
            ":2: field 'paragraphs[2].title' is missing",
        ),
        (
            "musique",
            MUSIQUE_DEV,
            lambda r: r[1]["question_decomposition"][0].update(paragraph_support_idx=8),
            ":2: field 'question_decomposition[0].paragraph_support_idx' names paragraph 8",
        ),
        (
            "musique",
            MUSIQUE_DEV,
            lambda r: r[0]["paragraphs"][1].update(idx=r[0]["paragraphs"][0]["idx"]),
            ":1: field 'paragraphs[1].idx' repeats the number 0 of an earlier paragraph",
        ),
        ("musique", MUSIQUE_DEV, lambda r: r.clear(), " is empty"),
        ("hotpotqa", DEV, lambda r: r.clear(), " has no questions; place the complete file"),
        (
            "hotpotqa",
            DEV,
            lambda r: r[0]["context"][1][1].append("half \ud800"),
            ": question 1: field 'context[1][1][2]' contains half of a surrogate pair ('half",
        ),
        (
            "hotpotqa",
            DEV,
            lambda r: r[0].update({"\udc00": 1}),
            ": question 1: contains half of a surrogate pair ('\\udc00'); replace it",
        ),
        (
            "musique",
            MUSIQUE_DEV,
            lambda r: r[1].update(question="\ud800?"),
            ":2: field 'question' contains half of a surrogate pair",
        ),
    ],
)
def test_builder_malformed_record_is_named(tmp_path, name, file_name, change, problem):
    folder = build_broken(tmp_path, name, file_name, change)
    config = "full" if name == "musique" else "distractor"
    with pytest.raises(UserError) as error:
        prepare_builder(BENCHMARKS[name], config, tmp_path / "tfds", folder)
    assert f"{folder / file_name}{problem}" in str(error.value)
    assert "\n" not in str(error.value)


SHEET, WEB, ASQA = (
    "Bamboogle Prerelease - Sheet1.csv",
    "webquestions.examples.test.json",
    "ASQA.json",
)


@pytest.mark.parametrize(
    ("name", "file_name", "old", "new", "problem"),
    [
        (
            "bamboogle",
            SHEET,
            "Question,Answer",
            "Question",
            ":2: has 2 fields, but the header has 1.",
        ),
        ("bamboogle", SHEET, "Answer", "Reply", ":2: field 'Answer' is missing."),
        ("bamboogle", SHEET, ",Ada Moen", "", ":2: field 'Answer' is missing."),
        ("bamboogle", SHEET, '1901?"', "1901?", ":3: invalid table row ("),
        ("bamboogle", SHEET, 'bread"""', "bread", ":3: invalid table row (unexpected end"),
        ("popqa", "popQA.tsv", "\t[]\t[]", "", ":3: field 'question' is missing."),
        (
            *("popqa", "popQA.tsv", '"[""Tómas Harbour""]"', "Tómas Harbour"),
            ":3: field 'possible_answers' must be a JSON list of strings.",
        ),
        (
            *("web_questions", WEB, "(description 1961)", "(name 1961)"),
            ": question 1: field 'targetValue' must be like (list (description",
        ),
        (
            *("web_questions", WEB, '"(list)"', '"(list (description \\"Ada))"'),
            ": question 2: field 'targetValue' must be like (list (description",
        ),
        ("asqa", ASQA, '"dev"', '"test"', ": field 'dev' must be an object of questions by id."),
        (
            *("asqa", ASQA, '"in 1871"', "1871"),
            ": question '-11' of train: field 'qa_pairs[1].short_answers[1]' must be a string",
        ),
        ("asqa", ASQA, '"in 1871"', '"in', " is invalid or truncated JSON (Invalid control"),
        ("eli5", "eli5-dev-kilt.jsonl", '"input"', '"question"', ":1: field 'input' is missing."),
        (
            *("multihop_rag", "MultiHopRAG.json", '"https://news.example/1"', '"https://x/1"'),
            ": question 1: field 'evidence_list[0].url' names article 'https://x/1', which "
            "corpus.json does not have.",
        ),
        (
            *("multihop_rag", "corpus.json", '"body": "Salt', '"text": "Salt'),
            ": article 3: field 'body' is missing.",
        ),
        (
            *("multihop_rag", "corpus.json", '"title": "', r'"title": "\ud800'),
            ": article 1: field 'title' contains half of a surrogate pair",
        ),
        (
            *("asqa", ASQA, '"in 1871"', r'"\udfff"'),
            ": question '-11' of train: field 'qa_pairs[1].short_answers[1]' contains half of a",
        ),
    ],
)
def test_builder_malformed_table_or_list_is_named(tmp_path, name, file_name, old, new, problem):
    folder = tmp_path / "manual"
    shutil.copytree(FIXTURES / name, folder)
    text = (folder / file_name).read_text("utf-8")
    assert old in text
    (folder / file_name).write_text(text.replace(old, new), "utf-8")
    benchmark = BENCHMARKS[name]
    with pytest.raises(UserError) as error:
        prepare_builder(benchmark, next(iter(benchmark.FILES)), tmp_path / "tfds", folder)
    assert f"{folder / file_name}{problem}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "file_name", "content", "problem"),
    [
        ("hotpotqa", DEV, "[ ]\n", " has no questions"),
        ("two_wiki", "train.json", "[,]", " has no questions"),
        ("multihop_rag", "corpus.json", "[]", " has no articles"),
        ("asqa", ASQA, '{"train": {}, "dev": {}}', " has no questions"),
        ("eli5", "eli5-dev-kilt.jsonl", "\n \n", " is empty"),
        ("bamboogle", SHEET, "Question,Answer\n", " is empty"),
        ("web_questions", WEB, "[]", " has no questions"),
    ],
)
def test_builder_file_without_records_is_named(tmp_path, name, file_name, content, problem):
    folder = tmp_path / "manual"
    shutil.copytree(FIXTURES / name, folder)
    (folder / file_name).write_text(content, "utf-8")
    benchmark = BENCHMARKS[name]
    with pytest.raises(UserError) as error:
        prepare_builder(benchmark, next(iter(benchmark.FILES)), tmp_path / "tfds", folder)
    assert f"{folder / file_name}{problem}" in str(error.value)


def test_to_dataset_repeated_passage_is_in_the_context_once(tmp_path):
    def repeat(rows):
        rows[0]["context"].append(rows[0]["context"][0])

    folder = build_broken(tmp_path, "hotpotqa", DEV, repeat)
    builder = prepare_builder(BENCHMARKS["hotpotqa"], "distractor", tmp_path / "tfds", folder)
    for question in to_dataset(builder).questions:
        assert len(set(question.context)) == len(question.context)


def test_to_dataset_repeated_article_id_is_refused(tmp_path):
    folder = build_broken(
        tmp_path, "multihop_rag", "corpus.json", lambda rows: rows[2].update(url=rows[0]["url"])
    )
    builder = prepare_builder(BENCHMARKS["multihop_rag"], "default", tmp_path / "tfds", folder)
    with pytest.raises(UserError, match="two articles have id 'https://news.example/1'"):
        to_dataset(builder)


@pytest.mark.parametrize(
    ("name", "config", "file_name", "key"),
    [
        ("hotpotqa", "distractor", DEV, "_id"),
        ("two_wiki", "default", "dev.json", "_id"),
        ("musique", "ans", "musique_ans_v1.0_dev.jsonl", "id"),
    ],
)
def test_to_dataset_keeps_the_official_order(tmp_path, name, config, file_name, key):
    def repeat(rows):
        rows[:] = [{**rows[0], key: f"2hop__{i}"} for i in range(12)]

    folder = build_broken(tmp_path, name, file_name, repeat)
    builder = prepare_builder(BENCHMARKS[name], config, tmp_path / "tfds", folder)
    source = data_source(builder, "dev")
    assert [source[i][key] for i in range(len(source))] == [f"2hop__{i}" for i in range(12)]


def test_to_dataset_repeated_question_id_is_refused(tmp_path):
    folder = build_broken(tmp_path, "two_wiki", "train.json", lambda rows: rows.append(rows[0]))
    builder = prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", folder)
    with pytest.raises(UserError, match="two questions have id 'w1'"):
        to_dataset(builder)


def test_prepare_builder_bad_arguments_are_named(tmp_path):
    with pytest.raises(UserError, match="no config 'open'; known: distractor, fullwiki"):
        prepare_builder(BENCHMARKS["hotpotqa"], "open", tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        prepare_builder(BENCHMARKS["hotpotqa"], "fullwiki", tmp_path, tmp_path / "nowhere")


# ------------------------------------------------------------------------- files of other versions


def _hotpot(lacking=0, count=4, **more):
    context = [["T", ["a"]], ["U", ["b"]]]
    return [
        {
            "_id": str(i),
            "question": "q?",
            "answer": "a",
            "context": context[: 1 if i < lacking else 2],
            "supporting_facts": [["T", 0], ["U", 0]],
            **more,
        }
        for i in range(count)
    ]


def _musique(unanswerable, count=4):
    paragraph = {"idx": 0, "title": "T", "paragraph_text": "x", "is_supporting": True}
    return [
        {
            "id": f"2hop__{i}",
            "question": "q?",
            "paragraphs": [paragraph],
            "answer": "a",
            "answerable": i >= unanswerable,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "config", "file", "rows", "message"),
    [
        ("two_wiki", "default", "dev.json", _hotpot(), "4 of 4 questions have no evidences: this"),
        (
            "hotpotqa",
            "distractor",
            "hotpot_dev_distractor_v1.json",
            _hotpot(evidences=[["T", "r", "U"]]),
            "4 of 4 questions have the field evidences, which HotpotQA lacks",
        ),
        (
            "hotpotqa",
            "distractor",
            "hotpot_dev_distractor_v1.json",
            _hotpot(lacking=3),
            "3 of 4 questions lack a gold paragraph in their context: this is a file of the fullw",
        ),
        (
            "musique",
            "ans",
            "musique_ans_v1.0_dev.jsonl",
            _musique(2),
            r"2 of 4 questions are unanswerable: this is a file of MuSiQue-Full \(--config=full",
        ),
    ],
)
def test_prepare_file_of_another_version_is_refused_with_counts(
    name, config, file, rows, message, tmp_path
):
    lines = "\n".join(map(json.dumps, rows)) if file.endswith("l") else json.dumps(rows)
    (tmp_path / file).write_text(lines)
    with pytest.raises(UserError, match=message) as error:
        prepare_builder(BENCHMARKS[name], config, tmp_path / "tfds", tmp_path)
    assert str(tmp_path / file) in str(error.value)


def test_prepare_few_questions_without_gold_paragraph_are_only_counted(tmp_path, caplog):
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(_hotpot(lacking=1, count=9)))
    builder = prepare_builder(BENCHMARKS["hotpotqa"], "distractor", tmp_path / "tfds", tmp_path)
    questions = to_dataset(builder).questions
    assert [q.supporting is None for q in questions] == [True] + 8 * [False]
