"""Annotated relations as sub-questions, and as noun phrases for a rationale.

Benchmarks name relations as Wikidata does ("place of birth"), the built-in dataset as sentences do
("directed by"). A relation that is not listed gets a template by its form.
"""

import re
from collections.abc import Mapping

# Templates of relations: how one asks for the tail, and what the tail then is. ``{}``: the head.
_GROUPS: tuple[tuple[str, str, str], ...] = (
    ("director, directed by", "Who directed {}?", "the director of {}"),
    ("performer", "Who performed {}?", "the performer of {}"),
    ("author", "Who wrote {}?", "the author of {}"),
    ("composer", "Who composed the music of {}?", "the composer of {}"),
    ("screenwriter", "Who wrote the script of {}?", "the screenwriter of {}"),
    ("lyrics by", "Who wrote the lyrics of {}?", "the lyricist of {}"),
    ("producer", "Who produced {}?", "the producer of {}"),
    ("creator", "Who created {}?", "the creator of {}"),
    ("founded by", "Who founded {}?", "the founder of {}"),
    ("owned by", "Who owns {}?", "the owner of {}"),
    ("drafted by", "Who drafted {}?", "the team that drafted {}"),
    ("distributed by", "Who distributed {}?", "the distributor of {}"),
    ("manufacturer, built by", "Who makes {}?", "the maker of {}"),
    ("spouse", "Who was {} married to?", "the spouse of {}"),
    ("winner", "Who won {}?", "the winner of {}"),
    ("cast member", "Who acted in {}?", "an actor in {}"),
    ("employer", "Who did {} work for?", "the employer of {}"),
    ("date of birth", "When was {} born?", "the date of birth of {}"),
    ("date of death", "When did {} die?", "the date of death of {}"),
    ("place of birth", "Where was {} born?", "the place of birth of {}"),
    ("place of death", "Where did {} die?", "the place of death of {}"),
    ("place of burial", "Where is {} buried?", "the place of burial of {}"),
    ("cause of death", "What did {} die of?", "the cause of death of {}"),
    ("publication date", "When was {} released?", "the release date of {}"),
    ("inception", "When was {} founded?", "the founding date of {}"),
    ("country", "Which country does {} belong to?", "the country of {}"),
    ("country of citizenship", "Which country is {} a citizen of?", "the citizenship of {}"),
    (
        "country of origin, produced in, comes from",
        "Which country is {} from?",
        "the country of origin of {}",
    ),
    (
        "located in the administrative territorial entity, located in, administrative division of, "
        "administrative division, region",
        "Which region is {} in?",
        "the region around {}",
    ),
    (
        "contains administrative territorial entity",
        "Which place lies in {}?",
        "the place that lies in {}",
    ),
    ("headquarters location, based in", "Where is {} based?", "the headquarters of {}"),
    ("location", "Where did {} take place?", "the location of {}"),
    ("location of formation", "Where was {} formed?", "the place where {} was formed"),
    ("work location", "Where did {} work?", "the place where {} worked"),
    ("licensed to broadcast to", "Which place does {} broadcast to?", "the area served by {}"),
    ("located in or next to body of water", "Which water does {} lie by?", "the water by {}"),
    ("mouth of the watercourse", "What does {} flow into?", "the mouth of {}"),
    ("shares border with, borders", "Which place borders {}?", "the neighbour of {}"),
    (
        "capital, capital city, seat of government",
        "What is the capital of {}?",
        "the capital of {}",
    ),
    ("capital of", "What is {} the capital of?", "the area whose capital is {}"),
    ("educated at", "Where was {} educated?", "the school of {}"),
    ("award received", "Which award did {} receive?", "the award of {}"),
    ("member of sports team", "Which team did {} play for?", "the team of {}"),
    ("member of political party", "Which party was {} a member of?", "the party of {}"),
    ("member of", "What was {} a member of?", "the group that {} was a member of"),
    ("part of, belongs to", "What is {} part of?", "the unit that {} is part of"),
    ("part of the series", "Which series is {} part of?", "the series of {}"),
    ("has part", "What is part of {}?", "a part of {}"),
    ("instance of", "What is {}?", "the kind of thing that {} is"),
    ("named after", "What is {} named after?", "the namesake of {}"),
    ("conflict", "Which war did {} take part in?", "the war of {}"),
    ("followed by", "What came after {}?", "the successor of {}"),
    ("follows", "What came before {}?", "the predecessor of {}"),
    ("present in work", "Which work does {} appear in?", "the work in which {} appears"),
    ("applies to jurisdiction", "Where does {} apply?", "the jurisdiction of {}"),
    ("languages spoken, written or signed", "Which language does {} use?", "the language of {}"),
    ("language, spoken language", "What is the language of {}?", "the language of {}"),
    ("official language", "What is the official language of {}?", "the official language of {}"),
    ("official in, official status in", "Where is {} official?", "a place where {} is official"),
    ("writing system, written in", "Which script is used for {}?", "the script of {}"),
    (
        "population, number of inhabitants, its people are, population in 2021, residents in 2021",
        "How many people live in {}?",
        "the population of {}",
    ),
    (
        "discovered in, place of discovery",
        "Where was {} discovered?",
        "the place where {} was discovered",
    ),
    (
        "first element discovered, earliest discovery",
        "Which element did {} discover first?",
        "the first element found by {}",
    ),
    (
        "last element discovered, final discovery",
        "Which element did {} discover last?",
        "the last element found by {}",
    ),
    ("discovered by, discoverer", "Who discovered {}?", "the discoverer of {}"),
    (
        "Cannes debut film, first film in Cannes competition",
        "What was the first film of {} at Cannes?",
        "the first Cannes film of {}",
    ),
    (
        "most recent Cannes entry, latest film in Cannes competition",
        "What was the latest film of {} at Cannes?",
        "the latest Cannes film of {}",
    ),
    (
        "films in Cannes competition, competed at Cannes with",
        "How many films did {} show at Cannes?",
        "the number of Cannes films of {}",
    ),
    (
        "Cannes Film Festival year, in Cannes competition in",
        "In which year was {} shown at Cannes?",
        "the Cannes year of {}",
    ),
    ("area, land area, covers", "How large is {}?", "the area of {}"),
    ("running time, runs for", "How long does {} run?", "the running time of {}"),
    ("original title, originally titled", "What is {} called at home?", "the original title of {}"),
    ("native name, own name", "What is {} called at home?", "the native name of {}"),
    (
        "largest city, most populous city",
        "What is the largest city in {}?",
        "the largest city of {}",
    ),
    ("circulates in, used in", "Where is {} used?", "the area that uses {}"),
    ("density, has a density of", "How dense is {}?", "the density of {}"),
    ("elevation, lies at an elevation of", "How high does {} lie?", "the elevation of {}"),
    (
        "currency, legal tender, official currency",
        "What is the currency of {}?",
        "the currency of {}",
    ),
    ("city served, serves, is the airport of", "Which city does {} serve?", "the city of {}"),
    ("served by", "Which airport serves {}?", "the airport of {}"),
    ("time zone, observes time zone", "What is the time zone of {}?", "the time zone of {}"),
    ("line, is on", "Which line is {} on?", "the line of {}"),
)
# A list of names is one text above; only this name has a comma of its own.
_COMMA = "languages spoken, written or signed"
_TEMPLATES: Mapping[str, tuple[str, str]] = {
    relation: (asks, noun)
    for relations, asks, noun in _GROUPS
    for relation in ([relations] if relations == _COMMA else relations.split(", "))
}
_PERSONS = frozenset({"father", "mother", "child", "sibling", "publisher", "presenter"})
_VERB = re.compile(
    r"(belongs|borders|circulates|comes|competed|contains|covers|has|is|lies|observes|reaches|runs|"
    r"serves|was)\b"
)
_ENDS_IN_PREPOSITION = re.compile(r"\b(as|at|by|for|from|in|into|of|on|to|with)$")


def sub_question(relation: str, head: str) -> str:
    """Asks for the tail of ``<head; relation; ?>``."""
    relation = " ".join(relation.split())
    if relation in _TEMPLATES:
        return _TEMPLATES[relation][0].format(head)
    if relation in _PERSONS:
        return f"Who is the {relation} of {head}?"
    if _VERB.match(relation):
        return f"{head} {relation} what?"
    if _ENDS_IN_PREPOSITION.search(relation):
        return f"What is {head} {relation}?"
    return f"What is the {relation} of {head}?"


def noun_phrase(relation: str, head: str) -> str:
    """What the tail of ``<head; relation; ?>`` is; empty where the relation makes no good name."""
    relation = " ".join(relation.split())
    if relation in _TEMPLATES:
        return _TEMPLATES[relation][1].format(head)
    if _VERB.match(relation) or _ENDS_IN_PREPOSITION.search(relation):
        return ""
    return f"the {relation} of {head}"
