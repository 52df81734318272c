"""The Python API and ``--config.documents``, over a tiny dataset with tiny models."""

import collections
import pathlib
import runpy

import numpy as np
import pytest

import cirag_jax
from cirag_jax import cli
from cirag_jax.commands import session
from cirag_jax.errors import UserError
from cirag_jax.retrieval import encoders
from cirag_jax.retrieval.encoders import CachedEncoder
from tests.answering import tiny_folders

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]
TEXTS = ["Balum is a town. The patron of Balum is Ule.", "Ule was born in Tarn. Ule was a weaver."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


def settings(folders, **more):
    return {
        "encoder.model": folders["encoder"], "reader.model": folders["decoder"],
        "reader.adapter": "null", "reader.max_tokens": 6, "reader.prefix_tokens": 0,
        "cirag.num_passages": 2, "cirag.max_steps": 2, **more,
    }  # fmt: skip


def test_session_answers_over_texts(folders):
    with cirag_jax.Cirag.open(documents=TEXTS, settings=settings(folders)) as rag:
        one = rag.answer("Where was the patron of Balum born?")
        again, other = rag.answers(["Where was the patron of Balum born?", "Who was a weaver?"])
    assert again == one and other.prediction != one.prediction
    assert isinstance(one, cirag_jax.Answer) and isinstance(one.text, str)
    assert {p.id for p in one.passages} == {"document 1#1", "document 2#1"}
    assert len(one.steps) == 2 and len(one.evidence) >= 1
    sentences = {"Balum is a town", "The patron of Balum is Ule", "Ule was born in Tarn"}
    assert any(text in line for text in sentences for line in one.evidence)


def test_session_dataset_folder_and_other_method(folders):
    given = {"encoder.model": folders["encoder"], "reader.model": folders["decoder"]}
    with cirag_jax.Cirag.open(
        "", documents=folders["data"], method="native_rag",
        settings={**given, "native_rag.num_passages": 3, "native_rag.num_read": 2},
    ) as rag:  # fmt: skip
        found = rag.answer("who is the patron of balum?")
    assert len(found.passages) == 3 and found.granularity == "passage"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "crag"}, "method='crag' is unknown; choose one of beam_retrieval, c2rag"),
        ({"preset": "llm"}, "cirag.py:small, which needs no triples"),
        ({"settings": {"cirag.beams": 2}}, "unknown config key 'cirag.beams'"),
        ({"documents": "/nowhere"}, "config.documents=/nowhere is neither"),
        ({"documents": None}, "documents must be a path or a list of strings, not None"),
        ({"documents": b"text"}, "documents must be a path or a list of strings, not b'text'"),
        ({"documents": {"a": "text"}}, "documents must be a path or a list of strings, not {"),
        ({"documents": {"text"}}, "documents must be a path or a list of strings, not {"),
        ({"documents": []}, "the documents have no text"),
        ({"documents": [" ", ""]}, "the documents have no text"),
        ({"documents": ["a", None]}, r"documents\[1\] must be a string, not None"),
        ({"documents": [b"a"]}, r"documents\[0\] must be a string, not b'a'"),
        ({"documents": [pathlib.Path("a")]}, r"documents\[0\] must be a string, not PosixPath"),
        ({"documents": ["half \ud800"]}, r"documents\[0\] is not valid UTF-8"),
        (
            {"documents": [__file__]},
            r"documents\[0\]=.*session.py' is a file; pass its folder",
        ),
        ({"documents": ""}, "config.documents= is neither a folder nor a file"),
        ({"documents": "A text. " * 99}, "neither a folder nor a file; in Python, pass texts as a"),
        ({"documents": "~nobody/a"}, "config.documents=~nobody/a is neither"),
        ({"documents": "a\0b"}, "is neither a folder nor a file"),
        ({"method": None}, "method must be a string, not None"),
        ({"preset": None}, "preset must be a string, not None"),
        ({"settings": ["a"]}, r"settings must be a dictionary, not \['a'\]"),
        (
            {"settings": {"reader.model": "\ud800"}},
            r"reader.model='\\ud800' is not valid UTF",
        ),
        ({"settings": {5: 5}}, "unknown config key '5'"),
    ],
)
def test_session_bad_arguments_are_refused(folders, fields, words):
    fields = {"documents": TEXTS, **fields}
    fields["settings"] = fields.get("settings") or {"encoder.model": folders["encoder"]}
    with pytest.raises(UserError, match=words):
        cirag_jax.Cirag.open(**fields)


def test_session_empty_question_is_refused(folders):
    with cirag_jax.Cirag.open(documents=TEXTS, settings=settings(folders)) as rag:
        with pytest.raises(UserError, match="question is empty"):
            rag.answer("  ")
        with pytest.raises(UserError, match="a question must be a string, not 5"):
            rag.answer(5)
        for questions in ("Who?", b"Who?", None, 5, {"Who?"}, {"Who?": 1}):
            with pytest.raises(UserError, match="questions must be a list of strings, not"):
                rag.answers(questions)
        with pytest.raises(UserError, match="a question must be a string, not None"):
            rag.answers(["Who?", None])
        with pytest.raises(UserError, match="not valid UTF-8"):
            rag.answer("half \ud800")
        assert rag.answers([]) == []
        (one,) = rag.answers(question for question in ["Who was a weaver?"])
        assert one == rag.answer("Who was a weaver?")
    rag.close()
    with pytest.raises(UserError, match="the models are closed"):
        rag.answer("Who?")


def test_session_after_fork_is_refused(folders, monkeypatch):
    rag = cirag_jax.Cirag.open(documents=(text for text in TEXTS), settings=settings(folders))
    with monkeypatch.context() as child:
        process = session.os.getpid()
        child.setattr(session.os, "getpid", lambda: process + 1)
        with pytest.raises(UserError, match=r"before os.fork\(\), .*get_context\('spawn'\)"):
            rag.answer("Who was a weaver?")
        with pytest.raises(UserError, match="before os.fork"):
            cirag_jax.Cirag.open(documents=TEXTS, settings=settings(folders))
    assert rag.answer("Who was a weaver?").passages
    with monkeypatch.context() as child:  # Closing in the new process would wait for threads.
        child.setattr(session.os, "getpid", lambda: process + 1)
        child.setattr(rag._runner, "close", lambda: pytest.fail("closed"))
        rag.close()
    rag._runner.close()


def test_answer_command_over_documents(folders, tmp_path, capsys, monkeypatch):
    """The second question reuses the embeddings computed for the first."""
    monkeypatch.setenv("CIRAG_JAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)

    def ask(workdir, *more):
        values = {"documents": tmp_path / "docs", **settings(folders)}
        argv = [f"--config.{key}={value}" for key, value in values.items()]
        config = "--config=configs/methods/cirag.py:small"
        with pytest.raises(SystemExit) as end:
            cli.run(
                _MAIN, "configs/methods/cirag.py",
                ["answer.py", config, *argv, *more, f"--workdir={tmp_path / workdir}"],
            )  # fmt: skip
        return end.value.code, capsys.readouterr().err

    code, err = ask("a", "--config.question=Who is the patron of Balum?")
    assert code == 0 and "Evidence" in err and "2 passages" in err, err
    (kept,) = (tmp_path / "cache" / "vectors").glob("*.npy")
    before = kept.stat().st_mtime_ns
    assert ask("b", "--config.question=Who was a weaver?")[0] == 0
    assert kept.stat().st_mtime_ns == before
    code, err = ask("c")
    assert code == 2 and "config.documents needs a question" in err


class _Counting:
    identity, dim = {"name": "counting"}, 2

    def __init__(self):
        self.asked = 0

    truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        self.asked += 1
        return np.full((len(texts), 2), len(texts), np.float32)


def test_vector_cache_key_is_content(tmp_path):
    inner = _Counting()
    for _ in range(2):
        vectors = CachedEncoder(inner, tmp_path / "v").encode(["a", "b"])
        assert vectors.tolist() == [[2, 2], [2, 2]]
    assert inner.asked == 1
    CachedEncoder(inner, tmp_path / "v").encode(["a", "c"])
    CachedEncoder(inner, tmp_path / "v").encode(["a", "b"], "query")
    assert inner.asked == 3
    for file in (tmp_path / "v").iterdir():
        file.write_bytes(file.read_bytes()[:40])  # damaged
    CachedEncoder(inner, tmp_path / "v").encode(["a", "b"])
    assert inner.asked == 4


def test_vector_cache_skips_large_collections(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "MAX_CACHED_BYTES", 16)  # two vectors of two floats
    CachedEncoder(_Counting(), tmp_path / "v").encode(["a", "b", "c"])
    assert not (tmp_path / "v").exists()
    CachedEncoder(_Counting(), tmp_path / "v").encode(["a", "b"])
    assert len(list((tmp_path / "v").iterdir())) == 1
