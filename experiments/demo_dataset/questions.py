"""Generates multi-hop questions whose chain of facts is the only one that answers them.

A chain starts at an entity that its name identifies, and follows relations with exactly one tail
(``STEPS``). Chains with a shortcut are dropped: no other passage may link the two ends of a step,
no earlier passage may contain the answer, and the question may name only the first entity.
Comparisons compare a number of two entities of the same kind. Bridge comparisons compare a number
of the entities that a step leads to. The questions of the three splits start from disjoint sets of
entities.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from cirag_jax.datasets.demo import wording
from cirag_jax.datasets.demo.wording import ASKS, HARMLESS, STARTS, STEPS, pick, stable_hash
from cirag_jax.types import Passage, Question, Triple
from experiments.demo_dataset.graph import Entity, Fact, World
from experiments.demo_dataset.render import find_triple, said_name
from experiments.demo_dataset.templates import BRIDGE_COMPARES, COMPARES
from experiments.demo_dataset.text import fold, shuffled

Rendered = dict[str, tuple[Passage, tuple[Triple, ...]]]

# Types with their numbers of hops, and the target numbers of questions by split. A comparison has
# two hops, one to each entity.
KINDS = (
    ("bridge", 2), ("bridge", 3), ("bridge", 4), ("comparison", 2), ("bridge_comparison", 4),
)  # fmt: skip
TARGETS = {
    "train": (760, 760, 400, 250, 330),
    "dev": (100, 100, 52, 30, 42),
    "test": (160, 160, 82, 50, 68),
}
MAX_PER_END = {"train": 8, "dev": 2, "test": 2}
MAX_PER_START = 3
DISTRACTORS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One fact of a chain, with the entity whose passage states it."""

    entity: Entity
    fact: Fact


Chain = tuple[Hop, ...]
Path = tuple[tuple[str, str], ...]


def steps(chain: Chain) -> Path:
    """Returns the (entity key, relation) pairs of a chain."""
    return tuple((hop.entity.key, hop.fact.relation) for hop in chain)


class Asker:
    """Indexes of the stated facts, to find chains that are the only way to their answer."""

    def __init__(self, world: World, rendered: Rendered) -> None:
        self.world = world
        self.rendered = rendered
        self.links: dict[frozenset[str], set[tuple[str, str]]] = defaultdict(set)
        self.names: Counter[tuple[str, str]] = Counter()
        self.texts: dict[str, str] = {}
        self.tails: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.kinds: dict[str, list[str]] = defaultdict(list)
        self.same_name: dict[str, list[str]] = defaultdict(list)
        self._stated: dict[tuple[str, str], Fact | None] = {}
        for key in shuffled(list(rendered), "index"):
            self._index(world.entities[key])

    def _index(self, entity: Entity) -> None:
        passage, triples = self.rendered[entity.key]
        stated = {triple.tail for triple in triples}
        self.texts[entity.key] = f" {fold(passage.text)} "
        self.names[entity.kind, fold(entity.name)] += 1
        self.kinds[entity.kind].append(entity.key)
        self.same_name[fold(entity.name)].append(entity.key)
        for relation, facts in entity.facts.items():
            for fact in facts:
                if fact.value in stated:
                    pair = frozenset((fold(entity.name), fold(fact.value)))
                    self.links[pair].add((entity.key, relation))
                    self.tails[relation, fold(fact.value)].append(entity.key)

    def stated(self, entity: Entity, relation: str) -> Fact | None:
        """Returns the single fact of a relation, if only the entity's own passage states it."""
        key = (entity.key, relation)
        if key not in self._stated:
            self._stated[key] = self._find_stated(entity, relation)
        return self._stated[key]

    def _find_stated(self, entity: Entity, relation: str) -> Fact | None:
        fact = entity.one(relation)
        if fact is None or entity.key not in self.rendered:
            return None
        links = self.links.get(frozenset((fold(entity.name), fold(fact.value))), set())
        allowed = HARMLESS.get(relation, ())
        others = {link for link in links if link[0] != entity.key and link[1] not in allowed}
        return fact if (entity.key, relation) in links and not others else None

    def chains(self, start: Entity, length: int) -> list[Chain]:
        """Returns the chains of ``length`` facts that start at an entity, in a stable order."""
        chains: list[Chain] = []
        self._extend((), start, length, chains)
        chains = [chain for chain in chains if self.is_only_way(chain)]
        return sorted(chains, key=lambda chain: stable_hash("chain", *steps(chain)))

    def _extend(self, prefix: Chain, entity: Entity, remaining: int, chains: list[Chain]) -> None:
        for relation in entity.facts:
            if remaining == 1 and relation in ASKS or remaining > 1 and relation in STEPS:
                fact = self.stated(entity, relation)
                if fact is None:
                    continue
                chain = (*prefix, Hop(entity, fact))
                if remaining == 1:
                    chains.append(chain)
                    continue
                target = self.world.entities.get(fact.target or "")
                if target is not None and self.is_clear(target, chain):
                    self._extend(chain, target, remaining - 1, chains)

    def is_clear(self, target: Entity, chain: Chain) -> bool:
        """Returns whether the name is unique among its kind and the target is not in the chain."""
        is_unique = self.names[target.kind, fold(target.name)] == 1
        return is_unique and all(hop.entity.key != target.key for hop in chain)

    def is_only_way(self, chain: Chain) -> bool:
        """Returns whether no passage before the last contains the answer or skips an entity."""
        answer = f" {fold(chain[-1].fact.value)} "
        if not answer.strip() or any(answer in self.texts[hop.entity.key] for hop in chain[:-1]):
            return False
        names = [f" {fold(hop.entity.name)} " for hop in chain]
        return all(
            name not in self.texts[chain[at].entity.key]
            for later, name in enumerate(names)
            for at in range(later - 1)
        )

    def distractors(self, gold: list[str], salt: str) -> list[str]:
        """Returns passages that share a name, fact or kind with gold ones, hardest first."""
        keys: dict[str, None] = {}
        per_gold = -(-DISTRACTORS // len(gold))
        for key in gold:
            entity = self.world.entities[key]
            similar = [k for k in self.same_name[fold(entity.name)] if k not in gold]
            for relation, facts in entity.facts.items():
                for fact in facts[:1]:
                    same_tail = self.tails.get((relation, fold(fact.value)), [])
                    similar += neighbours(same_tail, gold, 1, salt, relation)
            same_kind = neighbours(self.kinds[entity.kind], gold, per_gold, salt, key)
            keys.update(dict.fromkeys((similar[:per_gold] + same_kind)[: per_gold + 1]))
        same_kind = self.kinds[self.world.entities[gold[0]].kind]
        keys.update(dict.fromkeys(neighbours(same_kind, gold, 2 * DISTRACTORS, salt)))
        return list(keys)[:DISTRACTORS]


def neighbours(keys: list[str], excluded: list[str], number: int, *salt: object) -> list[str]:
    """Returns up to ``number`` neighboring keys, from a position that ``salt`` determines."""
    start = stable_hash(*salt) % max(1, len(keys))
    window = keys[start : start + number + len(excluded)]
    window += keys[: max(0, number + len(excluded) - len(window))]
    return [key for key in dict.fromkeys(window) if key not in excluded][:number]


def phrase(chain: Chain, salt: object) -> str:
    """Returns the question of a bridge chain."""
    first = chain[0].entity
    types = [hop.fact.relation for hop in chain]
    return wording.phrase(first.kind, first.name, said_name(first), types, salt)


def split_of(entity: Entity) -> str:
    """Returns the only split whose questions may start from this entity."""
    part = stable_hash("split", entity.key) % 100
    return "test" if part < 22 else "dev" if part < 35 else "train"


def names_something(question: str, chain: Chain) -> bool:
    """Returns whether the question contains a later entity or the answer."""
    text = f" {fold(question)} "
    return any(f" {fold(hop.fact.value)} " in text for hop in chain)


def answers_of(entity: Entity | None, value: str) -> tuple[str, ...]:
    """Returns the accepted answers, including a country's name with an article."""
    forms = wording.answer_forms(value)
    if entity is not None and entity.kind == "country":
        forms = (*forms, f"the {value}")
    return forms


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A question without an id and a context."""

    text: str
    kind: str
    answers: tuple[str, ...]
    chain: Chain

    @property
    def keys(self) -> list[str]:
        """The keys of the gold entities in order."""
        return list(dict.fromkeys(hop.entity.key for hop in self.chain))

    @property
    def paths(self) -> list[Path]:
        """The steps of the chain; a bridge comparison has two paths."""
        path = steps(self.chain)
        return [path[0::2], path[1::2]] if self.kind == "bridge_comparison" else [path]


def chain_of(item: Draft | Chain) -> Chain:
    """Returns the chain of a candidate, which may already be phrased."""
    return item.chain if isinstance(item, Draft) else item


def bridge_draft(asker: Asker, chain: Chain) -> Draft | None:
    """Returns the question of a chain, unless it contains a later entity."""
    text = phrase(chain, stable_hash("phrase", *steps(chain)))
    if names_something(text, chain):
        return None
    last = chain[-1].fact
    target = asker.world.entities.get(last.target or "")
    return Draft(text[0].upper() + text[1:], "bridge", answers_of(target, last.value), chain)


def pairs(entities: list[Entity], salt: str) -> Iterator[tuple[Entity, Entity]]:
    """Yields pairs of neighbors in a stable order; every entity is in at most two pairs."""
    order = shuffled([entity.key for entity in entities], salt)
    by_key = {entity.key: entity for entity in entities}
    for left, right in zip(order, order[1:], strict=False):
        yield by_key[left], by_key[right]


def compare(
    pair: tuple[Entity, Entity],
    numbers: tuple[float | None, float | None],
    phrasings: tuple[list[str], list[str]],
    chain: Chain,
    kind: str,
) -> Draft | None:
    """Returns a question for the larger or smaller of two numbers, if they clearly differ."""
    (a, b), (x, y) = pair, numbers
    # Skips equal numbers, and numbers above 2100 that differ by at most 2 %.
    if x is None or y is None or abs(x - y) <= 0.02 * max(abs(x), abs(y)) * (max(x, y) > 2100):
        return None
    salt = stable_hash(kind, a.key, b.key, chain[-1].fact.relation)
    larger = salt % 2 == 0
    text = pick(phrasings[0 if larger else 1], salt)
    text = text.format(a=plain_start(a), b=plain_start(b)).replace("??", "?")
    winner = a if (x > y) == larger else b
    return Draft(text[0].upper() + text[1:], kind, (winner.name,), chain)


def plain_start(entity: Entity) -> str:
    """Returns an entity's name for a comparison, whose question states the kind of entities."""
    return entity.name.lower() if entity.kind == "element" else said_name(entity)


def comparisons(asker: Asker, entities: list[Entity]) -> Iterator[Draft]:
    """Yields comparisons of two entities by a number in their own passages."""
    for relation, phrasings in COMPARES.items():
        stated = {e.key: fact for e in entities if (fact := asker.stated(e, relation))}
        for a, b in pairs([e for e in entities if e.key in stated], relation):
            x, y = stated[a.key], stated[b.key]
            chain = (Hop(a, x), Hop(b, y))
            draft = compare((a, b), (x.number, y.number), phrasings, chain, "comparison")
            if draft:
                yield draft


def bridge_comparisons(asker: Asker, entities: list[Entity]) -> Iterator[Draft]:
    """Yields comparisons of two entities by a number of the entities that are one step away."""
    for (step, relation), phrasings in BRIDGE_COMPARES.items():
        chains = {
            entity.key: chain
            for entity in entities
            if (chain := numbered_chain(asker, entity, step, relation))
        }
        for a, b in pairs([e for e in entities if e.key in chains], f"{step} {relation}"):
            (a1, a2), (b1, b2) = chains[a.key], chains[b.key]
            if a2.entity.key == b2.entity.key:
                continue
            numbers, chain = (a2.fact.number, b2.fact.number), (a1, b1, a2, b2)
            draft = compare((a, b), numbers, phrasings, chain, "bridge_comparison")
            if draft and not names_something(draft.text, (a1, b1)):
                yield draft


def numbered_chain(asker: Asker, entity: Entity, step: str, relation: str) -> Chain | None:
    """Returns two hops from an entity to a number, if their passages allow no shortcut."""
    first = asker.stated(entity, step)
    target = asker.world.entities.get(first.target or "") if first else None
    second = asker.stated(target, relation) if target else None
    if first is None or target is None or second is None:
        return None
    chain = (Hop(entity, first), Hop(target, second))
    is_clear = asker.is_clear(target, chain[:1]) and asker.is_only_way(chain)
    return chain if is_clear and second.number is not None else None


def balanced(
    asker: Asker, candidates: Iterable[Draft | Chain], target: int, max_per_end: int
) -> list[Draft]:
    """Returns up to ``target`` drafts, taking turns between the paths of relations.

    At most `MAX_PER_START` drafts start from the same entity, and at most ``max_per_end`` end with
    the same fact, so a few entities or large countries do not dominate the split. Only selected
    chains are phrased.
    """
    groups: dict[tuple[str, ...], list[Draft | Chain]] = defaultdict(list)
    for item in candidates:
        groups[tuple(hop.fact.relation for hop in chain_of(item))].append(item)

    def order(item: Draft | Chain) -> int:
        return stable_hash("mix", *steps(chain_of(item)))

    queues = [iter(sorted(groups[path], key=order)) for path in shuffled(sorted(groups), "path")]
    selected: list[Draft] = []
    uses: Counter[object] = Counter()
    while queues and len(selected) < target:
        remaining = []
        for queue in queues:
            draft = next_draft(asker, queue, uses, max_per_end)
            if draft is not None:
                selected.append(draft)
                remaining.append(queue)
        queues = remaining
    return selected[:target]


def next_draft(
    asker: Asker, queue: Iterator[Draft | Chain], uses: Counter[object], max_per_end: int
) -> Draft | None:
    """Returns the next draft whose first entity and last fact are below their limits."""
    for item in queue:
        path = steps(chain_of(item))
        start, end = path[0][0], path[-1]
        if uses[start] >= MAX_PER_START or uses[end] >= max_per_end:
            continue
        draft = item if isinstance(item, Draft) else bridge_draft(asker, item)
        if draft is not None:
            uses[start] += 1
            uses[end] += 1
            return draft
    return None


def startable(asker: Asker, entity: Entity) -> bool:
    """Returns whether an entity is identified by its name."""
    has_own_name = len(asker.same_name[fold(entity.name)]) == 1
    has_own_name = has_own_name or entity.kind in ("film", "element")
    is_unique = entity.unique and asker.names[entity.kind, fold(entity.name)] == 1
    return is_unique and has_own_name and entity.kind in STARTS


def draft_split(asker: Asker, split: str) -> list[Draft]:
    """Returns all drafts of a split."""
    entities = [
        entity
        for key in shuffled(sorted(asker.rendered), "starts")
        if startable(asker, entity := asker.world.entities[key]) and split_of(entity) == split
    ]
    out: list[Draft] = []
    for (kind, hops), target in zip(KINDS, TARGETS[split], strict=True):
        if kind == "bridge":
            drafts: Iterable[Draft | Chain] = (c for e in entities for c in asker.chains(e, hops))
        elif kind == "comparison":
            drafts = comparisons(asker, entities)
        else:
            drafts = bridge_comparisons(asker, entities)
        out += balanced(asker, drafts, target, MAX_PER_END[split])
    return out


def finish(asker: Asker, draft: Draft, split: str, number: int) -> Question:
    """Adds gold passages, sentences, triples and distractors to a draft."""
    identifier = f"{split}-{number:04d}"
    triples = [find_triple(asker.rendered[hop.entity.key][1], hop.fact) for hop in draft.chain]
    gold = [asker.rendered[key][0].id for key in draft.keys]
    others = [asker.rendered[key][0].id for key in asker.distractors(draft.keys, draft.text)]
    return Question(
        id=identifier,
        question=draft.text,
        answers=draft.answers,
        type=draft.kind,
        hops=len(draft.chain),
        split=split,
        supporting=tuple(gold),
        supporting_sentences=tuple(
            dict.fromkeys((t.passage_id or "", t.sentence or 0) for t in triples)
        ),
        context=tuple(shuffled(gold + others, draft.text)),
        evidences=tuple((t.head, t.relation, t.tail) for t in triples),
    )


def parts(path: Path) -> Iterator[Path]:
    """Yields all parts of a path with at least two steps, including the path itself."""
    for start in range(len(path) - 1):
        for stop in range(start + 2, len(path) + 1):
            yield path[start:stop]


def build_questions(world: World, rendered: Rendered) -> tuple[Question, ...]:
    """Generates the questions of the three splits, whose chains do not contain each other.

    Questions of dev and test are in the fold ``unseen`` if no training question uses any of their
    facts, and in ``seen`` if one does.
    """
    asker = Asker(world, rendered)
    out: dict[str, list[Question]] = {}
    used_paths: set[Path] = set()
    used_parts: set[Path] = set()
    for split in ("test", "dev", "train"):
        drafts = [
            draft
            for draft in draft_split(asker, split)
            for paths in [draft.paths]
            if not any(path in used_parts or used_paths.intersection(parts(path)) for path in paths)
        ]
        by_text = {draft.text: draft for draft in reversed(drafts)}
        drafts = [draft for draft in drafts if by_text[draft.text] is draft]
        out[split] = [finish(asker, draft, split, at) for at, draft in enumerate(drafts, start=1)]
        for draft in drafts:
            used_paths.update(draft.paths)
            used_parts.update(part for path in draft.paths for part in parts(path))
    training_facts = {fact for question in out["train"] for fact in question.evidences or ()}
    for split in ("dev", "test"):
        out[split] = [
            dataclasses.replace(
                q, fold="unseen" if training_facts.isdisjoint(q.evidences or ()) else "seen"
            )
            for q in out[split]
        ]
    return tuple(question for split in ("train", "dev", "test") for question in out[split])
