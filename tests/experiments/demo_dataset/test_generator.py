"""Compares the generated files of the built-in dataset with the files in the package.

The generator's modules are imported within tests, because they have extra requirements.
"""

import gzip
import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys

import pytest

from cirag_jax.datasets import demo
from cirag_jax.errors import UserError
from cirag_jax.grade.questions import TypedTemplates
from cirag_jax.grade.records import Edge, Fact
from tests.datasets.test_demo import requirements


def _missing_sources() -> list[str]:
    """Returns the pinned sources that are not installed."""
    installed = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    return [
        f"{name}=={version}"
        for name, version in requirements().items()
        if installed.get(name) != version
    ]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(_missing_sources()),
        reason=f"experiments/demo_dataset/requirements.txt is not installed: {_missing_sources()}",
    ),
]

_HINT = (
    "The generator's files differ from the shipped ones. If this is intended, see 'Updating a "
    "source' in docs/demo_dataset.md."
)
_PRINT_DIGESTS = (
    "import hashlib, json; from experiments.demo_dataset import build; files = build.build_files();"
    "print(json.dumps({n: hashlib.sha256(c).hexdigest() for n, c in files[1].items()}))"
)


@pytest.fixture(scope="module")
def built():
    """The dataset and its files before compression, built only once."""
    from experiments.demo_dataset import build

    return build.build_files()


@pytest.fixture(scope="module")
def shipped() -> dict[str, bytes]:
    """The shipped files, decompressed because versions of zlib compress differently."""
    names = (demo.QUESTIONS, demo.CORPUS, demo.ENTITIES)
    return {name: gzip.decompress((demo.FOLDER / name).read_bytes()) for name in names}


def test_generator_equals_shipped_files(built, shipped):
    dataset, files = built
    assert [name for name in shipped if files[name] != shipped[name]] == [], _HINT
    assert files.keys() == shipped.keys()
    assert dataset == demo.build()


def test_generator_other_hash_seed_gives_same_files(repository, shipped):
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not the seed of this process
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", _PRINT_DIGESTS]
    process = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in shipped.items()}
    assert json.loads(process.stdout) == expected


def test_command_writes_the_shipped_files(built, shipped, monkeypatch, tmp_path, capsys):
    from experiments.demo_dataset import __main__ as command

    monkeypatch.setattr(command.build, "build_files", lambda: built)
    assert command.main([f"--out={tmp_path / 'files'}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["passages"] == len(built[0].corpus) and printed["changed files"] == []
    assert printed["packages"] == requirements()
    for name, content in shipped.items():
        compressed = (tmp_path / "files" / name).read_bytes()
        assert gzip.decompress(compressed) == content
        assert compressed[3:8] == bytes(5)  # no flags, so no file name; and no time
        assert command.build.compress(content) == compressed


def test_command_without_out_reports_changed_files(built, monkeypatch, tmp_path, capsys):
    from experiments.demo_dataset import __main__ as command

    changed = {**built[1], demo.CORPUS: b"another"}
    monkeypatch.setattr(command.build, "build_files", lambda: (built[0], changed))
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 0
    assert json.loads(capsys.readouterr().out)["changed files"] == [demo.CORPUS]
    assert list(tmp_path.iterdir()) == []


def test_command_unwritable_folder_is_reported(built, monkeypatch, tmp_path, capsys):
    from experiments.demo_dataset import __main__ as command

    monkeypatch.setattr(command.build, "build_files", lambda: built)
    (tmp_path / "file").write_text("")
    assert command.main([f"--out={tmp_path / 'file' / 'x'}"]) == 2
    assert "file/x cannot be written" in capsys.readouterr().err


def test_command_error_is_escaped(monkeypatch, capsys):
    from experiments.demo_dataset import __main__ as command

    def fail():
        raise UserError("x\x1b[2J\u202e\nis damaged")

    monkeypatch.setattr(command.build, "build_files", fail)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "demo_dataset: x\\x1b[2J\\u202e is damaged\n"


def test_sources_missing_package_is_named(monkeypatch):
    from experiments.demo_dataset import sources

    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="great_tables"):
        sources.great_table("09-films")


def test_sources_missing_file_is_named():
    from experiments.demo_dataset import sources

    with pytest.raises(UserError, match="nothing.csv"):
        sources.package_file("us", "nothing.csv")


def test_grade_templates_phrase_the_chains_of_asker():
    from experiments.demo_dataset import build, questions

    templates = TypedTemplates()
    world, rendered = build.build_graph()
    asker = questions.Asker(world, rendered)
    starts = [world.entities[key] for key in sorted(rendered) if key.startswith("film:")]
    chains = [c for e in starts[:60] for c in asker.chains(e, 3)]
    reasons = set()
    for chain in itertools.islice(chains, 200):
        facts = [
            Fact(h.entity.name, "", h.fact.value, 0, h.entity.key, h.fact.target or h.fact.value,
                 h.fact.relation)
            for h in chain
        ]  # fmt: skip
        path = tuple(Edge(i, f.head_id, f.tail_id) for i, f in enumerate(facts))
        text, reason = templates.ask(path, facts)
        reasons.add(reason)
        if not reason:
            assert chain[0].entity.name in text and text.endswith("?")
            words = text.split()
            assert len(set(zip(words, words[1:], words[2:], strict=False))) == len(words) - 2
            assert not questions.names_something(text, chain)
            assert templates.answers((chain[-1].fact.value,))[0] == chain[-1].fact.value
    assert None in reasons and reasons <= {None, "no_template", "ambiguous_start", "clumsy"}
