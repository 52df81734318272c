"""The builders on tiny files in the official formats, all of whose content is invented."""

import csv
import hashlib
import http.server
import io
import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile

import grain
import pytest

from cirag_jax.datasets.benchmarks import BENCHMARKS, data_source, prepare_builder, to_dataset
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile, find_files
from cirag_jax.errors import UserError

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
CONFIGS = [(name, config) for name, benchmark in BENCHMARKS.items() for config in benchmark.FILES]


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Builds each config once."""
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
    if delimiter := {".csv": ",", ".tsv": "\t"}.get(file_name[-4:]):
        return list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    if file_name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    return [{"id": key, **row} for key, row in value[split].items()] if split else value


def same(decoded, expected):
    """Whether the decoded record is the official one; what that lacks must be None."""
    if isinstance(decoded, dict):
        return expected.keys() <= decoded.keys() and all(
            same(value, expected.get(key)) for key, value in decoded.items()
        )
    if isinstance(decoded, list):
        return len(decoded) == len(expected) and all(map(same, decoded, expected))
    # The decomposition ids are numbers in some official files and strings in others.
    return decoded == expected or (decoded is not None and decoded == str(expected))


# ------------------------------------------------------------------------------------- the records


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_every_official_field_is_read_back_in_order(build, name, config):
    builder = build(name, config)
    files = builder.FILES[config]
    assert list(builder.info.splits) == list(files)
    for split, file in files.items():
        expected = official(name, file.name, file.split)
        source = data_source(builder, split)
        assert len(source) == len(expected)
        for index, record in enumerate(expected):
            assert same(source[index], record), (split, source[index], record)


def test_a_split_hides_what_it_hides(build):
    record = data_source(build("musique", "ans"), "test")[0]
    assert record["answer"] is record["answerable"] is record["question_decomposition"] is None
    assert record["paragraphs"][0]["is_supporting"] is None


def test_records_lie_in_array_record_files(build):
    builder = build("two_wiki", "default")
    files = list(pathlib.Path(builder.data_dir).glob("*.array_record*"))
    assert len(files) == 3


def test_grain_reads_the_source_at_random(build):
    source = data_source(build("musique", "full"), "dev")
    assert [r["answerable"] for r in grain.MapDataset.source(source)] == [True, False]
    shuffled = grain.MapDataset.source(source).seed(0).shuffle().repeat(2)
    assert sorted(r["answerable"] for r in shuffled) == [False, False, True, True]
    assert pickle.loads(pickle.dumps(source))[1]["question"] == source[1]["question"]


def test_an_absent_split_is_named(build):
    with pytest.raises(UserError, match="no split 'test'; built: train, dev"):
        data_source(build("hotpotqa", "distractor"), "test")


def test_tensorflow_is_never_imported(tmp_path):
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


# ---------------------------------------------------------------------------------- the conversion


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_every_passage_id_is_in_the_corpus(build, name, config):
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


def test_hotpotqa_distractor(build):
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


def test_hotpotqa_fullwiki_does_not_know_gold_passages_that_were_not_retrieved(build):
    dataset = to_dataset(build("hotpotqa", "fullwiki"), ["dev", "test"])
    dev, test = dataset.questions
    assert (dev.id, dev.answers, dev.setting) == ("h3", ("90",), "fullwiki")
    assert dev.supporting is dev.supporting_sentences is None
    assert (test.id, test.answers, test.type) == ("h4", (), None)


def test_two_wiki(build):
    train, dev, test = (dataset := to_dataset(build("two_wiki", "default"))).questions
    assert [question.hops for question in (train, dev, test)] == [4, 2, 2]
    assert dev.evidences == (
        ("Dune Harvest", "director", "Pavel Odin"),
        ("Pavel Odin", "mother", "Lida Odin"),
    )
    assert titles(dataset, dev.supporting) == ["Dune Harvest", "Lida Odin"]
    assert test.evidences is test.supporting is None
    assert test.answers == ()


def test_musique_ans(build):
    train, dev, test = (dataset := to_dataset(build("musique", "ans"))).questions
    assert (train.type, train.hops, train.answers) == ("3hop1", 3, ("Tarn", "Tarn town"))
    assert train.supporting and train.decomposition and train.context
    assert titles(dataset, train.supporting) == ["Skerry Light", "Brum Island", "Osk"]
    # Two passages share a title: the paragraph, not the title, says which one is gold.
    assert "county" in dataset.corpus[train.supporting[1]].text
    assert [step.supporting for step in train.decomposition] == list(train.supporting)
    assert dataset.corpus[train.context[0]].sentences is None
    assert dev.split == "dev"
    assert (test.supporting, test.decomposition, test.setting) == (None, None, None)


def test_musique_full_keeps_both_twins(build):
    dataset = to_dataset(build("musique", "full"), ["dev"])
    answerable, twin = dataset.questions
    assert [answerable.id, twin.id] == ["2hop__12_13", "2hop__12_13__2"]
    assert [answerable.setting, twin.setting] == ["answerable", "unanswerable"]
    assert twin.decomposition and twin.supporting
    assert twin.decomposition[1].supporting is None
    assert len(twin.supporting) == 1


def told(dataset):
    """Ids, answers, types, hops and splits of the questions."""
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
def test_questions_and_answers_only(build, caplog, name, config, expected):
    dataset = to_dataset(build(name, config))
    assert told(dataset) == expected
    assert dataset.corpus == {} and not caplog.records  # no gold passage is missed
    assert all(q.supporting is q.context is None for q in dataset.questions)


def test_asqa_has_long_answers(build):
    train, dev = to_dataset(build("asqa", "long")).questions
    assert (train.question, train.setting) == ("When was Skerry Light opened?", "long")
    assert [len(q.answers) for q in (train, dev)] == [1, 2]
    assert dev.answers[0] == "Orla Venn wrote the novel, Ivo Brel the song."


def test_multihop_rag_names_its_articles(build):
    dataset = to_dataset(build("multihop_rag", "default"))
    assert told(dataset) == [
        ("test_0", ("Ada Moen",), "inference_query", 3, "test"),
        ("test_1", ("Insufficient information.",), "null_query", None, "test"),
    ]
    sold, nothing = dataset.questions
    assert sold.supporting == ("https://news.example/1", "https://news.example/2")
    assert (nothing.supporting, nothing.context) == ((), None)
    assert titles(dataset, dataset.corpus)[2] == "Salt prices fall"  # no question is about it
    text = dataset.corpus["https://news.example/1"].text
    assert text.startswith("The Osk Herald, 2023-10-02. Osk sold Skerry Light on Monday.\n")
    assert to_dataset(build("multihop_rag", "default"), ["test"]) == dataset


def test_multihop_rag_without_its_articles_knows_no_gold_passage(tmp_path, caplog):
    folder = broken(tmp_path, "multihop_rag", "MultiHopRAG.json", lambda rows: None)
    (folder / "corpus.json").unlink()
    builder = prepare_builder(BENCHMARKS["multihop_rag"], "default", tmp_path / "tfds", folder)
    dataset = to_dataset(builder)
    assert "corpus.json is not in" in caplog.text
    assert [question.supporting for question in dataset.questions] == [None, ()]
    assert dataset.corpus == {}


# ------------------------------------------------------------------------------------ bad input


def broken(tmp_path, name, file_name, change):
    """A copy of the fixtures in which ``change`` edits the records of one file."""
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
    ],
)
def test_a_malformed_record_is_named(tmp_path, name, file_name, change, problem):
    folder = broken(tmp_path, name, file_name, change)
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
        ("bamboogle", SHEET, "Question,Answer", "Question", ":2: has 2 fields, the header 1."),
        ("bamboogle", SHEET, "Answer", "Reply", ":2: field 'Answer' is missing."),
        ("bamboogle", SHEET, ",Ada Moen", "", ":2: field 'Answer' is missing."),
        ("bamboogle", SHEET, '1901?"', "1901?", ":3: is no row of a table ("),
        ("bamboogle", SHEET, 'bread"""', "bread", ":3: is no row of a table (unexpected end"),
        ("popqa", "popQA.tsv", "\t[]\t[]", "", ":3: field 'question' is missing."),
        (
            *("popqa", "popQA.tsv", '"[""Tómas Harbour""]"', "Tómas Harbour"),
            ":3: field 'possible_answers' must be a JSON list of strings.",
        ),
        (
            *("web_questions", WEB, "(description 1961)", "(name 1961)"),
            ": question 1: field 'targetValue' must read (list (description",
        ),
        (
            *("web_questions", WEB, '"(list)"', '"(list (description \\"Ada))"'),
            ": question 2: field 'targetValue' must read (list (description",
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
    ],
)
def test_a_malformed_table_list_or_name_is_named(tmp_path, name, file_name, old, new, problem):
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


def test_two_articles_of_one_address_are_refused(tmp_path):
    folder = broken(
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
def test_the_official_order_is_kept(tmp_path, name, config, file_name, key):
    def repeat(rows):
        rows[:] = [{**rows[0], key: f"2hop__{i}"} for i in range(12)]

    folder = broken(tmp_path, name, file_name, repeat)
    builder = prepare_builder(BENCHMARKS[name], config, tmp_path / "tfds", folder)
    source = data_source(builder, "dev")
    assert [source[i][key] for i in range(len(source))] == [f"2hop__{i}" for i in range(12)]


def test_a_repeated_question_id_is_refused(tmp_path):
    folder = broken(tmp_path, "two_wiki", "train.json", lambda rows: rows.append(rows[0]))
    builder = prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", folder)
    with pytest.raises(UserError, match="two questions have id 'w1'"):
        to_dataset(builder)


def read(path, name="dev.json", *, archived=False):
    return list(FoundFile(OfficialFile(name, "-"), path, archived).records())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "must be a JSON list"),
        (b'{"_id": "x"}', "must be a JSON list"),
        (b'[{"_id": "x"}, {"_id', ": question 2 is invalid or truncated JSON"),
        (b'[{"_id": "x"}', "is truncated"),
        (b'[{"_id": "x"}, 3]', ": question 2: must be a JSON object"),
        (b'[{"_id": "caf\xe9"}]', "is not valid UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, problem):
    path = tmp_path / "dev.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", " is empty."),
        (b"Question,Answer\n\n", " is empty."),
        (b"\xef\xbb\xbfQuestion\nWho?\ncaf\xe9\n", " is not valid UTF-8."),
        (
            b"a\n" + b"x" * 140_000,
            ":2: is no row of a table (field larger than field limit (131072)).",
        ),
    ],
)
def test_a_damaged_table_is_named(tmp_path, content, problem):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, "x.csv")
    assert str(error.value) == f"{path}{problem}"


def test_a_table_may_begin_with_a_mark_and_have_lines_in_its_cells(tmp_path):
    (tmp_path / "x.tsv").write_bytes(b'\xef\xbb\xbfa\tb\r\n1\t"x\r\ny"\r\n\r\n2\tz')
    rows = read(tmp_path / "x.tsv", "x.tsv")
    assert [(place[-2:], row) for place, row in rows] == [
        (":3", {"a": "1", "b": "x\ny"}),
        (":5", {"a": "2", "b": "z"}),
    ]


def test_a_record_may_be_longer_than_what_is_read_at_once(tmp_path):
    rows = [{"_id": str(i), "text": "é" * size} for i, size in enumerate((5, 3 << 20, 1 << 20, 7))]
    (tmp_path / "dev.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert [value for _, value in read(tmp_path / "dev.json")] == rows


def test_an_archive_without_the_file_and_one_that_is_none_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("__MACOSX/dev.json", "[]")
    with pytest.raises(UserError, match=r"a\.zip holds no dev\.json"):
        read(tmp_path / "a.zip", archived=True)
    (tmp_path / "b.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:30])
    with pytest.raises(UserError, match=r"b\.zip is not a complete zip archive"):
        read(tmp_path / "b.zip", archived=True)


def test_an_unknown_config_and_a_missing_manual_dir_are_named(tmp_path):
    with pytest.raises(UserError, match="no config 'open'; known: distractor, fullwiki"):
        prepare_builder(BENCHMARKS["hotpotqa"], "open", tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        prepare_builder(BENCHMARKS["hotpotqa"], "fullwiki", tmp_path, tmp_path / "nowhere")


# ------------------------------------------------------------------------- placed by hand, download


def test_an_archive_in_a_subfolder_and_rebuilding_from_other_files(tmp_path):
    (tmp_path / "manual" / "sub").mkdir(parents=True)
    path = tmp_path / "manual" / "sub" / "data_ids_april7.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for split in ("train", "dev", "test"):
            archive.write(FIXTURES / "two_wiki" / f"{split}.json", f"data_ids/{split}.json")
    benchmark = BENCHMARKS["two_wiki"]
    builder = prepare_builder(benchmark, "default", tmp_path / "tfds", tmp_path / "manual")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "w2", "w3"]
    # A file outside the archive wins over it; the splits without one come from the archive.
    rows = [{**official("two_wiki", "dev.json")[0], "_id": "other"}]
    (tmp_path / "manual" / "dev.json").write_text(json.dumps(rows))
    builder = prepare_builder(benchmark, "default", tmp_path / "tfds", tmp_path / "manual")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "other", "w3"]


def test_a_split_without_a_file_is_left_out(tmp_path, caplog):
    (tmp_path / "manual").mkdir()
    shutil.copy(FIXTURES / "hotpotqa" / DEV, tmp_path / "manual")
    builder = prepare_builder(
        BENCHMARKS["hotpotqa"], "distractor", tmp_path / "tfds", tmp_path / "manual"
    )
    assert list(builder.info.splits) == ["dev"]
    assert "hotpot_train_v1.1.json is not in" in caplog.text
    # What was placed by hand may differ from the official file, and is used with a warning.
    assert "not 4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea" in caplog.text


@pytest.fixture
def server(tmp_path):
    """An HTTP server over ``tmp_path/www``; gives the folder and its address."""
    folder = tmp_path / "www"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def offer(monkeypatch, url, sha256):
    files = {
        split: OfficialFile(f"{split}.json", f"{url}/get?id=1", "data.zip", sha256, "its author")
        for split in ("train", "dev", "test")
    }
    monkeypatch.setattr(BENCHMARKS["two_wiki"], "FILES", {"default": files})


def serve_archive(folder):
    path = folder / "get"  # as from a drive, the address does not say that this is an archive
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "dev", "test"):
            archive.write(FIXTURES / "two_wiki" / f"{split}.json", f"data/{split}.json")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_not_placed_is_downloaded_and_verified(tmp_path, monkeypatch, server):
    folder, url = server
    offer(monkeypatch, url, serve_archive(folder))
    builder = prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "w2", "w3"]


def test_a_download_with_another_checksum_is_refused_and_deleted(tmp_path, monkeypatch, server):
    folder, url = server
    serve_archive(folder)
    offer(monkeypatch, url, "0" * 64)
    with pytest.raises(UserError, match="as its author states for data.zip; the download was dele"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
    # The second attempt asks the server again.
    offer(monkeypatch, url, serve_archive(folder))
    prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")


def test_a_page_instead_of_the_archive_is_refused(tmp_path, monkeypatch, server):
    folder, url = server
    (folder / "get").write_text("<html>Quota exceeded</html>")
    offer(monkeypatch, url, None)
    with pytest.raises(UserError, match="did not give a zip archive; download it by hand"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")


def test_without_network_the_message_says_what_to_place_where(tmp_path, monkeypatch):
    offer(monkeypatch, "http://127.0.0.1:9", None)  # nothing listens there
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", tmp_path / "empty")
    assert "http://127.0.0.1:9/get?id=1 cannot be downloaded" in str(error.value)
    assert f"place data.zip in {tmp_path / 'empty'}" in str(error.value)


def test_an_unreachable_host_is_noticed_before_tfds_retries_for_minutes(tmp_path):
    class Never:
        def download(self, url):
            raise AssertionError(f"asked for {url}")

    files = {"dev": OfficialFile("dev.json", "http://127.0.0.1:9/dev.json")}
    with pytest.raises(UserError, match="cannot be downloaded"):
        find_files(files, Never(), tmp_path)  # pyright: ignore[reportArgumentType]


def test_a_file_that_the_host_does_not_have(tmp_path, monkeypatch, server):
    offer(monkeypatch, server[1], None)
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*404"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
