"""Parse rate: the share of the language models' responses that were not malformed."""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation.overlap import Ratio, ratio

# Kinds in `Prediction.parse_errors` about data, retrieval or repetition: no response was malformed.
WELL_FORMED = frozenset(
    {
        "answer_not_grounded",
        "entity_without_documents",
        "no_chain",
        "no_triples",
        "passage_not_extracted",
        "passage_without_triples",
        "question_without_gold",
        "repeated_query",
        "repeated_sentence",
    }
)


def parse_rate(questions: Sequence[tuple[int, Mapping[str, int]]]) -> Ratio:
    """Returns the parse rate, NaN without responses.

    Args:
      questions: for each question, the number of responses and the ``parse_errors`` by kind. A
        response may have several errors, so a question's errors count at most once per response.
    """
    malformed = [
        min(calls, sum(n for kind, n in errors.items() if kind not in WELL_FORMED))
        for calls, errors in questions
    ]
    calls = [calls for calls, _ in questions]
    usable = [count - bad for count, bad in zip(calls, malformed, strict=True)]
    return ratio(usable, calls, range(len(calls)), len(calls))
