"""Detection of refusals in words other than the prompt's "Unanswerable".

Only phrases of sentences match; titles do not. "The director is unknown" is a refusal, but "Unknown
Pleasures" is not. "It is not mentioned in the triples" is a refusal, but "Not Without My Daughter"
is not.
"""

import re

from cirag_jax.io import one_line

_ADVERBS = r"(?:\w+ly |be |been ){0,2}"
_SAID = (
    r"(?:mentioned|provided|specified|stated|given|listed|included|named|indicated|disclosed|"
    r"determined|identified|determinable|answerable|known|available|found|present|clear|"
    r"addressed|applicable)"
)
_TELL = (
    r"(?:determine|answer|identify|infer|establish|deduce|conclude|confirm|ascertain|verify|"
    r"provide|find|specify)\b"
)
_TOLD = (
    r"(?:determined|answered|identified|inferred|established|deduced|concluded|confirmed|"
    r"ascertained|verified|provided|found|specified|known|told|said|stated)\b"
)
_MATTER = (
    r"(?:answers?|information|evidence|data|details?|facts?|mention|context|record|indication|"
    r"triples?|sentences?|passages?)\b"
)
_SOURCE = (
    r"(?:information|evidence|data|facts?|context|triples?|sentences?|passages?|documents?|texts?|"
    r"articles?|query|question|it|they|none of (?:these|them|the \w+))"
)
_WHERE = r"(?:in|by|from|within|among|here|based on|with|for|to)\b"
_NOTHING = (
    r"(?:(?:the answer is:? )?(?:an? )?(?:unknown|undetermined|indeterminate|indeterminable|"
    r"unclear|inconclusive|not sure|n/?a|none|no one knows|no answer|no information|not "
    r"(?:possible|enough|applicable|specified|mentioned|given|stated|provided))"
    r"|none of (?:these|them|the (?:above|triples|sentences|passages|facts))"
    r"|i (?:do not|cannot) (?:know|tell|say|answer))"
)

# Matches the whole answer or its first sentence: "Unknown. The text names no director."
_FIRST = re.compile(
    rf"{_NOTHING}(?:$|[.;:](?:$| )|,? (?:based on|given|from the|in the|according))"
)
_LAST = re.compile(rf"\bthe answer is:? {_NOTHING}$")
_PART = re.compile(
    # cannot be determined; it is not possible to answer; this is too vague to answer
    rf"\b(?:cannot|could not|can not) (?:{_ADVERBS}{_TELL}|(?:\w+ly )?be (?:\w+ly )?{_TOLD})"
    rf"|\b(?:not possible|impossible|unable|not able|insufficient|not enough|not sufficient|"
    rf"not specific enough|too (?:vague|broad)) to (?:\w+ly )?(?:{_TELL}|tell\b|say\b|know\b)"
    # is not mentioned; not specified in the passages
    rf"|(?:\b(?:is|are|was|were)|^) not {_ADVERBS}{_SAID}(?=$|[.;]| {_WHERE})"
    # there is no information about; not enough evidence; no direct mention of
    rf"|(?:^|\b(?:is|are|was|were|be|with|has|have|given) )(?:no|not enough|insufficient|"
    rf"not sufficient)(?: \w+)? {_MATTER}(?=$|[.;,]| (?:{_WHERE}|about|of|on|that|which|is))"
    # the triples do not mention
    rf"|\b{_SOURCE}(?: (?:about|on|for|titled) [^.;]{{0,99}}| \w+)? do(?:es)? not {_ADVERBS}"
    rf"(?:mention|contain|include|hold|give|support|indicate|state|say|{_TELL})"
    # the director is unknown
    r"|\b(?:is|are|was|were|remains?) (?:unknown|unclear|undetermined|inconclusive)"
    rf"(?=$|[.,;]| {_WHERE})"
    r"|\bunanswerable\b"
)
# Hedges around an answer. A hedged answer is not a refusal: "Lund, although its province is not
# mentioned", "Lund (the street is unknown)", "the first does not mention it, but the second says
# Lund".
_HEDGE = re.compile(r"\([^()]*\)|[,;] (?:al)?though\b.*|.*[,;.] (?:but|however)\b")
_SHORT_FORMS = (("can't", "cannot"), ("n't", " not"), ("'s not", " is not"))
_MAX_CHARS = 2_000  # Only the end of a longer text is checked.


def refuses(answer: str) -> bool:
    """Returns whether an answer is a refusal; a hedged answer is not."""
    answer = answer[-_MAX_CHARS:].casefold().replace("\u2019", "'")
    text = one_line(answer).strip(" .!\"'*")
    for short, long in _SHORT_FORMS:
        text = text.replace(short, long)
    text = _HEDGE.sub("", text).strip(" .!\"'") or text.strip("()")
    return bool(_FIRST.match(text) or _LAST.search(text) or _PART.search(text))
