"""The scripts of examples/, run as a reader of the documentation would run them."""

import importlib
import pathlib

import jax
import pytest

from cirag_jax.commands import answer
from cirag_jax.config_files import load_config
from tests.answering import lines

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


def test_own_documents_question_of_two_hops_is_answered_from_both_documents():
    found = importlib.import_module("examples.own_documents").main()
    assert found.text == "Kalmar"
    assert any("directed by Marta" in line for line in found.evidence)
    assert any("born in Kalmar" in line for line in found.evidence)


def test_own_method_from_python_answers():
    assert importlib.import_module("examples.own_method").main()


def test_own_method_as_a_config_file_answers_a_dataset(tmp_path):
    config = load_config(f"{EXAMPLES / 'own_method.py'}:small", ["--config.data.limit=2"])
    result = answer.answer(config, tmp_path)
    assert result["calls"] == {"retrieve": 4, "generate": 2}
    assert len(lines(tmp_path / "predictions.jsonl")) == 2


@pytest.mark.slow
def test_train_aligner_few_steps_improve_recall(tmp_path):
    main = importlib.import_module("examples.train_aligner").main
    training = ("num_steps=6", "eval_every=6", "batch_size=32", "dev.questions=10")
    test = ("data.limit=40", "data.corpus=selected_questions", "bootstrap_samples=100")
    with jax.numpy_dtype_promotion("standard"):  # as outside of the tests
        result = main(tmp_path, training, test)
    assert result["trained"]["recall@5"] > result["frozen"]["recall@5"] + 0.05
