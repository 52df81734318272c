"""A method in the user's own package, named in a config file outside the repository."""

import sys
import textwrap

import pytest

from cirag_jax import cli
from cirag_jax.commands import answer, compare
from cirag_jax.commands.pool import Pool
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from configs import compare as compare_config
from configs.methods import blocks
from tests.answering import lines, tiny_folders

METHOD = """
    import dataclasses

    from cirag_jax.llm.types import Message
    from cirag_jax.methods.registry import Method
    from cirag_jax.runtime.requests import Generate, Needs, Rank, Retrieve
    from cirag_jax.types import PositiveInt, Prediction
    from cirag_jax.validation import check_fields


    @dataclasses.dataclass(frozen=True)
    class Settings:
        needs = Needs(roles=("reader",), rankers=("passages",))

        num_passages: PositiveInt = 2

        def __post_init__(self):
            check_fields(self)


    def first_passage(question, config):
        retrieved = yield Retrieve(question.question, config.num_passages)
        ranked = yield Rank(question.question, retrieved.passages, 1, "passages")
        messages = (Message("user", ranked.texts[0].text + question.question),)
        response = yield Generate(messages, "reader")
        return Prediction(response.text, "passage", tuple(p.id for p in retrieved.passages))


    METHOD = Method(first_passage, Settings)
"""
UNITS = METHOD.replace('rankers=("passages",)', 'rankers=("passages",), units="passage"')
CONFIG = """
    from configs.methods import blocks


    def get_config(preset=""):
        return blocks.preset(blocks.method("my_package.my_method", reader=6), preset)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """A config file whose method is in a package next to it."""
    package = tmp_path / "user" / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "my_method.py").write_text(textwrap.dedent(METHOD))
    file = package.parent / "my_config.py"
    file.write_text(textwrap.dedent(CONFIG))
    monkeypatch.syspath_prepend(package.parent)
    yield file
    for name in ("my_package", "my_package.my_method"):
        sys.modules.pop(name, None)


def models(folders):
    return {
        "reader.model": folders["decoder"],
        "reader.prefix_tokens": 0,
        "encoder.model": folders["encoder"],
        "rankers.passages.kind": "bm25",
    }


def overrides(values):
    return [f"--config.{key}={value}" for key, value in values.items()]


def test_answer_method_outside_of_the_repository_runs_with_its_settings(
    folders, config_file, tmp_path
):
    values = models(folders) | {
        "data.dir": folders["data"], "data.split": "train", "data.limit": 3,
        "my_method.num_passages": 1,
    }  # fmt: skip
    config = load_config(f"{config_file}:small", overrides(values))
    workdir = tmp_path / "w"
    workdir.mkdir()
    result = answer.answer(config, workdir)
    assert result["calls"] == {"retrieve": 3, "rank": 3, "generate": 3}
    assert result["answered"] == 3 and result["complete"]
    rows = lines(workdir / "predictions.jsonl")
    assert [(row["id"], len(row["passages"])) for row in rows] == [("q0", 1), ("q1", 1), ("q2", 1)]
    # Running the same command again makes no further calls.
    assert answer.answer(config, workdir)["calls"] == result["calls"]


def test_answer_bad_setting_of_a_method_outside_names_its_block(folders, config_file, tmp_path):
    values = models(folders) | {"data.dir": folders["data"], "my_method.num_passages": 0}
    config = load_config(str(config_file), overrides(values))
    with pytest.raises(UserError, match=r"^config\.my_method: num_passages=0 must be at least 1"):
        answer.answer(config, tmp_path)


def test_answer_config_without_the_block_of_its_method_is_refused(folders, config_file, tmp_path):
    config_file.write_text(
        config_file.read_text().replace("    return ", "    config = ")
        + "    del config.my_method\n    return config\n"
    )
    config = load_config(str(config_file), overrides(models(folders)))
    with pytest.raises(UserError, match=r"needs the block config\.my_method"):
        answer.answer(config, tmp_path)


def test_compare_config_file_takes_part_under_its_name(folders, config_file, tmp_path):
    config = compare_config.get_config()
    config.methods = f"direct,{config_file},narrow={config_file}:small"
    config.set = tuple(
        [f"{key}={value}" for key, value in models(folders).items()]
        + ["narrow:my_method.num_passages=1", "reader.max_tokens=6"]
    )
    config.data.dir, config.data.split, config.data.limit = str(folders["data"]), "train", 2
    config.latency_questions = 0
    workdir = tmp_path / "w"
    workdir.mkdir()
    result = compare.compare(config.lock(), workdir)
    assert list(result["systems"]) == ["direct", "my_config", "narrow"] and result["complete"]
    assert [len(row["passages"]) for row in lines(workdir / "my_config" / "predictions.jsonl")] == [
        2, 2,
    ]  # fmt: skip
    assert [len(row["passages"]) for row in lines(workdir / "narrow" / "predictions.jsonl")] == [
        1, 1,
    ]  # fmt: skip


def test_compare_missing_config_file_is_refused(tmp_path):
    config = compare_config.get_config()
    config.methods = "no_such_config.py"
    with pytest.raises(UserError, match=r"no_such_config\.py' is unknown; choose one of beam"):
        compare.compare(config.lock(), tmp_path)


def test_answer_help_of_a_config_file_outside_lists_its_settings(config_file, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(answer.answer, "configs/methods/cirag.py", [
            "answer.py", f"--config={config_file}", "--help",
        ])  # fmt: skip
    assert end.value.code == 0 and "--config.my_method.num_passages" in capsys.readouterr().out


@pytest.mark.parametrize("has_units", [False, True])
def test_answer_aligner_of_other_units_names_only_settings_that_exist(
    folders, config_file, tmp_path, has_units
):
    source = UNITS.replace("num_passages: P", 'units: str = "passage"\n        num_passages: P')
    package = config_file.parent / "my_package" / "my_method.py"
    package.write_text(textwrap.dedent(source if has_units else UNITS))
    values = models(folders) | {
        "data.dir": folders["data"], "encoder.model": "shipped:aligner",
        "rankers.passages.kind": "bi_encoder",
    }  # fmt: skip
    config = load_config(str(config_file), overrides(values))
    with pytest.raises(UserError, match="shipped:aligner is an aligner for sentences") as error:
        answer.answer(config, tmp_path)
    assert ("--config.my_method.units=sentence" in str(error.value)) == has_units
    assert ("the method's Needs.units is passage" in str(error.value)) != has_units
    assert "--config.rankers.passages.kind=bm25" in str(error.value)
    values["rankers.passages.kind"] = "bm25"
    answer.plan_run(load_config(str(config_file), overrides(values)), Pool())


def test_answer_own_method_without_triples_names_a_config_that_exists(
    folders, config_file, tmp_path
):
    source = METHOD.replace("num_passages: P", 'units: str = "triple"\n        num_passages: P')
    source = source.replace('"passages",)', '"passages",), triples=True')
    (config_file.parent / "my_package" / "my_method.py").write_text(textwrap.dedent(source))
    documents = tmp_path / "notes.txt"
    documents.write_text("Ferries carry mail.")
    values = models(folders) | {"documents": documents, "question": "Who?"}
    config = load_config(str(config_file), overrides(values))
    with pytest.raises(UserError, match="or use --config=configs/methods/cirag.py:small"):
        answer.answer(config, tmp_path)


def test_shipped_method_without_reader_format_keeps_its_reader(config_file):
    config = blocks.shipped(blocks.method("my_package.my_method"))
    assert config.encoder.model == "shipped:aligner" and config.reader.adapter is None
    assert "reader_format" not in config.my_method
