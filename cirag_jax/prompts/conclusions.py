"""What a reader's facts conclude: which of two dates is earlier, whether two countries agree.

A small model copies facts well and compares them badly, so that a chain (``reader_format=chain``)
has what is compared written down before its answer, and the comparison itself is made here. Ours:
the papers' readers are large enough to compare. What a model writes is hostile input: it is
searched, never evaluated.
"""

import datetime
import re
from collections.abc import Sequence

import dateutil.parser

from cirag_jax.datasets.annotations import words

# The relations of what a comparison concludes: "1930; before; 1949", "Ann; before; Bob",
# "later; is; Bob", "France; other than; Spain".
BEFORE, SAME, OTHER, IS = "before", "same as", "other than", "is"
EARLIER, LATER = "earlier", "later"

# Adjectives of which the first four letters are not those of the country.
_OF_COUNTRY = {
    "american": "United States",
    "british": "United Kingdom",
    "danish": "Denmark",
    "dutch": "Netherlands",
    "finnish": "Finland",
    "french": "France",
    "irish": "Ireland",
    "polish": "Poland",
    "spanish": "Spain",
    "turkish": "Turkey",
}

Fact = tuple[str, str, str]


def written_facts(text: str) -> list[Fact]:
    """The lines ``head; relation; tail`` of a reader's response; a tail may hold semicolons."""
    found = []
    for line in text.splitlines():
        head, relation, tail = (*(part.strip() for part in line.split(";", 2)), "", "", "")[:3]
        if head and relation and tail:
            found.append((head, relation, tail))
    return found


def conclude(question: str, facts: Sequence[Fact], answer: str) -> str:
    """The answer to a comparison that its facts decide; any other answer as it is.

    Args:
      question: what was asked.
      facts: as the reader wrote them (`written_facts`).
      answer: as the reader wrote it.

    Returns:
      Where the reader says that the earlier or the later is asked for, and two facts of one
      relation give dates of which one is before the other: the one of that date, or what it made
      where the question names that. Where it says that two countries are the same or not: yes or
      no.
    """
    stated = [fact for fact in facts if fact[1] not in (BEFORE, SAME, OTHER, IS)]
    asked = [fact[0] for fact in facts if fact[1] == IS and fact[0] in (EARLIER, LATER)]
    if asked:
        found = _of_date(question, stated, asked[-1])
        return answer if found is None else found
    if answer.casefold() in ("yes", "no"):
        compared = [fact for fact in facts if fact[1] in (SAME, OTHER)]
        if compared:
            return "yes" if same_country(compared[-1][0], compared[-1][2]) else "no"
    return answer


def _of_date(question: str, facts: Sequence[Fact], asked: str) -> str | None:
    """Whose date is the earlier, or the later, as the question calls it; None: not decided."""
    by_relation: dict[str, list[Fact]] = {}
    for fact in facts:
        if _span(fact[2]) is not None:
            by_relation.setdefault(fact[1], []).append(fact)
    pairs = [found for found in by_relation.values() if len(found) == 2]
    if len(pairs) != 1:
        return None
    first, second = pairs[0]
    sign = order(first[2], second[2])
    if sign is None:
        return None
    name = (first if (sign < 0) == (asked == EARLIER) else second)[0]
    made = [fact[0] for fact in facts if words(fact[2]) == words(name)]
    named = [one for one in (*made, name) if words(one) <= words(question)]
    return (named or [name])[0]


def same_country(a: str, b: str) -> bool:
    """Whether two values name one country: "India" and "Indian" do."""
    keys = [words(_OF_COUNTRY.get(value.casefold(), value)) for value in (a, b)]
    stems = [{word[:4] for word in key} for key in keys]
    return stems[0] == stems[1]


def order(a: str, b: str) -> int | None:
    """-1: the first date is earlier, 1: it is later, None: that cannot be said."""
    spans = [_span(value) for value in (a, b)]
    if spans[0] is None or spans[1] is None:
        return None
    if spans[0][1] < spans[1][0]:
        return -1
    return 1 if spans[1][1] < spans[0][0] else None


def _span(value: str) -> tuple[datetime.datetime, datetime.datetime] | None:
    """The first and the last day that a date, a month or a year may mean; None: it is none."""
    if not re.search(r"\b\d{3,4}\b", value):
        return None
    edges = (datetime.datetime(2000, 1, 1), datetime.datetime(2000, 12, 28))
    try:
        first, last = (dateutil.parser.parse(value, default=edge) for edge in edges)
    except (ValueError, OverflowError):
        return None
    return first.replace(tzinfo=None), last.replace(tzinfo=None)
