"""Turns a question's annotations into hops, the steps of its gold reasoning chain.

2WikiMultihopQA and the built-in dataset annotate triples, MuSiQue annotates sub-questions, and
HotpotQA annotates sentences. Other datasets may have only gold passages. The aligner's silver
chains, the cross-encoder's training pairs and the oracle teacher are built from hops.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from cirag_jax.datasets import relations
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.io import one_line
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
    """One fact needed to answer a question; ``#k`` in a text is the answer of the k-th hop.

    Attributes:
      sub_question: the sub-question; may be empty.
      noun: the sub-question as a noun phrase; may be empty.
      keywords: search words for the sub-question.
      about: the subject of a supporting fact.
      is_entity: whether ``about`` is the name of an entity, which a supporting fact must contain.
      answers: accepted forms of the answer that a supporting fact must state; may be empty.
      places: (passage id, sentence index) pairs that may state the fact; the index None means any
        sentence. A hop with annotated sentences but no triple consists of all these sentences.
      parents: earlier hops whose answers this hop needs.
      triple: the annotated triple, if there is one.
    """

    sub_question: str
    noun: str
    keywords: str
    about: str
    is_entity: bool
    answers: tuple[str, ...]
    places: tuple[tuple[str, int | None], ...]
    parents: tuple[int, ...] = ()
    triple: tuple[str, str, str] | None = None


def hops_of(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """Returns the hops of a question in reading order; empty if it has no annotations.

    A gold passage that is missing from ``corpus`` is ignored.
    """
    if question.evidences and question.supporting:
        return _hops_of_evidences(question)
    if question.decomposition:
        return _hops_of_decomposition(question)
    return _hops_of_places(question, corpus)


def fill(text: str, answers: Mapping[int, str]) -> str:
    """Replaces each ``#k`` in a text with the answer of hop k, if it is known."""
    return re.sub(r"#(\d+)", lambda m: answers.get(int(m[1]) - 1, m[0]), text)


def fact_of(hop: Hop, answers: Mapping[int, str]) -> tuple[str, str, str] | None:
    """Returns a hop's annotated triple, or one built from its entity, relation and answer.

    Returns None if the hop has no entity or no answer.
    """
    if hop.triple is not None or not (hop.is_entity and hop.answers):
        return hop.triple
    relation = hop.keywords.removeprefix(hop.about).strip()
    return fill(hop.about, answers), relation, hop.answers[0]


def _hops_of_evidences(question: Question) -> tuple[Hop, ...]:
    """Returns one hop per triple; the parents of a hop are the earlier hops that give its head."""
    evidences = question.evidences or ()
    sentences = question.supporting_sentences or ()
    annotated = {passage_id for passage_id, _ in sentences}
    places = (*sentences, *_anywhere(i for i in question.supporting or () if i not in annotated))
    hops: list[Hop] = []
    open_tails = set()  # Triples whose tail is not the head of a later triple so far.
    for index, (head, relation, tail) in enumerate(evidences):
        likeness = [overlap(earlier, head) for _, _, earlier in evidences[:index]]
        # Includes all similar names, because an extra parent does less harm than a missing one.
        parents = [i for i in range(index) if likeness[i] > 0.6]
        if not parents and not names(question.question, head):
            # A head that the question does not name must be an earlier tail in another spelling,
            # such as "Andre DeToth" for "André de Toth".
            parents = sorted(open_tails)[:1]
        nearest = max(parents, key=likeness.__getitem__, default=None)
        open_tails -= {nearest}
        open_tails.add(index)
        subject = head if nearest is None else f"#{nearest + 1}"
        hops.append(
            Hop(
                relations.sub_question(relation, subject),
                relations.noun_phrase(relation, subject),
                f"{subject} {relation}",
                subject,
                True,
                _answers(question, tail),
                places,
                tuple(parents),
                (head, relation, tail),
            )
        )
    return tuple(hops)


def _hops_of_decomposition(question: Question) -> tuple[Hop, ...]:
    """Returns one hop per step, a question or ``head >> relation``; each ``#k`` is a parent."""
    hops = []
    for index, step in enumerate(question.decomposition or ()):
        text = one_line(step.question).replace("( ", "(").replace(" )", ")")
        parents = {int(k) - 1 for k in re.findall(r"#(\d+)", text) if 0 < int(k) <= index}
        head, arrow, relation = text.partition(" >> ")
        if arrow:
            sub_question = relations.sub_question(relation, head)
            noun = relations.noun_phrase(relation, head)
            keywords, about = f"{head} {relation}", head
        else:
            bare = text.rstrip("?").rstrip()
            sub_question, noun = f"{bare[:1].upper()}{bare[1:]}?", ""
            keywords = " ".join(w for w in text.rstrip("?").split() if w.lower() not in _STOP_WORDS)
            about = text
        places = _anywhere([step.supporting] if step.supporting else question.supporting)
        answers = _answers(question, step.answer)
        order = tuple(sorted(parents))
        hops.append(Hop(sub_question, noun, keywords, about, bool(arrow), answers, places, order))
    return tuple(hops)


def _hops_of_places(question: Question, corpus: Mapping[str, Passage]) -> tuple[Hop, ...]:
    """Returns one hop per gold passage, with its annotated sentences, if any (HotpotQA).

    Passages that contain the answer come last, and passages named in the question come first. Each
    hop leads to the next one, except in comparison questions, whose hops have no order.
    """
    sentences: dict[str, list[int]] = {i: [] for i in question.supporting or () if i in corpus}
    for passage_id, sentence in question.supporting_sentences or ():
        if passage_id in corpus:
            sentences.setdefault(passage_id, []).append(sentence)

    def order(passage_id: str) -> tuple[bool, bool]:
        passage = corpus[passage_id]
        text = f"{passage.title}. {passage.text}".lower()
        has_answer = any(answer.lower() in text for answer in question.answers)
        return has_answer, not names(question.question, passage.title)

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
    """Returns an annotated answer, plus its other accepted forms if it is the final answer."""
    others = question.answers if answer in question.answers else ()
    return tuple(dict.fromkeys((answer, *others)))


@functools.lru_cache(maxsize=1 << 16)
def words(text: str) -> frozenset[str]:
    """Returns the set of words of a text, case-folded and without accents.

    Stop words are dropped unless the text has no other words.
    """
    plain = unicodedata.normalize("NFKD", text).casefold()
    all_words = re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
    return frozenset(w for w in all_words if w not in _STOP_WORDS) or frozenset(all_words)


def overlap(a: str, b: str) -> float:
    """Returns the F1 of the word sets of two texts."""
    words_a, words_b = words(a), words(b)
    total = len(words_a) + len(words_b)
    return 2 * len(words_a & words_b) / total if total else 0.0


def names(text: str, name: str) -> bool:
    """Returns whether a text contains at least 60 % of a name's words."""
    name_words = words(name)
    return bool(name_words) and len(name_words & words(text)) >= 0.6 * len(name_words)
