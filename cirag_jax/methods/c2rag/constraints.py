"""C2RAG's constraints against a graph: what was found for each, whether it suffices, what it binds.

Pure functions; the requests are in `cirag_jax.methods.c2rag.method`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.methods.c2rag.prompts import Constraint, is_variable
from cirag_jax.methods.c2rag.settings import C2ragConfig, Rule
from cirag_jax.triples.normalization import Normalization, SourcedTriple, name_key

_EPSILON = 1e-6  # Of Eq. 7; the paper leaves it open.


class Candidate(NamedTuple):
    """A triple that may fill a constraint, and the reranker's score z."""

    fact: SourcedTriple
    score: float


@dataclasses.dataclass(frozen=True)
class CandidatePool:
    """What the graph says about a constraint (the paper's C_i^top).

    Attributes:
      constraint: tau.
      instances: the constraint with the names that its bound unknowns had, as it was looked up.
      anchors: names of the graph that it was anchored at.
      candidates: best first.
      unbound: its unknowns that had no name then, and that the candidates may bind.
    """

    constraint: Constraint
    instances: tuple[Constraint, ...] = ()
    anchors: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    unbound: tuple[str, ...] = ()


# Unknown -> the names it is bound to, best first (the paper's E_b).
Bindings = Mapping[str, tuple[str, ...]]


# ------------------------------------------------------------------------------------ sufficiency


def effective_number(p_N: Any) -> float:
    """N_eff = 1 / sum of p^2: how many candidates compete (Eq. 8); infinite where there is none.

    Args:
      p_N: a distribution.
    """
    square = float(np.square(np.asarray(p_N, np.float64)).sum())
    return 1.0 / square if square else math.inf


def shares(score_N: Sequence[float], rule: Rule) -> np.ndarray:
    """Scores as a distribution over the candidates.

    Args:
      score_N: of the candidates, at least one.
      rule: ``always_shift``: in proportion to the distance from the lowest (Eq. 7);
        ``shift_if_nonpositive``: the same only where the lowest is not positive, else in
        proportion to the scores (released code); ``softmax``.
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
    """Whether scores suffice, and their N_eff (None: there are none)."""

    suffices: bool
    n_eff: float | None


def check(scores: Sequence[float], config: C2ragConfig, *, always: bool = False) -> Check:
    """The sufficiency check (Eq. 9).

    Args:
      scores: of the candidates.
      config: of `C2ragConfig`.
      always: whatever there is suffices.
    """
    if config.floor_at_zero:
        scores = [max(score, 0.0) for score in scores]
    if not scores:
        return Check(False, None)
    n_eff = effective_number(shares(scores, config.neff_rule))
    high_enough = max(scores) >= config.min_score
    if always or config.sufficiency == "none":
        return Check(True, n_eff)
    if config.sufficiency == "score":
        return Check(high_enough, n_eff)
    return Check(n_eff <= config.gamma and high_enough, n_eff)


# --------------------------------------------------------------------------- instances and binding


def instances(constraint: Constraint, bindings: Bindings) -> tuple[Constraint, ...]:
    """The constraint with every choice of names for its bound unknowns; itself where none is."""
    ends = (bindings.get(end, (end,)) for end in (constraint.head, constraint.tail))
    return tuple(
        constraint._replace(head=head, tail=tail) for head, tail in itertools.product(*ends)
    )


def bound_name(
    pool: CandidatePool, variable: str, fact: SourcedTriple, end: str, form: Normalization
) -> str:
    """The name that a candidate gives an unknown; empty where it gives none.

    Args:
      pool: of the candidate.
      variable: of the pool's constraint.
      fact: the candidate.
      end: ``slot``: the end where the constraint has the unknown (Eq. 13); ``other_end``: the one
        that is no anchor, whatever the triple's direction (released code), and where the graph was
        not entered by anchors, the slot.
      form: normal form of names.
    """
    triple = fact.triple
    if end == "slot" or not pool.anchors:
        return triple.head if pool.constraint.head == variable else triple.tail
    anchors = {name_key(name, form) for name in pool.anchors}
    free = [name for name in (triple.head, triple.tail) if name_key(name, form) not in anchors]
    return free[0] if len(free) == 1 else ""


class Entity(NamedTuple):
    """A name that an unknown may have, and the sum of the scores that speak for it."""

    name: str
    score: float


def entities_of(variable: str, pools: Iterable[CandidatePool], config: C2ragConfig) -> list[Entity]:
    """What the pools say of an unknown, best first: what all agree on, else what any says (Eq. 14).

    A pool scores an entity by its best candidate; an entity's score is the sum over the pools.
    """
    names: dict[str, str] = {}
    scores: dict[str, list[float]] = {}
    sets: list[set[str]] = []
    for pool in pools:
        if variable not in pool.unbound:
            continue
        best: dict[str, float] = {}
        for fact, score in pool.candidates:
            name = bound_name(pool, variable, fact, config.binding_end, config.normalization)
            if not name:
                continue
            key = name_key(name, config.normalization)
            names.setdefault(key, name)
            score = max(score, 0.0) if config.floor_at_zero else score
            best[key] = max(score, best.get(key, score))
        for key, score in best.items():
            scores.setdefault(key, []).append(score)
        sets.append(set(best))
    common = set.intersection(*sets) if sets and config.intersect else set()
    chosen = [key for key in names if key in common or not common]
    found = [Entity(names[key], sum(scores[key])) for key in chosen]
    return sorted(found, key=lambda entity: -entity.score)


class Grounding(NamedTuple):
    """The state of a plan after its pools were checked.

    Attributes:
      bindings: E_b of every bound unknown.
      resolved: places of the constraints that the graph grounds.
      n_eff: place -> N_eff, of a constraint or the largest of its unknowns' (None: no candidate).
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
    """Checks what was found for each constraint, or for each unknown, and binds what suffices.

    Args:
      plan: the constraints.
      pools: of those looked up so far, by place in the plan.
      text_bindings: bindings that stand whatever the graph says (read from text).
      config: of `C2ragConfig`.
    """
    if config.neff_unit == "constraint":
        checks = {
            i: check([c.score for c in pool.candidates], config, always=i < config.plain_hops)
            for i, pool in pools.items()
        }
        resolved = frozenset(i for i, found in checks.items() if found.suffices)
        bindings = dict(text_bindings)
        for variable in _variables(plan):
            found = entities_of(variable, (pools[i] for i in sorted(resolved)), config)
            if found and variable not in text_bindings:
                bindings[variable] = _names(found, config.max_bound)
        return Grounding(bindings, resolved, {i: found.n_eff for i, found in checks.items()})
    bindings, of_variable = dict(text_bindings), {}
    for variable in _variables(plan):
        found = entities_of(variable, pools.values(), config)[: config.num_structural]
        of_variable[variable] = check([entity.score for entity in found], config)
        if of_variable[variable].suffices and variable not in text_bindings:
            bindings[variable] = _names(found, config.max_bound)
    ends = {i: (plan[i].head, plan[i].tail) for i in pools}
    resolved = frozenset(
        i for i, both in ends.items() if all(e in bindings if is_variable(e) else e for e in both)
    )
    n_eff = {i: _largest(of_variable[v].n_eff for v in plan[i].variables) for i in pools}
    return Grounding(bindings, resolved, n_eff)


def consistent(
    pool: CandidatePool, bindings: Bindings, config: C2ragConfig
) -> tuple[Candidate, ...]:
    """The candidates that give their unknowns names these are bound to."""
    form = config.normalization
    kept = []
    for candidate in pool.candidates:
        for variable in pool.unbound:
            names = {name_key(name, form) for name in bindings.get(variable, ())}
            name = bound_name(pool, variable, candidate.fact, config.binding_end, form)
            if name_key(name, form) not in names:
                break
        else:
            kept.append(candidate)
    return tuple(kept)


def _variables(plan: Sequence[Constraint]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v for constraint in plan for v in constraint.variables))


def _names(found: Sequence[Entity], most: int) -> tuple[str, ...]:
    return tuple(entity.name for entity in found[: most or None])


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
