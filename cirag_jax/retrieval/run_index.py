"""Rankings from a run file of TREC, instead of a search."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from cirag_jax.datasets.formats import trec
from cirag_jax.errors import UserError
from cirag_jax.retrieval.search import empty_results
from cirag_jax.types import Feedback, Passage, Question

RUN = "trec"  # The kind of retriever; its folder is the run file.


class RunIndex:
    """The ranked rows of each question, found by its text."""

    def __init__(self, name: str, rows: Mapping[str, Sequence[int]]):
        self._name, self._rows = name, rows

    @classmethod
    def open(
        cls, file: str, questions: Sequence[Question], passages: Sequence[Passage]
    ) -> "RunIndex":
        """Reads the rankings of ``questions`` from a run file."""
        row_of = {passage.id: row for row, passage in enumerate(passages)}
        rankings = trec.read_run(pathlib.Path(file), [q.id for q in questions], row_of)
        rows: dict[str, list[int]] = {}
        for question in questions:
            for passage in rankings.get(question.id, ()):
                if passage not in row_of:
                    raise UserError(
                        f"{file} ranks passage {passage!r} for question {question.id!r}, which the "
                        "corpus does not have"
                    )
            if question.id in rankings:
                rows[question.question] = [row_of[name] for name in rankings[question.id]]
        if not rows:
            raise UserError(f"{file} ranks passages for none of the {len(questions):,} questions")
        return cls(file, rows)

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first k passages of every query; see `PassageIndex.search`.

        Scores are negative ranks. Every query must be a question of the run.
        """
        if any(feedback):
            raise UserError(f"config.retriever.kind={RUN} does not support relevance feedback")
        row_QK, score_QK = empty_results(len(queries), k)
        for number, query in enumerate(queries):
            if query not in self._rows:
                raise UserError(
                    f"{self._name} has no ranking for the query {query[:80]!r}; "
                    f"config.retriever.kind={RUN} serves methods that search once, with a question "
                    "of the run"
                )
            rows = self._rows[query]
            if allowed is not None:
                rows = [row for row in rows if row in set(allowed[number].tolist())]
            count = min(k, len(rows))
            row_QK[number, :count] = rows[:count]
            score_QK[number, :count] = -np.arange(1, count + 1)
        return row_QK, score_QK
