"""C2RAG's sufficiency as CIRAG's stop signal: do the facts kept so far ground a plan? Ours.

C2RAG's: the plan of constraints with its validation, and how a plan is grounded (its section 3.2):
anchors, alignment of relations, reranking, N_eff over what competes (Eq. 7 to 9), binding,
propagation. Ours: the graph is that of CIRAG's core triples alone, anew in every round. The rounds
end once every unknown of the plan is bound, which it is where what speaks for it suffices, and
every constraint has a fact of its own: among few facts one is soon the only candidate of two. An
integrator that has nothing more to ask before that goes on with the first constraint that is
missing, written as C2RAG looks it up in text; nothing is read from text but by the next round. An
unknown that no constraint leads to is never bound, so that such a plan never ends the rounds.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.methods.c2rag import method as c2rag
from cirag_jax.methods.c2rag.constraints import Bindings, consistent, instances
from cirag_jax.methods.c2rag.prompts import linearise
from cirag_jax.methods.c2rag.search import Run
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.runtime.requests import Program
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Triple


def make_plan(
    question: str, config: C2ragConfig, parse_errors: collections.Counter[str]
) -> Program[Run | None]:
    """P, asked for once; None where it cannot be used, which is counted.

    ``config`` leaves such a plan empty (``plan_failure``).
    """
    run = Run(question, config, parse_errors=parse_errors)
    yield from c2rag.make_plan(run)
    return run if run.plan else None


class Verdict(NamedTuple):
    """What the facts say about a plan.

    Attributes:
      suffices: whether they ground it.
      query: the first constraint that is missing, names put in; None where there is none.
      notes: for the trace: N_eff of each constraint that was looked up, and the names that the
        grounded ones give.
    """

    suffices: bool
    query: str | None
    notes: Mapping[str, Any]


def check(planned: Run, facts: Sequence[Triple]) -> Program[Verdict]:
    """Grounds the plan in ``facts``, CIRAG's C."""
    graph = EntityIndex(facts, planned.config.normalization)
    run = dataclasses.replace(planned, graph=graph, pools={})
    bindings, _, n_eff = yield from c2rag.ground_plan(run)
    grounded = _grounded(run, bindings)
    names = {v: bindings[v] for place in grounded for v in run.plan[place].variables}
    missing = [c for i, c in enumerate(run.plan) if c.variables and i not in grounded]
    notes = {
        "n_eff": {
            linearise(run.plan[place]): None if number is None else round(number, 4)
            for place, number in sorted(n_eff.items())
        },
        "names": {variable: list(found) for variable, found in names.items()},
    }
    query = linearise(instances(missing[0], names)[0]) if missing else None
    return Verdict(not missing, query, notes)


def _grounded(run: Run, bindings: Bindings) -> dict[int, Triple]:
    """Places of constraints -> a fact that fits the bindings and is no other constraint's.

    None fits where an unknown is not bound.
    """
    fitting = {
        place: [candidate.fact.triple for candidate in consistent(pool, bindings, run.config)]
        for place, pool in sorted(run.pools.items())
    }
    owner: dict[Triple, int] = {}

    def claim(place: int, tried: set[Triple]) -> bool:
        """Takes a fact that is free, or whose constraint has another one left (Kuhn, 1955)."""
        for fact in fitting[place]:
            if fact in tried:
                continue
            tried.add(fact)
            if fact not in owner or claim(owner[fact], tried):
                owner[fact] = place
                return True
        return False

    for place in fitting:
        claim(place, set())
    return {place: fact for fact, place in sorted(owner.items(), key=lambda item: item[1])}
