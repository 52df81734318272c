"""Grounding of constraints in a graph: candidates, sufficiency check, and bindings of unknowns.

The functions are pure (sections 3.2 and 3.3); `cirag_jax.methods.c2rag.search` makes the requests.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.methods.c2rag.prompts import Constraint, is_variable
from cirag_jax.methods.c2rag.settings import C2ragConfig, Rule
from cirag_jax.methods.common.evidence import best_scores
from cirag_jax.triples.normalization import Normalization, SourcedTriple, name_key

_EPSILON = 1e-6  # The epsilon of Eq. 7; the paper does not give its value.


class Candidate(NamedTuple):
    """A triple that may ground a constraint, and its score z."""

    fact: SourcedTriple
    score: float


@dataclasses.dataclass(frozen=True)
class CandidatePool:
    """The candidate triples of a constraint (C_i^top in the paper).

    Attributes:
      constraint: the constraint tau_i.
      instances: copies of the constraint, with names in place of the unknowns that were bound at
        the lookup.
      anchors: names of the entities whose triples were searched.
      candidates: the candidates, best first.
      unbound: unknowns without a binding at the lookup, which the candidates may bind.
    """

    constraint: Constraint
    instances: tuple[Constraint, ...] = ()
    anchors: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    unbound: tuple[str, ...] = ()


# The names that each unknown is bound to, best first (the paper's E_b).
Bindings = Mapping[str, tuple[str, ...]]


def effective_number(p_N: Any) -> float:
    """Returns N_eff = 1 / sum of p^2, the number of competing candidates (Eq. 8)."""
    square = float(np.square(np.asarray(p_N, np.float64)).sum())
    return 1.0 / square if square else math.inf


def shares(score_N: Sequence[float], rule: Rule) -> np.ndarray:
    """Converts the scores of candidates to a probability distribution p.

    With the rule ``always_shift``, p is proportional to the distance from the lowest score (Eq. 7).
    ``shift_if_nonpositive`` (released code) does so if the lowest score is not positive; if it is
    positive, p is proportional to the scores. ``softmax`` is the softmax of the scores.
    """
    z_N = np.asarray(score_N, np.float64)
    if rule == "softmax":
        weight_N = np.exp(z_N - z_N.max())
    elif rule == "shift_if_nonpositive" and z_N.min() > 0:
        weight_N = z_N
    else:
        spread = float(z_N.max() - z_N.min())
        weight_N = z_N - z_N.min() + _EPSILON * max(1.0, spread)
    return weight_N / weight_N.sum()


class Check(NamedTuple):
    """The result of the sufficiency check, and N_eff (None without candidates)."""

    suffices: bool
    n_eff: float | None


def judge(scores: Sequence[float], config: C2ragConfig, *, always: bool = False) -> Check:
    """Checks whether candidates with these scores suffice (Eq. 9).

    With ``always``, any candidates suffice.
    """
    if config.floor_at_zero:
        scores = [max(score, 0.0) for score in scores]
    if not scores:
        return Check(False, None)
    n_eff = effective_number(shares(scores, config.neff_rule))
    high_enough = max(scores) >= config.min_score
    if always or config.sufficiency == "off":
        return Check(True, n_eff)
    if config.sufficiency == "score":
        return Check(high_enough, n_eff)
    return Check(n_eff <= config.gamma and high_enough, n_eff)


def instances(constraint: Constraint, bindings: Bindings) -> tuple[Constraint, ...]:
    """Returns copies of a constraint, one per combination of names of its bound unknowns."""
    ends = (bindings.get(end, (end,)) for end in (constraint.head, constraint.tail))
    return tuple(
        constraint._replace(head=head, tail=tail) for head, tail in itertools.product(*ends)
    )


def bound_name(
    pool: CandidatePool, variable: str, fact: SourcedTriple, end: str, form: Normalization
) -> str:
    """Returns the name that a candidate gives to an unknown, or an empty string.

    ``end=slot`` selects the end where the constraint has the unknown (Eq. 13). ``other_end``
    (released code) selects the end that is not an anchor, regardless of the triple's direction. It
    selects the slot if the pool has no anchors.
    """
    triple = fact.triple
    if end == "slot" or not pool.anchors:
        return triple.head if pool.constraint.head == variable else triple.tail
    anchors = {name_key(name, form) for name in pool.anchors}
    free = [name for name in (triple.head, triple.tail) if name_key(name, form) not in anchors]
    return free[0] if len(free) == 1 else ""


class Entity(NamedTuple):
    """A possible name of an unknown, and the sum of its scores over pools."""

    name: str
    score: float


def entities_of(variable: str, pools: Iterable[CandidatePool], config: C2ragConfig) -> list[Entity]:
    """Returns the possible names of an unknown, best first (Eq. 14).

    These are the names that all pools with a name share; or all names, if no name is shared or
    ``config.intersect`` is off. In a pool, a name has the score of its best candidate; the scores
    of all pools are added.
    """
    form = config.normalization
    names: dict[str, str] = {}
    scores_by_pool: list[dict[str, float]] = []
    for pool in pools:
        if variable not in pool.unbound:
            continue
        pairs = []
        for fact, score in pool.candidates:
            if name := bound_name(pool, variable, fact, config.binding_end, form):
                key = name_key(name, form)
                names.setdefault(key, name)
                pairs.append((key, max(score, 0.0) if config.floor_at_zero else score))
        if pairs:  # A pool that gives no name does not restrict the names of other pools.
            scores_by_pool.append(best_scores(pairs))
    common: set[str] = set()
    if scores_by_pool and config.intersect:
        common = set.intersection(*map(set, scores_by_pool))
    entities = [
        Entity(name, sum(scores[key] for scores in scores_by_pool if key in scores))
        for key, name in names.items()
        if key in common or not common
    ]
    return sorted(entities, key=lambda entity: -entity.score)


class Grounding(NamedTuple):
    """The constraints of a plan that the graph grounds, and the names of bound unknowns.

    Attributes:
      bindings: the names E_b of every bound unknown.
      resolved: indices of the constraints that the graph grounds.
      n_eff: N_eff of each constraint (with ``neff_unit=variable``, the largest N_eff of its
        unknowns); None without candidates.
    """

    bindings: dict[str, tuple[str, ...]]
    resolved: frozenset[int]
    n_eff: Mapping[int, float | None]


def ground(
    plan: Sequence[Constraint],
    pools: Mapping[int, CandidatePool],
    text_bindings: Bindings,
    config: C2ragConfig,
) -> Grounding:
    """Checks the candidates of each constraint, and binds unknowns to sufficient candidates.

    With ``config.neff_unit=variable``, the possible names of each unknown are checked instead.
    Bindings that were read from text take precedence.
    """
    unknowns = tuple(dict.fromkeys(v for constraint in plan for v in constraint.variables))
    bindings = dict(text_bindings)
    if config.neff_unit == "constraint":
        checks = {
            i: judge([c.score for c in pool.candidates], config, always=i < config.plain_hops)
            for i, pool in pools.items()
        }
        resolved = frozenset(i for i, result in checks.items() if result.suffices)
        for unknown in unknowns:
            entities = entities_of(unknown, (pools[i] for i in sorted(resolved)), config)
            if entities and unknown not in text_bindings:
                bindings[unknown] = _names(entities, config)
        return Grounding(bindings, resolved, {i: result.n_eff for i, result in checks.items()})
    check_of: dict[str, Check] = {}
    for unknown in unknowns:
        entities = entities_of(unknown, pools.values(), config)[: config.num_structural]
        check_of[unknown] = judge([entity.score for entity in entities], config)
        if check_of[unknown].suffices and unknown not in text_bindings:
            bindings[unknown] = _names(entities, config)
    resolved = frozenset(
        i
        for i in pools
        if all(end in bindings if is_variable(end) else end for end in (plan[i].head, plan[i].tail))
    )
    n_eff = {i: _largest(check_of[v].n_eff for v in plan[i].variables) for i in pools}
    return Grounding(bindings, resolved, n_eff)


def consistent(
    pool: CandidatePool, bindings: Bindings, config: C2ragConfig
) -> tuple[Candidate, ...]:
    """Returns the candidates of a pool that agree with the bindings of its unknowns."""
    form = config.normalization
    allowed = {v: {name_key(name, form) for name in bindings.get(v, ())} for v in pool.unbound}
    return tuple(
        candidate
        for candidate in pool.candidates
        if all(
            name_key(bound_name(pool, v, candidate.fact, config.binding_end, form), form) in names
            for v, names in allowed.items()
        )
    )


def _names(entities: Sequence[Entity], config: C2ragConfig) -> tuple[str, ...]:
    return tuple(entity.name for entity in entities[: config.max_bound or None])


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
