"""Conversations that teach query writing: question and known facts in, next sub-question out.

Decomposed questions need neither triples nor retrieval for it. Each becomes a conversation like
those of the annotation teacher: nothing is known at first; then every round shows the one fact that
solves the hop that was asked for. Which facts to keep cannot be learned from that, so the loss is
on the next query alone, and on the stop when every hop is solved.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.datasets.annotations import fact_of, fill, hops_of
from cirag_jax.training.data.examples import Part
from cirag_jax.types import Passage, Question, Step, Trajectory, Triple

# What is learned from these conversations, with `examples.weighted`.
WEIGHTS = {Part.RATIONALE: 0.0, Part.FACTS: 0.0}


def written_queries(
    questions: Sequence[Question], corpus: Mapping[str, Passage]
) -> list[Trajectory]:
    """The conversations about those questions whose every hop has a sub-question and an answer.

    Args:
      questions: with annotations; those without are passed over.
      corpus: with their gold passages.
    """
    found = []
    for question in questions:
        hops = hops_of(question, corpus)
        if not hops or not all(hop.asks and hop.answers for hop in hops):
            continue
        known: dict[int, str] = {}
        asked, shown = question.question, ()
        steps = []
        for index, hop in enumerate(hops):
            query = fill(hop.asks, known)
            steps.append(Step(asked, candidates=shown, kept=shown, next_query=query))
            fact = fact_of(hop, known) or (fill(hop.keywords, known), "is", hop.answers[0])
            asked, shown = query, (Triple(*fact),)
            known[index] = hop.answers[0]
        steps.append(Step(asked, candidates=shown, kept=shown))
        found.append(
            Trajectory(question.id, question.question, "annotations", tuple(steps), "stopped", True)
        )
    return found
