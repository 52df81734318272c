"""Trajectories written by hand, and tokenizers with various chat templates."""

import dataclasses
import pathlib

from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.types import Sentence, Step, Trajectory, Triple
from tests import tiny_decoder

BORN = Triple("Edda Brandt", "born in", "Hafenstadt", "p1", 0)
WORK = Triple("Edda Brandt", "profession", "weaver", "p1", 1)
TOWN = Triple("Hafenstadt", "patron saint", "Saint Ulf", "p2", 0)
NOISE = Triple("Brandt & Sons", "founded in", "1984", "p3", 0)

STEPS = (
    Step(
        "Who is the patron of the town where Edda Brandt was born?",
        candidates=(BORN, WORK, NOISE),
        thought="The first fact says where she was born. The patron is missing.",
        kept=(BORN,),
        next_query="Who is the patron saint of Hafenstadt?",
    ),
    Step(
        "Who is the patron saint of Hafenstadt?",
        candidates=(NOISE, WORK),
        thought="None of these helps.",
        next_query="Which saint protects Hafenstadt?",
    ),
    Step(
        "Which saint protects Hafenstadt?",
        candidates=(NOISE, TOWN),
        thought="Saint Ulf is the patron of Hafenstadt.",
        kept=(TOWN,),
    ),
)


def trajectory(number: int = 0, steps: int = 3, teacher: str = "annotations") -> Trajectory:
    """Returns a trajectory of ``steps`` rounds; ``number`` varies its length and names."""
    numbered = []
    for step in STEPS[:steps]:
        noise = tuple(NOISE._replace(tail=f"year {i}") for i in range(number % 4))
        numbered.append(
            dataclasses.replace(
                step,
                candidates=(*step.candidates, *noise),
                scores=(0.5,) * (len(step.candidates) + len(noise)),
                thought=step.thought + " Indeed." * (number % 3),
            )
        )
    return Trajectory(
        question_id=f"q{number}",
        question=STEPS[0].query + f" ({number})" * bool(number),
        teacher=teacher,
        steps=tuple(numbered),
        end="stopped",
        solved=True,
    )


def of_sentences(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with sentences in place of triples."""

    def sentences(facts):
        return tuple(
            Sentence(
                f"{t.passage_id} {t.tail}", t.sentence, f"{t.head}: Its {t.relation}: {t.tail}."
            )
            for t in facts
        )

    steps = (
        dataclasses.replace(s, candidates=sentences(s.candidates), kept=sentences(s.kept))
        for s in trajectory.steps
    )
    return dataclasses.replace(trajectory, steps=tuple(steps))


def tiny_tokenizer(folder: pathlib.Path, template: str | None = "") -> ChatTokenizer:
    """Returns the tiny decoder's tokenizer; ``template`` replaces its template, None removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_decoder.write_tokenizer(folder)
    tokenizer = ChatTokenizer.load(folder).tokenizer
    if template != "":
        tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)
