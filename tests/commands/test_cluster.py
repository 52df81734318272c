"""``config.engine=ray``: shards, their order, deaths and resumption; Ray itself is a stand-in.

A real cluster runs in tests/cluster.
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
    """Puts a `FakeRay` in the module's place."""

    def use(*given, **options):
        fake = FakeRay(*given, **options)
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
    given = [f"--config.{name}={value}" for name, value in values.items()]
    workdir.mkdir(exist_ok=True)
    return extract_corpus(load_config("configs/extract.py", [*given, *more]), workdir)


def at(*counts, error=Death):
    """What `FakeRay` calls before every call: raises at some of them."""

    def before(count):
        if count in counts:
            raise error

    return before


def constant(result):
    return {k: v for k, v in result.items() if k not in ("seconds", "store")}


def rows(workdir):
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        return sorted(db.execute("SELECT * FROM passages"))


def nothing_asked_twice(server):
    asked = [text for _, text in server.asked if "refused" not in text]
    return len(asked) == len(set(asked))


def dying_at(monkeypatch, *counts, error=Death):
    """A worker dies with the n-th response of all, which it has recorded."""
    record, count = Journal.record, 0

    def recorded(*given):
        nonlocal count
        record(*given)
        count += 1
        if count in counts:
            raise error

    monkeypatch.setattr(Journal, "record", recorded)


# --------------------------------------------------------------------------------------- extraction


@pytest.mark.parametrize("seed", [0, 2])  # each death is at another shard
def test_workers_that_die_leave_the_store_of_the_local_command(
    server, tmp_path, ray, monkeypatch, capsys, seed
):
    folder = corpus(tmp_path / "c", TEXTS)
    wanted = extract(server, folder, tmp_path / "local", engine="local")
    server.asked.clear()
    fake = ray(before=at(1, 7), seed=seed)
    dying_at(monkeypatch, 5, 9)
    result = extract(server, folder, tmp_path / "w", "--config.in_flight=1")  # nothing beside it
    assert constant(result) == constant(wanted) and result["failed"] == 4
    assert (tmp_path / "w" / FILE).read_bytes() == (tmp_path / "local" / FILE).read_bytes()
    assert nothing_asked_twice(server) and not (tmp_path / "w" / "shards").exists()
    assert fake.started == 3 + 4 and not fake.inside
    assert capsys.readouterr().err.count("a worker of the Ray cluster died at ") == 4


@pytest.mark.parametrize("seed", [1, 3])
def test_a_command_that_was_killed_asks_for_the_missing_shards_only(server, tmp_path, ray, seed):
    """Passages that failed, and are asked again, do not cut the other shards otherwise."""
    folder = corpus(tmp_path / "c", TEXTS)
    ray(before=at(6, error=KeyboardInterrupt), seed=seed)
    with pytest.raises(KeyboardInterrupt):
        extract(server, folder, tmp_path / "w")
    ray(seed=1)
    result = extract(server, folder, tmp_path / "w", "--config.retry=errors")
    assert result["reused"] >= 3 and result["complete"] and nothing_asked_twice(server)
    wanted = extract(server, folder, tmp_path / "local", engine="local")
    assert rows(tmp_path / "w") == rows(tmp_path / "local")
    assert not (tmp_path / "w" / "shards").exists()
    assert result["failures"] == wanted["failures"] and wanted["failed"] == 4


def killed_in_count(patch, cut):
    """The command is killed once the ``cut``-th shard of all is counted, and not yet removed."""
    count, counter = Journal.count, itertools.count(1)

    def counted_then_killed(*given):
        count(*given)
        if next(counter) == cut:
            raise KeyboardInterrupt

    patch.setattr(Journal, "count", counted_then_killed)


def counted(result, server):
    """Whether the tokens of all answers count, and those of none twice."""
    answered = sum("refused" not in text for _, text in server.asked)
    return result["generated_tokens"] == 7 * answered


@pytest.mark.parametrize("cut", [1, 4])
def test_a_shard_that_a_kill_leaves_counts_once(server, tmp_path, ray, monkeypatch, cut):
    folder = corpus(tmp_path / "c", TEXTS)
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_in_count(patch, cut)
        extract(server, folder, tmp_path / "w")
    assert (tmp_path / "w" / "shards" / f"{cut - 1:08d}.sqlite").exists()
    ray()
    result = extract(server, folder, tmp_path / "w")
    assert result["complete"] and counted(result, server) and nothing_asked_twice(server)


def test_the_name_of_a_shard_is_free_again(server, tmp_path, ray, monkeypatch):
    """What a later shard of that name has been answered is not dropped with the first."""
    given = ("--config.limit=2", "--config.in_flight=1")
    ray()
    extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w", *given)
    folder = corpus(tmp_path / "c", {f"n{i}": f"Ule joins Fenn{i}." for i in range(2)} | TEXTS)
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        dying_at(patch, 3, error=KeyboardInterrupt)
        extract(server, folder, tmp_path / "w", *given)
    assert [file.name for file in (tmp_path / "w/shards").iterdir()] == ["00000000.sqlite"]
    ray()
    result = extract(server, folder, tmp_path / "w", *given)
    assert result["extracted"] == 2 and counted(result, server) and nothing_asked_twice(server)


def test_shards_of_other_blocks_count_once(server, tmp_path, ray, monkeypatch):
    folder, shards = corpus(tmp_path / "c", TEXTS), tmp_path / "w" / "shards"
    ray(before=at(4, error=KeyboardInterrupt), seed=1)
    with pytest.raises(KeyboardInterrupt):
        extract(server, folder, tmp_path / "w")
    ray()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_in_count(patch, 2)  # the first is the only shard that is left
        extract(server, folder, tmp_path / "w", "--config.block=12")
    assert list(shards.glob("*.sqlite"))
    ray()
    result = extract(server, folder, tmp_path / "w", "--config.block=12")
    assert result["complete"] and not result["extracted"] and counted(result, server)
    assert not shards.exists()


def test_a_shard_that_kills_its_workers_ends_the_command(server, tmp_path, ray, monkeypatch):
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
    assert extract(server, folder, tmp_path / "w")["complete"] and nothing_asked_twice(server)


def test_workers_that_do_not_start_end_the_command(server, tmp_path, ray):
    folder = corpus(tmp_path / "c", TEXTS)
    fake = ray(before=at(*range(20), error=OutOfMemoryError("too much")))
    with pytest.raises(UserError, match="3 Ray workers died in 0000000.; .*too much"):
        extract(server, folder, tmp_path / "w")
    assert 3 + 3 <= fake.started <= 3 + 3 + 2 * 2 and not server.asked and not fake.inside


def test_workers_with_other_settings_are_refused(server, tmp_path, ray, monkeypatch):
    folder = corpus(tmp_path / "c", TEXTS)
    ray(before=at(3, error=KeyboardInterrupt))
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
        lambda *given: {**found(*given), "packages": {"tokenizers": str(fake.started)}},
    )
    with pytest.raises(UserError, match="a worker of the Ray cluster has other software"):
        extract(server, folder, tmp_path / "v")


def test_a_lost_worker_is_given_time_to_let_go(server, tmp_path, ray, monkeypatch):
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


def test_workers_need_the_commands_folders(server, tmp_path, ray):
    def before(count):
        (tmp_path / "w" / "shards").rmdir()

    ray(before=before)
    with pytest.raises(
        UserError, match="shards does not exist on .*on a file system that all nodes share"
    ):
        extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")


def test_a_model_that_gives_nothing_stops_the_shards(server, tmp_path, ray):
    texts = {f"p{i}": "prose" for i in range(40)}
    given = ("--config.max_empty_share=0.5", "--config.min_passages=4")
    ray()
    with pytest.raises(UserError, match=r"4 of 4 passages gave no triples .*'I am sorry.'"):
        extract(server, corpus(tmp_path / "c", texts), tmp_path / "w", *given)
    assert len(server.asked) <= 2 * 2 * 3 * 8 and nothing_asked_twice(server)


def test_a_deadline_ends_cleanly_and_other_engines_go_on(server, tmp_path, ray):
    folder = corpus(tmp_path / "c", TEXTS)
    fake = ray()
    stopped = extract(server, folder, tmp_path / "w", "--config.stop_after_minutes=1e-9")
    assert (stopped["complete"], stopped["left"], fake.started) == (False, 12, 0)
    part = extract(server, folder, tmp_path / "w", "--config.limit=5")
    assert (part["extracted"], part["left"]) == (5, 0)
    (tmp_path / "w" / "shards").mkdir()
    with Journal(tmp_path / "w" / "shards" / "00000009.sqlite", {}):
        pass  # of blocks of another size
    whole = extract(server, folder, tmp_path / "w", engine="local")
    assert (whole["extracted"], whole["reused"]) == (7, 5) and nothing_asked_twice(server)
    assert not (tmp_path / "w" / "shards").exists() and len(server.asked) == whole["calls"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("engine=slurm", "config.engine='slurm' is not one of local, ray"),
        ("workers=-1", "config.workers=-1 must not be negative"),
        ("extractor.budget_tokens=9", "budget_tokens works in one process"),
    ],
)
def test_what_cannot_be_is_refused(server, tmp_path, ray, given, words):
    ray()
    with pytest.raises(UserError, match=words):
        extract(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w", f"--config.{given}")


@pytest.mark.parametrize("name", ["extract", "index"])
def test_without_ray_one_sentence_names_the_extra(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(_ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    main = runpy.run_path(f"launch/{name}.py")["main"]
    given = [f"{name}.py", "--config.engine=ray", f"--workdir={tmp_path / 'w'}"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, f"configs/{name}.py", given)
    assert end.value.code == 2 and capsys.readouterr().err == (
        f"{name}.py: config.engine=ray needs ray, which is not installed; install "
        "requirements-cluster.txt (pip install -r requirements-cluster.txt).\n"
    )
    assert [path.name for path in (tmp_path / "w").iterdir()] == [cli.LOCK]
    assert (_ROOT / "requirements-cluster.txt").is_file()
    assert os.environ["JAX_PLATFORMS"] == "cpu"  # GPUs are for the workers


@pytest.mark.parametrize(
    ("backend", "resources", "wanted"),
    [
        ("openai", {"GPU": 4.0}, (2, 0, "cpu")),  # one a node that lives
        ("jax", {"GPU": 4.0}, (4, 1, "")),
        ("jax", {}, (2, 0, "cpu")),
    ],
)
def test_a_worker_has_a_gpu_where_it_computes_on_one(tmp_path, ray, backend, resources, wanted):
    fake = ray(resources)
    given = [f"--config.extractor.backend={backend}", "--config.engine=ray"]
    config = load_config("configs/extract.py", given)
    on_devices = backend != "openai"
    shards = [index.Shard("a", tmp_path / "a", ()), index.Shard("b", tmp_path / "b", ())]
    done = cluster.in_order(_returner, shards, config, tmp_path, on_devices=on_devices)
    assert [(shard.name, result) for shard, result in done] == [("a", "a"), ("b", "b")]
    (options,) = fake.options
    platforms = options["runtime_env"]["env_vars"]["JAX_PLATFORMS"]
    assert (fake.started, options["num_gpus"], platforms) == wanted


def _returner():
    return operator.attrgetter("name")


# ----------------------------------------------------------------------------------------- indexing


@pytest.fixture
def indexed(tmp_path, one_device):
    data = tiny.dataset_folder(tmp_path / "data")
    model = tiny.model_folder(tmp_path / "model")

    def run(workdir, *more, engine="ray"):
        values = {"data.dir": data, "encoder.model": model, "shard_rows": 5, "engine": engine}
        given = [f"--config.{name}={value}" for name, value in values.items()]
        workdir.mkdir(exist_ok=True)
        return index.index_dataset(load_config("configs/index.py", [*given, *more]), workdir)

    return run


def files(folder):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kind", ["exact", "faiss_flat"])
def test_workers_that_die_leave_the_index_of_the_local_command(indexed, tmp_path, ray, kind):
    given = f"--config.retriever.kind={kind}"
    wanted = indexed(tmp_path / "local", given, engine="local")
    fake = ray(before=at(1, 4, 6))
    result = indexed(tmp_path / "w", given)
    assert files(tmp_path / "w") == files(tmp_path / "local") and fake.started == 2 + 3
    for name in wanted.keys() - {"folder", "seconds", "passages_per_second"}:
        assert result[name] == wanted[name], name


def test_a_build_that_was_killed_embeds_the_missing_shards_only(indexed, tmp_path, ray):
    indexed(tmp_path / "local", engine="local")
    ray(before=at(3, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "w")
    there = len(list((tmp_path / "w" / "index").glob("vectors-*.npy")))
    fake = ray()
    result = indexed(tmp_path / "w")
    assert there and result["resumed"] in (5 * there, 5 * there - 1)  # the last has four
    assert files(tmp_path / "w") == files(tmp_path / "local")
    before, fake = fake.started, ray()
    assert indexed(tmp_path / "w")["resumed"] == 24 and before and not fake.started


def test_an_encoder_of_a_worker_that_is_another_is_refused(indexed, tmp_path, ray, monkeypatch):
    fake, init = ray(), FlaxEncoder.__init__

    def opened(encoder, *given, **options):
        init(encoder, *given, **options)
        encoder.identity = {**encoder.identity, "files": str(fake.started)}

    monkeypatch.setattr(FlaxEncoder, "__init__", opened)
    with pytest.raises(UserError, match="a worker of the Ray cluster has other software"):
        indexed(tmp_path / "w")


def test_words_need_no_cluster(indexed, tmp_path, ray):
    ray()
    with pytest.raises(UserError, match="does not support config.retriever.kind=bm25"):
        indexed(tmp_path / "w", "--config.retriever.kind=bm25")
    assert not list((tmp_path / "w").iterdir())
