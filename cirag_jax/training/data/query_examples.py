"""Conversations that teach query writing, from decomposed questions.

These conversations need neither triples nor retrieval. Each question becomes a conversation in the
format of the annotation teacher. The first round has no candidates. Each later round has one
candidate, the fact that solves the previous hop. Such rounds cannot teach which facts to keep, so
the loss is only on the next query and on the stop after the last hop.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.datasets.annotations import fact_of, fill, hops_of
from cirag_jax.training.data.examples import Part
from cirag_jax.types import Passage, Question, Step, Trajectory, Triple

# Loss weights of these conversations, see `examples.weighted`.
WEIGHTS = {Part.RATIONALE: 0.0, Part.FACTS: 0.0}


def written_queries(
    questions: Sequence[Question], corpus: Mapping[str, Passage]
) -> list[Trajectory]:
    """Returns a conversation for each question whose hops all have a sub-question and an answer."""
    trajectories = []
    for question in questions:
        hops = hops_of(question, corpus)
        if not hops or not all(hop.sub_question and hop.answers for hop in hops):
            continue
        answers: dict[int, str] = {}
        query, facts = question.question, ()
        steps = []
        for index, hop in enumerate(hops):
            next_query = fill(hop.sub_question, answers)
            steps.append(Step(query, candidates=facts, kept=facts, next_query=next_query))
            fact = fact_of(hop, answers) or (fill(hop.keywords, answers), "is", hop.answers[0])
            query, facts = next_query, (Triple(*fact),)
            answers[index] = hop.answers[0]
        steps.append(Step(query, candidates=facts, kept=facts))
        trajectories.append(
            Trajectory(question.id, question.question, "annotations", tuple(steps), "stopped", True)
        )
    return trajectories
