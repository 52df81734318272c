"""Requirements of methods: models, valid settings, and hidden gold annotations."""

import dataclasses
import json
import pathlib
import re
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.commands import opening, pool, task
from cirag_jax.config_files import load_config
from cirag_jax.datasets import prepare
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.methods import registry
from cirag_jax.methods.baselines import direct as direct_module
from cirag_jax.methods.baselines.direct import DirectConfig, direct
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Anchor, Demonstrate, Fetch, Needs, Rank, Retrieve
from cirag_jax.types import Dataset, Feedback, Passage, Prediction, Question, Sentence, Step
from configs import common
from configs.methods import cirag as cirag_config
from tests import tiny
from tests.answering import arguments, lines, tiny_folders
from tests.own_method import own_method

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FIXTURES = _ROOT / "tests" / "datasets" / "fixtures"
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


def run(capsys, argv):
    code, captured = end_of(capsys, argv)
    assert code == 0, captured.err
    return json.loads(captured.out)


def end_of(capsys, argv):
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    return end.value.code, capsys.readouterr()


def fail_to_open(*_, **__):
    raise AssertionError("opened")


def test_answer_direct_needs_only_questions(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pool, "open_encoder_for", fail_to_open)
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "corpus.jsonl").unlink()
    (data / "openie.jsonl").unlink()
    argv = arguments({**folders, "data": data}, tmp_path / "w", method="direct")
    result = run(capsys, [*argv, "--config.data.limit=2"])
    assert result["calls"] == {"generate": 2}
    assert (result["answered"], result["recall"], result["sees_gold"]) == (2, None, False)
    assert [row["id"] for row in lines(tmp_path / "w" / "predictions.jsonl")] == ["q0", "q1"]


def test_answer_benchmark_without_passages_needs_direct_or_a_corpus(folders, tmp_path, capsys):
    data = tmp_path / "bamboogle"
    prepare.prepare("bamboogle", data, manual_dir=_FIXTURES / "bamboogle")

    def asked(method, *more):
        given = {**folders, "data": data}
        values = ("--config.data.split=test", *more)
        return arguments(given, tmp_path / "w" / method, *values, method=method)

    result = run(capsys, asked("direct"))
    assert (result["answered"], result["recall"], "hit@3" in result) == (2, None, False)
    code, captured = end_of(capsys, asked("native_rag"))
    assert (code, captured.out) == (2, "")
    assert captured.err.endswith(
        f"{data / 'corpus.jsonl'} does not exist; put passages there, or use the "
        "method direct, which needs none.\n"
    )
    (data / "corpus.jsonl").write_text(
        json.dumps({"id": "p", "title": "Ada Moen", "text": "A mayor of Tarn."}) + "\n"
    )
    code, captured = end_of(capsys, asked("native_rag"))
    assert code == 2 and "question 'test_0' of bamboogle" in captured.err
    assert captured.err.endswith("does not have; ircot_full needs no annotations.\n")
    result = run(capsys, asked("native_rag", "--config.data.corpus=ircot_full"))
    assert (result["answered"], result["recall"]["passage"], result["hit@3"]) == (2, None, 0.5)
    assert "hit@3" not in result["unscored"]
    assert result["unscored"]["recall@5"] == "no gold passages"


def test_answer_own_question_needs_no_question_file(folders, tmp_path, capsys):
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "questions.jsonl").unlink()
    argv = arguments({**folders, "data": data}, tmp_path / "w", method="native_rag")
    result = run(capsys, [*argv, "--config.question=who is the patron of balum?"])
    assert (result["answered"], result["calls"]["retrieve"]) == (1, 1)


def test_select_data_seed_samples_passages():
    passages = {f"p{i}": Passage(f"p{i}", "", "") for i in range(40)}
    dataset = Dataset("d", (Question("q", "?", (), supporting=("p3",)),), passages, {})
    data = common.data(split="")
    data.corpus = "supporting_and_sampled"

    def drawn(seed):
        data.seed = seed
        return task.select(dataset, data, "", Needs()).corpus.passages

    assert len(drawn(0)) == 11 and drawn(0) == drawn(0) != drawn(1)


GOLD = tiny.dataset().questions[0]


def test_job_hides_gold_from_programs_that_do_not_need_it():
    @dataclasses.dataclass(frozen=True)
    class Oracle:
        needs = Needs(gold=True)

    seen = []
    for settings in (DirectConfig(), Oracle()):
        job = task.job(GOLD, lambda question, config: seen.append(question), settings)
        job.start()
        assert job.input["answers"] == GOLD.answers  # the trace page shows them
        assert "same_sentences" not in job.input  # older journals have no such field
    assert seen == [Question(GOLD.id, GOLD.question, ()), GOLD]


def test_demonstrations_exclude_evaluated_questions():
    def train(name, text, fold=None, split="train"):
        return Question(name, text, ("x",), split=split, fold=fold)

    asked = (train("a", "Who is  it?"), train("b", "Where?", split="dev"))
    others = (
        train("c", "who is it"),  # another id, the same text
        train("d", "When?", fold="test"),
        train("e", "When?", split="dev"),
        train("f", "When?", fold="train"),
        train("g", "How?"),
    )
    dataset = Dataset("towns", (*asked, *others), {}, {})
    shown = task.Task(Needs(demonstrations=True), dataset, asked, Corpus("none", ()))
    assert [q.id for q in task.demonstrations(shown)] == ["f", "g"]
    assert task.demonstrations(shown._replace(questions=dataset.questions)) == ()
    reworded = (*asked, train("g", "In what way?"))
    assert [q.id for q in task.demonstrations(shown._replace(questions=reworded))] == ["f"]


def config_of(folder, name, program, settings, monkeypatch):
    """Writes a config file for a method outside the package."""
    method = own_method(monkeypatch, name, program, settings)
    config = folder / f"{name}.py"
    config.write_text(
        "from configs.methods import blocks\n\n"
        f"def get_config(): return blocks.method('{method}')\n"
    )
    return f"--config={config}"


@dataclasses.dataclass(frozen=True)
class Shows:
    needs = Needs(corpus=False, demonstrations=True)


def shows(question, config):
    found = yield Demonstrate(question.question, 2)
    return Prediction(" ".join(q.id for q in found.questions), "default")


def test_answer_demonstrations_are_training_questions(folders, tmp_path, capsys, monkeypatch):
    config = config_of(tmp_path, "shows", shows, Shows, monkeypatch)
    values = {"data.dir": folders["data"], "encoder.model": folders["encoder"], "data.split": "dev"}
    argv = [config, *(f"--config.{key}={value}" for key, value in values.items())]
    assert run(capsys, [*argv, f"--workdir={tmp_path}"])["calls"] == {"demonstrate": 4}
    for row in lines(tmp_path / "predictions.jsonl"):
        shown = row["answer"].split()
        assert len(shown) == 2 and set(shown) <= {f"q{i}" for i in range(8)}


def test_answer_without_training_questions_has_no_demonstrations(
    folders, tmp_path, capsys, monkeypatch
):
    config = config_of(tmp_path, "shows", shows, Shows, monkeypatch)
    values = {"data.dir": folders["data"], "encoder.model": folders["encoder"]}  # all splits
    argv = [config, *(f"--config.{key}={value}" for key, value in values.items())]
    assert run(capsys, [*argv, f"--workdir={tmp_path}"])["answered"] == 12
    assert {row["answer"] for row in lines(tmp_path / "predictions.jsonl")} == {""}


@dataclasses.dataclass(frozen=True)
class Ranks:
    needs = Needs(rankers=("words", "vectors"), feedback=True)


def ranks(question, config):
    """Calls two rankers at once, then retrieves with feedback."""
    found = yield Retrieve(question.question, 4)
    texts = tuple(passage.text for passage in found.passages)
    words, vectors = yield [
        Rank(question.question, found.passages, 2, "words"),
        Rank(question.question, texts, 1, "vectors"),
    ]
    assert len(vectors.texts) == 1 and vectors.texts[0] in texts
    moved = Feedback(0.5, tuple((passage.id, 0.25) for passage in words.texts))
    last = yield Retrieve(question.question, 4, moved)
    steps = (Step(question.question, kept=(Sentence(last.passages[0].id, 0),), notes={"n": 2}),)
    return Prediction("x", "default", tuple(p.id for p in last.passages), steps=steps)


def test_answer_method_with_two_rankers_and_feedback_resumes(
    folders, tmp_path, capsys, monkeypatch
):
    config = config_of(tmp_path, "ranks", ranks, Ranks, monkeypatch)
    values = {
        "data.dir": folders["data"], "encoder.model": folders["encoder"], "data.split": "dev",
        "rankers.words.kind": "bm25",
    }  # fmt: skip
    argv = [config, *(f"--config.{key}={value}" for key, value in values.items())]
    result = run(capsys, [*argv, f"--workdir={tmp_path}"])
    assert result["calls"] == {"retrieve": 8, "rank": 8} and result["answered"] == 4
    # The recorded responses can be read.
    assert run(capsys, [*argv, f"--workdir={tmp_path}"])["calls"] == result["calls"]


@dataclasses.dataclass(frozen=True)
class Anchors:
    needs = Needs(triples=True, entities="unicode")


def anchors(question, config):
    """Finds the entity that the question names, and fetches the passages of its triples."""
    found = yield Anchor(question.question, 1)
    sources = tuple(dict.fromkeys(triple.passage_id for triple in found.triples))
    fetched = yield Fetch(sources)
    return Prediction(found.entities[0], "default", tuple(p.id for p in fetched.passages))


def test_answer_method_anchors_entities_of_the_corpus(folders, tmp_path, capsys, monkeypatch):
    config = config_of(tmp_path, "anchors", anchors, Anchors, monkeypatch)
    values = {
        "data.dir": folders["data"], "encoder.model": folders["encoder"], "data.split": "dev",
    }  # fmt: skip
    argv = [config, *(f"--config.{key}={value}" for key, value in values.items())]
    result = run(capsys, [*argv, f"--workdir={tmp_path}"])
    assert result["calls"] == {"anchor": 4, "fetch": 4} and result["answered"] == 4
    first, *_ = rows = lines(tmp_path / "predictions.jsonl")
    assert first["answer"] in tiny.dataset().questions[8].question
    assert set(first["passages"]) == {"p8"}
    (tmp_path / "predictions.jsonl").unlink()
    assert run(capsys, [*argv, f"--workdir={tmp_path}"])["calls"] == result["calls"]
    assert lines(tmp_path / "predictions.jsonl") == rows
    with pytest.raises(UserError, match="config.triples=online extracts only retrieved passages"):
        online = load_config(config.removeprefix("--config="), ["--config.triples=online"])
        opening.check(online, Anchors.needs)


def test_answer_stored_graph_gets_new_passages_and_changes_no_answer(folders, tmp_path, capsys):
    def answer(name, limit, *more):
        argv = arguments(folders, tmp_path / name, method="hipporag2")
        settings = (
            *("hipporag2.recognition=score", "hipporag2.min_score=-1", f"data.limit={limit}"),
            *("reader.max_tokens=4", "hipporag2.num_read=3", *more),
        )
        return run(capsys, [*argv, *(f"--config.{setting}" for setting in settings)])

    stored = f"graph.folder={tmp_path / 'graph'}"
    answer("one", 1, stored)
    before = json.loads((tmp_path / "graph" / "manifest.json").read_text())
    result = answer("two", 2, stored)
    after = json.loads((tmp_path / "graph" / "manifest.json").read_text())
    assert before["passages"] < after["passages"]
    assert result["calls"]["link"] == result["calls"]["walk"] == 2
    answer("new", 2)
    two, new = (lines(tmp_path / name / "predictions.jsonl") for name in ("two", "new"))
    assert [row["passages"] for row in two] == [row["passages"] for row in new]
    answer("two", 2)  # The folder of the graph is no part of the run's identity.
    with pytest.raises(
        UserError, match="needs the entities of all passages; extract triples first"
    ):
        config = load_config("configs/methods/hipporag2.py", ["--config.triples=online"])
        opening.check(config, task.method_settings(config).needs)


def test_answer_c2rag_survives_invalid_plans(folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path / "w", method="c2rag")
    more = ["--config.data.limit=3", "--config.planner.max_tokens=24"]
    result = run(capsys, [*argv, *more, "--config.c2rag.kg_scope=corpus"])
    assert (result["answered"], result["failures"]) == (3, 0)
    assert result["parse_errors"]["plan_invalid"] == 6  # two attempts per question
    assert result["calls"]["retrieve"] == 6 and result["recall"]["passage"]["num_questions"] == 3
    assert result["calls"]["generate"] == 9


def test_answer_c2rag_without_triples_is_refused(folders, tmp_path, capsys):
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "openie.jsonl").unlink()
    argv = arguments({**folders, "data": data}, tmp_path / "w", method="c2rag")
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/c2rag.py", ["answer.py", *argv])
    assert end.value.code == 2 and "has triples; extract them" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["code", "code_defaults"])
def test_config_c2rag_code_presets_are_valid(preset):
    config = load_config(str(_ROOT / f"configs/methods/c2rag.py:{preset}"))
    settings = registry.find_method("c2rag").config(**task.plain(config.c2rag))
    opening.check(config, settings.needs)
    assert settings.needs.entities and settings.neff_unit == "variable"
    assert settings.gamma == (1.0 if preset == "code" else 1.5)
    assert config.rankers.triples.kind == config.rankers.passages.kind == "cross_encoder"


@pytest.mark.parametrize("name", registry.method_names())
@pytest.mark.parametrize("preset", ["", "small", "medium", "paper"])
def test_config_has_blocks_for_the_needs_of_its_method(name, preset):
    config = load_config(str(_ROOT / f"configs/methods/{name}.py:{preset}"))
    for block in config.get("rankers", {}).values():
        block.model = "given" if block.kind == "aligner" else block.model
    needs = task.method_settings(config).needs
    opening.check(config, needs)
    assert all(task.most_tokens(config, role) > 0 for role in needs.roles)
    assert all(ranker in config.rankers for ranker in needs.rankers)
    assert ("retriever" in config) == needs.index
    assert "triples" in config or not needs.triples  # CIRAG always has the field
    if preset == "paper":
        authors = ("Qwen/", "meta-llama/", "PeterJinGo/", "gaussalgo/", "google/")
        assert all(config[role].model.startswith(authors) for role in needs.roles)


@pytest.mark.parametrize("name", registry.method_names())
def test_config_unknown_preset_is_refused(name):
    with pytest.raises(UserError, match="the presets are small, medium, paper"):
        load_config(str(_ROOT / f"configs/methods/{name}.py:huge"))


def test_answer_result_records_if_method_reads_gold(folders, tmp_path, capsys, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Oracle:
        needs = dataclasses.replace(DirectConfig.needs, gold=True)

    monkeypatch.setattr(direct_module, "METHOD", registry.Method(direct, Oracle))
    argv = arguments(folders, tmp_path, "--config.data.limit=1", method="direct")
    assert run(capsys, argv)["sees_gold"] is True


def test_check_feedback_with_bm25_is_refused():
    config = load_config(
        str(_ROOT / "configs/methods/native_rag.py"), ["--config.retriever.kind=bm25"]
    )
    opening.check(config, Needs())
    with pytest.raises(UserError, match=r"config\.retriever\.kind=bm25 does not support"):
        opening.check(config, Needs(feedback=True))


def test_check_feedback_with_units_is_refused():
    flags = ["--config.retriever.units=sentence"]
    config = load_config(str(_ROOT / "configs/methods/native_rag.py"), flags)
    opening.check(config, Needs())
    with pytest.raises(UserError, match=r"config\.retriever\.units=sentence does not support"):
        opening.check(config, Needs(feedback=True))


@pytest.mark.parametrize(
    ("block", "abilities", "message"),
    [
        (
            {"backend": "transformers"},
            ("logprobs", "attention"),
            "transformers does not support atten",
        ),
        ({"backend": "openai"}, ("entropy", "score"), "does not support entropy and score"),
        ({"backend": "openai", "server": "transformers"}, ("logprobs",), "(server=transformers)"),
        ({"backend": "openai", "server": "vllm"}, ("continue_final", "logprobs"), None),
        ({"backend": "jax"}, ("attention", "score", "entropy"), None),
    ],
)
def test_check_missing_ability_of_backend_is_refused(block, abilities, message):
    config = cirag_config.get_config()
    config.reader.update(block)
    needs = Needs(roles=("reader",), abilities={"reader": abilities})
    if message is None:
        opening.check(config, needs)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        opening.check(config, needs)


def test_check_prefilled_headers_need_continue_final():
    config = cirag_config.get_config("llm")
    config.integrator.backend = "openai"
    needs = CiragConfig(prefilled_headers=True).needs
    with pytest.raises(UserError, match="config.integrator.backend=openai .* continue_final"):
        opening.check(config, needs)


def test_needs_cirag_without_rounds_is_only_a_reader(folders, tmp_path):
    config = load_config(str(_ROOT / "configs/methods/cirag.py"), ["--config.cirag.max_steps=0"])
    needs = registry.find_method("cirag").config(**task.plain(config.cirag)).needs
    assert needs == Needs(roles=("reader",))
    assert task.needs_encoder(config, needs)
    config.retriever.kind = "bm25"
    assert not task.needs_encoder(config, needs)


def test_config_model_applies_to_roles_without_model():
    overrides = ["--config.model=model.gguf", "--config.reader.model=another"]
    for order in (overrides, overrides[::-1]):
        config = load_config(str(_ROOT / "configs/methods/cirag.py:medium"), order)
        assert (config.integrator.model, config.reader.model) == ("model.gguf", "another")
        assert config.model == "model.gguf"


@pytest.mark.parametrize(
    ("method", "ranker"), [("cirag", "rankers.triples"), ("kirag", "rankers.aligner")]
)
def test_check_aligner_of_other_units_is_refused(method, ranker, tmp_path):
    (tmp_path / "training.json").write_text('{"component": "aligner", "units": "sentence"}')
    for field in ("encoder.model", f"{ranker}.model"):
        config = load_config(
            str(_ROOT / f"configs/methods/{method}.py"), [f"--config.{field}={tmp_path}"]
        )
        needs = registry.find_method(method).config(**task.plain(config[method])).needs
        assert needs.units == "triple"
        said = f"an aligner for sentences, but config.{method}.units=triple; set --config.{method}"
        with pytest.raises(UserError, match=re.escape(said)):
            opening.check(config, needs)
        opening.check(config, dataclasses.replace(needs, units="sentence"))
        block = config.rankers[ranker.partition(".")[2]]
        block.kind = "bm25"  # needs no aligner
        opening.check(config, needs)


def test_answer_kirag_without_triples_suggests_sentences(folders, tmp_path, capsys):
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "openie.jsonl").unlink()
    argv = [
        "--config=configs/methods/kirag.py",
        f"--config.data.dir={data}",
        f"--config.encoder.model={folders['encoder']}",
        f"--workdir={tmp_path / 'w'}",
    ]
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    assert end.value.code == 2
    assert "configs/methods/kirag.py:small, which needs no triples" in capsys.readouterr().err
    values = {
        "kirag.units": "sentence", "kirag.max_steps": 2, "kirag.use_constructor": False,
        "kirag.reader": "nothing", "data.limit": 2, "data.split": "train",
    }  # fmt: skip
    result = run(capsys, [*argv, *(f"--config.{key}={value}" for key, value in values.items())])
    assert (
        result["calls"] == {"retrieve": 4, "rank": 4}
        and len(result["recall_per_step"]["found"]) == 2
    )


def test_answer_kirag_end_to_end(folders, tmp_path, capsys):
    values = {
        "data.dir": folders["data"], "data.split": "dev", "encoder.model": folders["encoder"],
        "model": folders["decoder"], "constructor.max_tokens": 6, "reader.max_tokens": 4,
        "kirag.max_steps": 2, "kirag.append_best": True, "kirag.match_cutoff": 0.8,
        "kirag.num_demonstrations": 1, "in_flight": 4,
    }  # fmt: skip
    for role in ("constructor", "reader"):
        values |= {f"{role}.prefix_tokens": 0, f"{role}.batch_size": 4}
    argv = ["--config=configs/methods/kirag.py", f"--workdir={tmp_path}"]
    result = run(capsys, [*argv, *(f"--config.{key}={value}" for key, value in values.items())])
    assert (result["answered"], result["failures"], result["steps"]) == (4, 0, 2.0)
    assert result["calls"]["demonstrate"] == 4 and result["recall_per_step"]["num_questions"] == 4
