"""``config.engine=ray`` with a fake Ray: shards, their order, dying workers, and resuming.

tests/cluster runs a real cluster.
"""

import contextlib
import itertools
import json
import operator
import os
import pathlib
import runpy
import sqlite3
import sys

import pytest

from cirag_jax import cli
from cirag_jax.commands import cluster, identity, index
from cirag_jax.commands import extract as extract_module
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.config_files import load_config
from cirag_jax.errors import InUse, UserError
from cirag_jax.retrieval.encoders import FlaxEncoder
from cirag_jax.runtime import run as runtime_run
from cirag_jax.runtime.store import Journal
from cirag_jax.triples.store import FILE
from tests import tiny
from tests.commands.fake_ray import Death, FakeRay, OutOfMemoryError
from tests.commands.model_server import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TEXTS = [
    "Ule feeds Tarn.", "Fenn refused Osk.", "Brum borders Osk. It nothing.", "Osk prose here.",
    "Dunn joins Ule. Ule cuts Brum. Brum cut Osk.", "Fenn garbled Osk. Osk feeds Fenn.",
]  # fmt: skip
TEXTS = {f"p{i:02d}": f"{text} Ule joins Osk{i}." for i, text in enumerate(2 * _TEXTS)}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with model_server() as running:
        yield running


@pytest.fixture
def ray(monkeypatch):
    """Replaces the module ``ray`` by a `FakeRay`."""

    def use(*arguments, **options):
        fake = FakeRay(*arguments, **options)
        monkeypatch.setitem(sys.modules, "ray", fake)
        return fake

    return use


def corpus(folder, texts):
    folder.mkdir(exist_ok=True)
    rows = [{"id": name, "title": name, "text": text} for name, text in texts.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def extract(server, folder, workdir, *more, engine="ray"):
    values = {
        "data.dir": folder, "extractor.backend": "openai", "extractor.base_url": server.url,
        "extractor.model": "m", "extractor.max_retries": 0, "max_empty_share": 1.0, "block": 2,
        "engine": engine, "workers": 3, "retry": "never",
    }  # fmt: skip
    arguments = [f"--config.{name}={value}" for name, value in values.items()]
    workdir.mkdir(exist_ok=True)
    return extract_corpus(load_config("configs/extract.py", [*arguments, *more]), workdir)


def raise_at(*counts, error=Death):
    """Returns a hook for `FakeRay` that raises at some calls."""

    def before(count):
        if count in counts:
            raise error

    return before


def without_times(result):
    return {k: v for k, v in result.items() if k not in ("seconds", "store")}


def rows(workdir):
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        return sorted(db.execute("SELECT * FROM passages"))


def has_no_repeats(server):
    asked = [text for _, text in server.asked if "refused" not in text]
    return len(asked) == len(set(asked))


def die_at_response(monkeypatch, *counts, error=Death):
    """Makes workers die after these responses are recorded, counted over all workers."""
    record, count = Journal.record, 0

    def recorded(*arguments):
        nonlocal count
        record(*arguments)
        count += 1
        if count in counts:
            raise error

    monkeypatch.setattr(Journal, "record", recorded)


@pytest.mark.parametrize("seed", [0, 2])  # the two seeds kill workers at different shards
def test_extract_dying_workers_write_the_local_store(
    server, tmp_path, ray, monkeypatch, capsys, seed
):
    folder = corpus(tmp_path / "c", TEXTS)
    expected = extract(server, folder, tmp_path / "local", engine="local")
    server.asked.clear()
    fake = ray(before=raise_at(1, 7), seed=seed)
    die_at_response(monkeypatch, 5, 9)
    result = extract(server, folder, tmp_path / "w", "--config.in_flight=1")
    assert without_times(result) == without_times(expected) and result["failed"] == 4
    assert (tmp_path / "w" / FILE).read_bytes() == (tmp_path / "local" / FILE).read_bytes()
    assert has_no_repeats(server) and not (tmp_path / "w" / "shards").exists()
    assert fake.started == 3 + 4 and not fake.inside
    assert capsys.readouterr().err.count("a worker of the Ray cluster died in ") == 4


@pytest.mark.parametrize("seed", [1, 3])
def test_extract_killed_command_resumes_missing_shards(server, tmp_path, ray, seed):
    """The resumed run gives the same rows as a local run, although it also retries failures."""
    folder = corpus(tmp_path / "c", TEXTS)
    ray(before=raise_at(6, error=KeyboardInterrupt), seed=seed)
    with pytest.raises(KeyboardInterrupt):
        extract(server, folder, tmp_path / "w")
    ray(seed=1)
    result = extract(server, folder, tmp_path / "w", "--config.retry=errors")
    assert result["reused"] >= 3 and result["complete"] and has_no_repeats(server)
    expected = extract(server, folder, tmp_path / "local", engine="local")
    assert rows(tmp_path / "w") == rows(tmp_path / "local")
    assert not (tmp_path / "w" / "shards").exists()
    assert result["failures"] == expected["failures"] and expected["failed"] == 4


def kill_at_count(patch, cut):
    """Interrupts the command between counting the ``cut``-th shard and removing it."""
    count, counter = Journal.count, itertools.count(1)

    def counted_then_killed(*arguments):
        count(*arguments)
        if next(counter) == cut:
            raise KeyboardInterrupt

    patch.setattr(Journal, "count", counted_then_killed)


def counts_all_tokens(result, server):
    """Returns whether the tokens of each response are counted exactly once."""
    answered = sum("refused" not in text for _, text in server.asked)
    return result["generated_tokens"] == 7 * answered


@pytest.mark.parametrize("cut", [1, 4])
def test_extract_leftover_shard_is_counted_once(server, tmp_path, ray, monkeypatch, cut):
    folder = corpus(tmp_path / "c", TEXTS)
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at_count(patch, cut)
        extract(server, folder, tmp_path / "w")
    assert (tmp_path / "w" / "shards" / f"{cut - 1:08d}.sqlite").exists()
    ray()
    result = extract(server, folder, tmp_path / "w")
    assert result["complete"] and counts_all_tokens(result, server) and has_no_repeats(server)


def test_extract_shard_name_is_reused_without_loss(server, tmp_path, ray, monkeypatch):
    """A later shard with the name of an earlier one keeps its recorded responses."""
    arguments = ("--config.limit=2", "--config.in_flight=1")
    ray()
    extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w", *arguments)
    folder = corpus(tmp_path / "c", {f"n{i}": f"Ule joins Fenn{i}." for i in range(2)} | TEXTS)
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at_response(patch, 3, error=KeyboardInterrupt)
        extract(server, folder, tmp_path / "w", *arguments)
    assert [file.name for file in (tmp_path / "w/shards").iterdir()] == ["00000000.sqlite"]
    ray()
    result = extract(server, folder, tmp_path / "w", *arguments)
    assert result["extracted"] == 2 and counts_all_tokens(result, server) and has_no_repeats(server)


def test_extract_shards_of_another_block_size_are_counted_once(server, tmp_path, ray, monkeypatch):
    folder, shards = corpus(tmp_path / "c", TEXTS), tmp_path / "w" / "shards"
    ray(before=raise_at(4, error=KeyboardInterrupt), seed=1)
    with pytest.raises(KeyboardInterrupt):
        extract(server, folder, tmp_path / "w")
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at_count(patch, 2)  # one shard is left
        extract(server, folder, tmp_path / "w", "--config.block=12")
    assert list(shards.glob("*.sqlite"))
    ray()
    result = extract(server, folder, tmp_path / "w", "--config.block=12")
    assert result["complete"] and not result["extracted"] and counts_all_tokens(result, server)
    assert not shards.exists()


def test_extract_shard_that_kills_workers_stops_the_command(server, tmp_path, ray, monkeypatch):
    folder = corpus(tmp_path / "c", TEXTS)
    run = Journal.open_program

    def opened(book, program, place, input):
        if program.startswith("p07@"):
            raise Death("out of luck")
        run(book, program, place, input)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "open_program", opened)
        fake = ray()
        with pytest.raises(UserError, match="3 Ray workers died in 00000003; .*out of luck"):
            extract(server, folder, tmp_path / "w")
    assert fake.started == 3 + 3 and not fake.inside
    assert extract(server, folder, tmp_path / "w")["complete"] and has_no_repeats(server)


def test_extract_workers_that_never_start_stop_the_command(server, tmp_path, ray):
    folder = corpus(tmp_path / "c", TEXTS)
    fake = ray(before=raise_at(*range(20), error=OutOfMemoryError("too much")))
    with pytest.raises(UserError, match="3 Ray workers died in 0000000.; .*too much"):
        extract(server, folder, tmp_path / "w")
    assert 3 + 3 <= fake.started <= 3 + 3 + 2 * 2 and not server.asked and not fake.inside


def test_extract_workers_with_other_settings_are_refused(server, tmp_path, ray, monkeypatch):
    folder = corpus(tmp_path / "c", TEXTS)
    ray(before=raise_at(3, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        extract(server, folder, tmp_path / "w")
    ray()
    other = ("--config.extractor.overflow=truncate",)
    with pytest.raises(UserError, match='sqlite was started with extractor.overflow="error", not'):
        extract(server, folder, tmp_path / "w", *other)
    found, fake = identity.of_language_model, ray()
    monkeypatch.setattr(
        identity,
        "of_language_model",
        lambda *arguments: {**found(*arguments), "packages": {"tokenizers": str(fake.started)}},
    )
    with pytest.raises(UserError, match="a worker of the Ray cluster has different software"):
        extract(server, folder, tmp_path / "v")


def test_extract_locked_shard_is_retried(server, tmp_path, ray, monkeypatch):
    folder, refusals = corpus(tmp_path / "c", dict(list(TEXTS.items())[:2])), iter(range(3))

    class Held(Journal):
        def __init__(self, path, settings, **options):
            if pathlib.Path(path).parent.name == "shards" and next(refusals, None) is not None:
                raise InUse("locked")
            super().__init__(path, settings, **options)

    monkeypatch.setattr(runtime_run, "Journal", Held)
    ray()
    with monkeypatch.context() as patch, pytest.raises(InUse):
        patch.setattr(extract_module, "_RETRIES", 1)
        extract(server, folder, tmp_path / "w")
    assert extract(server, folder, tmp_path / "w")["complete"] and next(refusals, None) is None


def test_extract_workers_need_the_folders_of_the_command(server, tmp_path, ray):
    def before(count):
        (tmp_path / "w" / "shards").rmdir()

    ray(before=before)
    with pytest.raises(
        UserError, match="shards does not exist on .*on a file system that all nodes share"
    ):
        extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")


def test_extract_useless_model_stops_the_shards(server, tmp_path, ray):
    texts = {f"p{i}": "prose" for i in range(40)}
    arguments = ("--config.max_empty_share=0.5", "--config.min_passages=4")
    ray()
    with pytest.raises(UserError, match=r"4 of 4 passages gave no triples .*'I am sorry.'"):
        extract(server, corpus(tmp_path / "c", texts), tmp_path / "w", *arguments)
    assert len(server.asked) <= 2 * 2 * 3 * 8 and has_no_repeats(server)


def test_extract_stopped_by_deadline_resumes_with_another_engine(server, tmp_path, ray):
    folder = corpus(tmp_path / "c", TEXTS)
    fake = ray()
    stopped = extract(server, folder, tmp_path / "w", "--config.stop_after_minutes=1e-9")
    assert (stopped["complete"], stopped["left"], fake.started) == (False, 12, 0)
    part = extract(server, folder, tmp_path / "w", "--config.limit=5")
    assert (part["extracted"], part["left"]) == (5, 0)
    (tmp_path / "w" / "shards").mkdir()
    with Journal(tmp_path / "w" / "shards" / "00000009.sqlite", {}):
        pass  # of another block size
    whole = extract(server, folder, tmp_path / "w", engine="local")
    assert (whole["extracted"], whole["reused"]) == (7, 5) and has_no_repeats(server)
    assert not (tmp_path / "w" / "shards").exists() and len(server.asked) == whole["calls"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("engine=slurm", "config.engine='slurm' is not one of local, ray"),
        ("workers=-1", "config.workers=-1 must not be negative"),
        ("extractor.budget_tokens=9", "budget_tokens works in one process"),
    ],
)
def test_extract_bad_setting_is_refused(server, tmp_path, ray, arguments, words):
    ray()
    with pytest.raises(UserError, match=words):
        extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w", f"--config.{arguments}")


@pytest.mark.parametrize("name", ["extract", "index"])
def test_command_without_ray_names_the_requirements(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(_ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    main = runpy.run_path(f"launch/{name}.py")["main"]
    arguments = [f"{name}.py", "--config.engine=ray", f"--workdir={tmp_path / 'w'}"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, f"configs/{name}.py", arguments)
    assert end.value.code == 2 and capsys.readouterr().err == (
        f"{name}.py: config.engine=ray needs ray, which is not installed; run: pip install -r "
        "requirements-cluster.txt\n"
    )
    assert [path.name for path in (tmp_path / "w").iterdir()] == [cli.LOCK]
    assert (_ROOT / "requirements-cluster.txt").is_file()
    assert os.environ["JAX_PLATFORMS"] == "cpu"  # GPUs are for the workers


@pytest.mark.parametrize(
    ("backend", "resources", "expected"),
    [
        ("openai", {"GPU": 4.0}, (2, 0, "cpu")),  # one per live node
        ("jax", {"GPU": 4.0}, (4, 1, "")),
        ("jax", {}, (2, 0, "cpu")),
    ],
)
def test_in_order_worker_has_a_gpu_if_it_computes(tmp_path, ray, backend, resources, expected):
    fake = ray(resources)
    arguments = [f"--config.extractor.backend={backend}", "--config.engine=ray"]
    config = load_config("configs/extract.py", arguments)
    on_devices = backend != "openai"
    shards = [index.Shard("a", tmp_path / "a", ()), index.Shard("b", tmp_path / "b", ())]
    done = cluster.in_order(_returner, shards, config, tmp_path, on_devices=on_devices)
    assert [(shard.name, result) for shard, result in done] == [("a", "a"), ("b", "b")]
    (options,) = fake.options
    platforms = options["runtime_env"]["env_vars"]["JAX_PLATFORMS"]
    assert (fake.started, options["num_gpus"], platforms) == expected


def _returner():
    return operator.attrgetter("name")


@pytest.fixture
def indexed(tmp_path, one_device):
    data = tiny.dataset_folder(tmp_path / "data")
    model = tiny.model_folder(tmp_path / "model")

    def run(workdir, *more, engine="ray"):
        values = {"data.dir": data, "encoder.model": model, "shard_rows": 5, "engine": engine}
        arguments = [f"--config.{name}={value}" for name, value in values.items()]
        workdir.mkdir(exist_ok=True)
        return index.index_dataset(load_config("configs/index.py", [*arguments, *more]), workdir)

    return run


def files(folder):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kind", ["exact", "faiss_flat"])
def test_index_dying_workers_write_the_local_index(indexed, tmp_path, ray, kind):
    arguments = f"--config.retriever.kind={kind}"
    expected = indexed(tmp_path / "local", arguments, engine="local")
    fake = ray(before=raise_at(1, 4, 6))
    result = indexed(tmp_path / "w", arguments)
    assert files(tmp_path / "w") == files(tmp_path / "local") and fake.started == 2 + 3
    for name in expected.keys() - {"folder", "seconds", "passages_per_second"}:
        assert result[name] == expected[name], name


def test_index_killed_build_resumes_missing_shards(indexed, tmp_path, ray):
    indexed(tmp_path / "local", engine="local")
    ray(before=raise_at(3, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "w")
    there = len(list((tmp_path / "w" / "index").glob("vectors-*.npy")))
    fake = ray()
    result = indexed(tmp_path / "w")
    assert there and result["resumed"] in (5 * there, 5 * there - 1)  # the last has four
    assert files(tmp_path / "w") == files(tmp_path / "local")
    before, fake = fake.started, ray()
    assert indexed(tmp_path / "w")["resumed"] == 24 and before and not fake.started


def test_index_worker_with_another_encoder_is_refused(indexed, tmp_path, ray, monkeypatch):
    fake, init = ray(), FlaxEncoder.__init__

    def opened(encoder, *arguments, **options):
        init(encoder, *arguments, **options)
        encoder.identity = {**encoder.identity, "files": str(fake.started)}

    monkeypatch.setattr(FlaxEncoder, "__init__", opened)
    with pytest.raises(UserError, match="a worker of the Ray cluster has different software"):
        indexed(tmp_path / "w")


def test_index_bm25_on_a_cluster_is_refused(indexed, tmp_path, ray):
    ray()
    with pytest.raises(UserError, match="does not support config.retriever.kind=bm25"):
        indexed(tmp_path / "w", "--config.retriever.kind=bm25")
    assert not list((tmp_path / "w").iterdir())
