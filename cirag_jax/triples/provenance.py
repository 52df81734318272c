"""Which sentence of a passage a triple came from."""

from collections.abc import Sequence


def source_sentence(head: str, relation: str, tail: str, sentences: Sequence[str]) -> int | None:
    """Index of the sentence that holds most of the triple's words.

    KiRAG's rule: count the words of the triple that a sentence contains as substrings (case
    ignored), take the largest count; the first sentence wins a tie. So a triple that shares no
    word with the passage belongs to its first sentence.

    Args:
        head: Head entity.
        relation: Relation phrase.
        tail: Tail entity or value.
        sentences: The sentences of the passage, in order.

    Returns:
        An index into ``sentences``, or None where there are none.
    """
    if not sentences:
        return None
    if len(sentences) == 1:
        return 0
    words = f"{head} {relation} {tail}".lower().split()
    counts = [sum(word in sentence for word in words) for sentence in map(str.lower, sentences)]
    return counts.index(max(counts))
