"""Reranking problems of questions."""

from cirag_jax.evaluation.reranking import passage_problems
from cirag_jax.types import Dataset, Passage, Question


def test_passage_problems_equal_texts_are_one_candidate():
    corpus = {
        pid: Passage(pid, title, f"About {title}.")
        for pid, title in (("x", "Xi"), ("twin", "Ann"), ("a", "Ann"), ("b", "Bo"))
    }
    question = Question("q", "Who?", ("a",), supporting=("a", "b"), context=("x", "twin", "a"))
    (problem,) = passage_problems(Dataset("d", (question,), corpus, {}), [question], None, 0)
    assert problem.texts == ("Xi. About Xi.", "Ann. About Ann.", "Bo. About Bo.")
    assert problem.relevant == (1, 2)
