"""The presets of one paper have its values, and fit together."""

import operator
import pathlib
import tomllib

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.methods.registry import method_names


def load(name, *flags):
    return load_config(f"configs/{name}", list(flags))


VALUES = tomllib.loads(pathlib.Path(__file__).with_name("paper_values.toml").read_text())


@pytest.mark.parametrize("name", VALUES)
def test_paper_preset_has_the_values_of_its_paper(name):
    config = load(name)
    for section, values in VALUES[name].items():
        for field, stated in values.items():
            value = operator.attrgetter(field)(config)
            value = list(value) if isinstance(value, tuple) else value
            assert value in stated if section == "grid" else value == stated, (section, field)


def test_paper_teacher_and_student_of_cirag_see_the_same_inputs():
    answering, teaching = load("methods/cirag.py:paper"), load("trajectories.py:paper")
    for block in ("cirag", "encoder", "retriever", "rankers", "extractor"):
        assert teaching[block].to_dict() == answering[block].to_dict(), block
    teacher = teaching.teacher
    assert (teacher.kind, teacher.llm.backend) == ("llm", "openai")
    assert teacher.llm.max_tokens == answering.integrator.max_tokens == 1024
    questions = {"limit": 1000, "random": True}
    for config, split in ((answering, "dev"), (teaching, "train")):
        assert {"split": config.data.split, **questions} == {
            "split": split, "limit": config.data.limit, "random": config.data.random
        }  # fmt: skip


@pytest.mark.parametrize(
    ("questions", "names"),
    [
        (
            ("dev", 1000, True, "selected_questions", "musique"),
            "cirag:paper cirag:code native_rag:paper ircot:paper ircot:cirag iter_retgen:cirag "
            "flare:paper flare:cirag metarag:paper metarag:cirag search_r1:paper",
        ),
        (
            ("dev", 1000, True, "ircot_full", "dualrag"),
            "dualrag:paper direct:paper oracle:paper genground:paper native_rag:dualrag "
            "ircot:dualrag iter_retgen:dualrag flare:dualrag metarag:dualrag",
        ),
        (
            ("dev", 0, False, "ircot_full", "kirag"),
            "kirag:paper kirag:code native_rag:kirag vector_prf:paper beam_retrieval:paper "
            "dragin:paper trace:paper",
        ),
        (
            ("dev", 1000, False, "per_question", "musique"),
            "c2rag:paper c2rag:code c2rag:code_defaults native_rag:c2rag iter_retgen:paper",
        ),
        (("dev", 1000, False, "selected_questions", "hipporag"), "hipporag2:paper"),
        (
            ("test", 0, False, "ircot_full", "musique"),
            "native_rag:grade multi_step:paper decomposition:paper",
        ),
    ],
)
def test_presets_of_a_paper_have_its_questions_corpus_and_scorer(questions, names):
    for name in names.split():
        method, _, preset = name.partition(":")
        config = load(f"methods/{method}.py:{preset}")
        data = config.data
        assert (data.split, data.limit, data.random, data.corpus, config.profile) == questions, name
        assert data.seed == 0, name
        searches_wikipedia = data.corpus == "ircot_full" and data.split == "dev"
        assert data.contexts_as_corpus is not searches_wikipedia, name
        fixed_1000 = data.limit == 1000 and not data.random  # HippoRAG's questions
        assert config.recall_at == ((2, 5) if fixed_1000 else (3, 5)), name


@pytest.mark.parametrize("name", method_names())
def test_preset_paper_of_every_method_selects_a_split(name):
    assert load(f"methods/{name}.py:paper").data.split
    assert load(f"methods/{name}.py").data.split is None


def test_paper_presets_extract_online_with_the_model_of_the_method():
    for name in ("cirag:paper", "c2rag:paper", "kirag:paper", "kirag:code"):
        method, _, preset = name.partition(":")
        config = load(f"methods/{method}.py:{preset}", "--config.triples=online")
        assert config.extractor.model == config.model is not None
        assert config.extractor.no_repeat_ngram_size == 0
        assert config.extractor.dialect == ("kirag" if method == "kirag" else "openie")
    config = load("methods/cirag.py:paper", "--config.model=X", "--config.extractor.model=Y")
    assert (config.integrator.model, config.extractor.model) == ("X", "Y")
    assert load("methods/cirag.py:small").extractor.adapter == "shipped:extractor"


def test_extract_presets_name_the_extractors_of_the_papers():
    names = ("cirag", "kirag", "trace", "c2rag")
    cirag, kirag, trace, c2rag = (load(f"extract.py:{name}") for name in names)
    assert (cirag.extractor.model, cirag.dialect) == ("Qwen/Qwen2.5-7B-Instruct", "openie")
    assert cirag.extractor.model == load("methods/cirag.py:paper").model
    assert (kirag.dialect, kirag.triple_tokens) == ("kirag", 512)
    assert kirag.extractor.model == load("methods/kirag.py:paper").model
    assert (trace.dialect, trace.extractor.model) == ("trace", load("chains.py:trace").model)
    assert (c2rag.extractor.backend, c2rag.extractor.model) == ("openai", "gpt-4o-mini")
    with pytest.raises(UserError, match="the presets are small, cirag, kirag, trace, c2rag"):
        load("extract.py:dualrag")
