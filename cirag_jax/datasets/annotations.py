"""The gold chain of a question, taken from its annotations as hops: the one reading of them.

2WikiMultihopQA and the built-in dataset annotate triples, MuSiQue sub-questions, HotpotQA
sentences; elsewhere gold passages may be all that is known. The aligner's silver chains, the
cross-encoder's pairs and the oracle teacher are built on these hops.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from cirag_jax.datasets import relations
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.types import Passage, Question

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about an and are as at by did do does for from had has have he her his how in is it its "
        "many much of on or s she that the their they this to was were what when where which who "
        "whom whose will with would",
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One fact that a question needs. ``#k`` in its texts stands for the answer of the k-th hop.

    Attributes:
      asks: the sub-question; empty where none is annotated.
      noun: what it asks for, as a noun phrase; empty where none can be made.
      keywords: the same as words to search for.
      about: what a fact that supports it must speak of.
      is_entity: whether ``about`` is an entity, of whose name such a fact must have a good part.
      answers: what such a fact must state, in any of these forms; empty: nothing of its own.
      places: (passage id, sentence index) of the facts that may support it; None: any sentence.
        Where sentences are named without a triple, the hop is all of them.
      parents: earlier hops whose answers it needs.
      triple: the annotated fact.
    """

    asks: str
    noun: str
    keywords: str
    about: str
    is_entity: bool
    answers: tuple[str, ...]
    places: tuple[tuple[str, int | None], ...]
    parents: tuple[int, ...] = ()
    triple: tuple[str, str, str] | None = None


def hops_of(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """The hops of a question, in reading order; empty where nothing is annotated.

    ``corpus`` has its gold passages; those that it lacks give no hop.
    """
    if question.evidences and question.supporting:
        return _hops_of_evidences(question)
    if question.decomposition:
        return _hops_of_decomposition(question)
    return _hops_of_places(question, corpus)


def fill(text: str, known: Mapping[int, str]) -> str:
    """``text`` with the answers of solved hops for ``#k``; others are left as they stand."""
    return re.sub(r"#(\d+)", lambda m: known.get(int(m[1]) - 1, m[0]), text)


def fact_of(hop: Hop, known: Mapping[int, str]) -> tuple[str, str, str] | None:
    """What a hop states: the annotated triple, or one that its entity, relation and answer make.

    A sub-question in free words makes none.
    """
    if hop.triple is not None or not (hop.is_entity and hop.answers):
        return hop.triple
    relation = hop.keywords.removeprefix(hop.about).strip()
    return fill(hop.about, known), relation, hop.answers[0]


def _hops_of_evidences(question: Question) -> tuple[Hop, ...]:
    """A triple needs the earlier one whose tail is its head."""
    evidences = question.evidences or ()
    exact = question.supporting_sentences or ()
    inside = {passage_id for passage_id, _ in exact}
    places = (*exact, *_anywhere(i for i in question.supporting or () if i not in inside))
    hops: list[Hop] = []
    free = set()  # tails that no later head took up
    for index, (head, relation, tail) in enumerate(evidences):
        likeness = [overlap(earlier, head) for _, _, earlier in evidences[:index]]
        # Every near name: a hop may wait for one more than it needs, never for one less.
        parents = [i for i in range(index) if likeness[i] > 0.6]
        if not parents and not names(question.question, head):
            # "André de Toth" may continue as "Andre DeToth": the head can only be an earlier tail.
            parents = sorted(free)[:1]
        nearest = max(parents, key=likeness.__getitem__, default=None)
        free -= {nearest}
        free.add(index)
        named = head if nearest is None else f"#{nearest + 1}"
        hops.append(
            Hop(
                relations.sub_question(relation, named),
                relations.noun_phrase(relation, named),
                f"{named} {relation}",
                named,
                True,
                _answers(question, tail),
                places,
                tuple(parents),
                (head, relation, tail),
            )
        )
    return tuple(hops)


def _hops_of_decomposition(question: Question) -> tuple[Hop, ...]:
    """``#k`` makes the k-th step a parent; ``X >> relation`` is a question without words."""
    hops = []
    for index, step in enumerate(question.decomposition or ()):
        text = " ".join(step.question.split()).replace("( ", "(").replace(" )", ")")
        parents = {int(k) - 1 for k in re.findall(r"#(\d+)", text) if 0 < int(k) <= index}
        head, arrow, relation = text.partition(" >> ")
        if arrow:
            asks, noun = (
                f(relation, head) for f in (relations.sub_question, relations.noun_phrase)
            )
            keywords, about = f"{head} {relation}", head
        else:
            asks, noun = _as_question(text), ""
            keywords = " ".join(w for w in text.rstrip("?").split() if w.lower() not in _STOP_WORDS)
            about = text
        places = _anywhere([step.supporting] if step.supporting else question.supporting)
        answers = _answers(question, step.answer)
        order = tuple(sorted(parents))
        hops.append(Hop(asks, noun, keywords, about, bool(arrow), answers, places, order))
    return tuple(hops)


def _hops_of_places(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """Supporting sentences (HotpotQA) or passages, of which nobody says what they answer.

    The annotation lists passages in no order; the passage that holds the answer is read last, one
    that the question names before one that it does not. Each but the last has to lead to the next,
    except in a comparison, where they have no order.
    """
    sentences: dict[str, list[int]] = {i: [] for i in question.supporting or () if i in corpus}
    for passage_id, sentence in question.supporting_sentences or ():
        if passage_id in corpus:
            sentences.setdefault(passage_id, []).append(sentence)

    def order(passage_id: str) -> tuple[bool, bool]:
        passage = corpus[passage_id]
        text = f"{passage.title}. {passage.text}".lower()
        holds_answer = any(answer.lower() in text for answer in question.answers)
        return holds_answer, not names(question.question, passage.title)

    ids = sorted(sentences, key=order)
    hops: list[Hop] = []
    for index, passage_id in enumerate(ids):
        title = corpus[passage_id].title
        text = _text(corpus[passage_id], sentences[passage_id])
        if question.type == "comparison":
            parents, answers = (), ()
        else:
            parents = (index - 1,) if index else ()
            following = [corpus[i].title for i in ids[index + 1 :][:1]] or question.answers
            answers = tuple(a for a in following if names(text, a))
        is_linked = bool(parents) and title in hops[-1].answers
        about = f"#{index}" if is_linked else title
        can_be_asked = is_linked or names(question.question, title)
        hops.append(
            Hop(
                f"What about {about}: {question.question}" if can_be_asked else "",
                "",
                about if can_be_asked else "",
                f"{about} {question.question}" if can_be_asked else question.question,
                False,
                answers,
                tuple((passage_id, s) for s in sorted(sentences[passage_id]) or (None,)),
                parents,
            )
        )
    return tuple(hops)


def _text(passage: Passage, sentences: Sequence[int]) -> str:
    texts = sentences_of(passage)
    return " ".join(texts[i] for i in sentences if i < len(texts)) or passage.text


def _anywhere(passages: Iterable[str] | None) -> tuple[tuple[str, None], ...]:
    return tuple((passage_id, None) for passage_id in passages or ())


def _answers(question: Question, answer: str) -> tuple[str, ...]:
    """An annotated answer with the other forms that the final answer has."""
    others = question.answers if answer in question.answers else ()
    return tuple(dict.fromkeys((answer, *others)))


def _as_question(text: str) -> str:
    text = text.strip().rstrip("?").rstrip()
    return f"{text[:1].upper()}{text[1:]}?"


# ------------------------------------------------------------------------------------------ words


@functools.lru_cache(maxsize=1 << 16)
def words(text: str) -> frozenset[str]:
    """The words that matter for a comparison: folded, without accents and stop words.

    Of a text of stop words alone, all of them.
    """
    plain = unicodedata.normalize("NFKD", text).casefold()
    found = re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
    return frozenset(w for w in found if w not in _STOP_WORDS) or frozenset(found)


def overlap(a: str, b: str) -> float:
    """F1 of two texts' words."""
    words_a, words_b = words(a), words(b)
    total = len(words_a) + len(words_b)
    return 2 * len(words_a & words_b) / total if total else 0.0


def names(text: str, name: str) -> bool:
    """Whether a text has most words of a name."""
    wanted = words(name)
    return bool(wanted) and len(wanted & words(text)) >= 0.6 * len(wanted)
