"""Official files: their formats, files placed by hand, and downloads."""

import hashlib
import http.server
import json
import pathlib
import shutil
import threading
import zipfile

import pytest

from cirag_jax.datasets.benchmarks import BENCHMARKS, prepare_builder, to_dataset
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile, find_files
from cirag_jax.errors import UserError

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


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
def test_records_damaged_file_is_named(tmp_path, content, problem):
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
            ":2: invalid table row (field larger than field limit (131072)).",
        ),
    ],
)
def test_records_damaged_table_is_named(tmp_path, content, problem):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, "x.csv")
    assert str(error.value) == f"{path}{problem}"


def test_records_table_with_byte_order_mark_and_line_breaks(tmp_path):
    (tmp_path / "x.tsv").write_bytes(b'\xef\xbb\xbfa\tb\r\n1\t"x\r\ny"\r\n\r\n2\tz')
    rows = read(tmp_path / "x.tsv", "x.tsv")
    assert [(place[-2:], row) for place, row in rows] == [
        (":3", {"a": "1", "b": "x\ny"}),
        (":5", {"a": "2", "b": "z"}),
    ]


def test_records_longer_than_a_chunk_are_read(tmp_path):
    rows = [{"_id": str(i), "text": "é" * size} for i, size in enumerate((5, 3 << 20, 1 << 20, 7))]
    (tmp_path / "dev.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert [value for _, value in read(tmp_path / "dev.json")] == rows


def test_records_bad_archives_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("__MACOSX/dev.json", "[]")
    with pytest.raises(UserError, match=r"a\.zip does not contain dev\.json"):
        read(tmp_path / "a.zip", archived=True)
    (tmp_path / "b.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:30])
    with pytest.raises(UserError, match=r"b\.zip is not a complete zip archive"):
        read(tmp_path / "b.zip", archived=True)


def test_find_files_archive_in_subfolder_and_rebuild(tmp_path):
    (tmp_path / "manual" / "sub").mkdir(parents=True)
    path = tmp_path / "manual" / "sub" / "data_ids_april7.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for split in ("train", "dev", "test"):
            archive.write(FIXTURES / "two_wiki" / f"{split}.json", f"data_ids/{split}.json")
    benchmark = BENCHMARKS["two_wiki"]
    builder = prepare_builder(benchmark, "default", tmp_path / "tfds", tmp_path / "manual")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "w2", "w3"]
    # A file next to the archive takes precedence; other splits come from the archive.
    (row,) = json.loads((FIXTURES / "two_wiki/dev.json").read_text("utf-8"))
    rows = [{**row, "_id": "other"}]
    (tmp_path / "manual" / "dev.json").write_text(json.dumps(rows))
    builder = prepare_builder(benchmark, "default", tmp_path / "tfds", tmp_path / "manual")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "other", "w3"]


def test_find_files_split_without_file_is_left_out(tmp_path, caplog):
    (tmp_path / "manual").mkdir()
    shutil.copy(FIXTURES / "hotpotqa/hotpot_dev_distractor_v1.json", tmp_path / "manual")
    builder = prepare_builder(
        BENCHMARKS["hotpotqa"], "distractor", tmp_path / "tfds", tmp_path / "manual"
    )
    assert list(builder.info.splits) == ["dev"]
    assert "hotpot_train_v1.1.json is not in" in caplog.text
    # A file placed by hand that differs from the official one is used with a warning.
    assert "not 4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea" in caplog.text


@pytest.fixture
def server(tmp_path):
    """An HTTP server for ``tmp_path/www``; returns the folder and the server's address."""
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
    path = folder / "get"  # the name is not that of an archive, as in a download link of a drive
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "dev", "test"):
            archive.write(FIXTURES / "two_wiki" / f"{split}.json", f"data/{split}.json")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_find_files_missing_files_are_downloaded_and_verified(tmp_path, monkeypatch, server):
    folder, url = server
    offer(monkeypatch, url, serve_archive(folder))
    builder = prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
    assert [question.id for question in to_dataset(builder).questions] == ["w1", "w2", "w3"]


def test_download_wrong_checksum_is_refused_and_deleted(tmp_path, monkeypatch, server):
    folder, url = server
    serve_archive(folder)
    offer(monkeypatch, url, "0" * 64)
    with pytest.raises(UserError, match="as its author states for data.zip; the download was dele"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
    # The second attempt downloads again.
    offer(monkeypatch, url, serve_archive(folder))
    prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")


def test_download_page_instead_of_archive_is_refused(tmp_path, monkeypatch, server):
    folder, url = server
    (folder / "get").write_text("<html>Quota exceeded</html>")
    offer(monkeypatch, url, None)
    with pytest.raises(UserError, match="did not return a zip archive; download it by hand"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")


def test_download_without_network_names_file_and_folder(tmp_path, monkeypatch):
    offer(monkeypatch, "http://127.0.0.1:9", None)  # No server listens at this port.
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds", tmp_path / "empty")
    assert "http://127.0.0.1:9/get?id=1 cannot be downloaded" in str(error.value)
    assert f"place data.zip in {tmp_path / 'empty'}" in str(error.value)


def test_download_unreachable_host_fails_at_once(tmp_path):
    class Never:
        def download(self, url):
            raise AssertionError(f"requested {url}")

    files = {"dev": OfficialFile("dev.json", "http://127.0.0.1:9/dev.json")}
    with pytest.raises(UserError, match="cannot be downloaded"):
        find_files(files, Never(), tmp_path)  # pyright: ignore[reportArgumentType]


def test_download_missing_file_is_refused(tmp_path, monkeypatch, server):
    offer(monkeypatch, server[1], None)
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*404"):
        prepare_builder(BENCHMARKS["two_wiki"], "default", tmp_path / "tfds")
