"""Chemical elements, Métro stations, Ontario's municipalities, and cars.

The sources are mendeleev (elements) and great_tables (the others).
"""

import math
from collections import Counter, defaultdict
from typing import Any

from experiments.demo_dataset import sources
from experiments.demo_dataset.graph import (
    CORRECTIONS,
    HOME_NATIONS,
    LIMITS,
    Entity,
    World,
    amount,
    count,
    number_of,
    with_article,
)
from experiments.demo_dataset.text import shuffled

# Rows of mendeleev 1.3.0 whose discoverer or year disagrees with the literature.
DOUBTED_ELEMENTS = {"Neodymium", "Beryllium", "Protactinium", "Livermorium", "Terbium", "Platinum"}

# Column -> relation of the row with the largest number in it.
METRO_TOPS = {"passengers": "busiest", "latitude": "northernmost"}
TOWN_TOPS = {"population_2021": "most populous", "land_area_km2": "largest"}


def add_elements(world: World) -> None:
    """Adds the chemical elements, and their sole discoverers."""
    rows = sources.elements()
    by_discoverer: dict[str, list[dict[str, Any]]] = defaultdict(list)
    countries = {entity.name: entity.key for entity in world.of_kind("country")}
    for row in rows:
        is_ambiguous = row["name"] in ("Mercury", "Lead", "Tin")
        title = f"{row['name']} (element)" if is_ambiguous else None
        element = world.add("element", row["symbol"], row["name"], title)
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
            name = CORRECTIONS["discoverers"].get(credited, credited)
            world.fact(element, "discoverer", name, target=f"discoverer:{name}")
            by_discoverer[name].append(row)
    for name, discovered in by_discoverer.items():
        add_discoverer(world, name, discovered)


def add_origin(world: World, element: Entity, place: str | None, keys: dict[str, str]) -> None:
    """Adds the place of an element's discovery, if the source names a single place."""
    if not place or "/" in place:
        return
    place = {"Great Britain": "United Kingdom"}.get(place, place)
    nation = HOME_NATIONS.get(place)
    target = f"subdivision:{nation}" if nation else keys.get(place)
    world.fact(element, "place", place, with_article(place), target)


def add_discoverer(world: World, name: str, elements: list[dict[str, Any]]) -> None:
    """Adds a sole discoverer, with the number of elements and the first and last element."""
    years = sorted(elements, key=lambda row: (row["discovery_year"], row["atomic_number"]))
    discoverer = world.add("discoverer", name, name)
    text = amount(len(elements), "element", "elements")
    world.fact(discoverer, "elements", text, number=len(elements))
    world.fact(discoverer, "first year", years[0]["discovery_year"])
    if len(years) > 1:
        ends = ((years[0], years[1], "first element"), (years[-1], years[-2], "last element"))
        for row, other, what in ends:
            if row["discovery_year"] != other["discovery_year"]:
                target = f"element:{row['symbol']}"
                world.fact(discoverer, what, row["name"].lower(), target=target)


def add_metro(world: World) -> None:
    """Adds stations and lines of the Paris Métro, with each line's busiest station."""
    rows = sources.great_table("10-metro")
    named = Counter(row["name"] for row in rows)
    lines: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        for line in row["lines"].split(","):
            lines[line.strip()].append(row)
    tops = {top(stations, column)["name"] for stations in lines.values() for column in METRO_TOPS}
    others = [row["name"] for row in rows if row["name"] not in tops]
    keep = tops | set(shuffled(others, "metro")[: LIMITS["station"] - len(tops)])
    for row in rows:
        if row["name"] in keep and named[row["name"]] == 1 and row["passengers"]:
            add_station(world, row)
    for number, stations in lines.items():
        name = f"Line {number}"
        line = world.add("line", number, name, f"Paris Métro Line {number}")
        text = amount(len(stations), "station", "stations")
        world.fact(line, "stations", text, number=len(stations))
        for column, what in METRO_TOPS.items():
            station = top(stations, column)["name"]
            world.fact(line, what, station, target=f"station:{station}")


def top(rows: list[dict[str, str]], column: str) -> dict[str, str]:
    """Returns the row with the largest number in a column."""
    return max(rows, key=lambda row: (number_of(row[column]) or 0, row["name"]))


def add_station(world: World, row: dict[str, str]) -> None:
    """Adds a Métro station."""
    station = world.add("station", row["name"], row["name"], f"{row['name']} (Paris Métro)")
    for number in row["lines"].split(","):
        world.fact(station, "line", f"Line {number.strip()}", target=f"line:{number.strip()}")
    passengers = number_of(row["passengers"])
    if passengers:
        world.fact(station, "passengers", count(passengers), number=passengers)
    for what, column in (("rer", "connect_rer"), ("tram", "connect_tramway")):
        prefix = "RER line" if what == "rer" else "tram line"
        for line in row[column].split(","):
            world.fact(station, what, f"{prefix} {line.strip()}" if line.strip() else None)
    for place in row["location"].split(","):
        place = place.strip()
        in_paris = "Paris " in place
        value = f"{place.removeprefix('Paris ')} arrondissement" if in_paris else place
        world.fact(station, "location", value, f"the {value}" if in_paris else place)


def add_towns(world: World) -> None:
    """Adds municipalities of Ontario and their census divisions."""
    table = sources.great_table("07-towny")
    rows = [row for row in table if "," not in row["name"]]
    named = Counter(row["name"] for row in rows)
    divisions: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in table:
        divisions[row["census_div"]].append(row)
    tops = {top(towns, column)["name"] for towns in divisions.values() for column in TOWN_TOPS}
    others = [row["name"] for row in rows if row["name"] not in tops]
    keep = tops | set(shuffled(others, "town")[: LIMITS["town"] - len(tops)])
    for row in rows:
        if row["name"] in keep and named[row["name"]] == 1:
            add_town(world, row)
    for name, towns in divisions.items():
        if len(towns) < 3:
            continue
        division = world.add(
            "division", name, f"{name} census division", f"{name} (census division)"
        )
        text = amount(len(towns), "municipality", "municipalities")
        world.fact(division, "municipalities", text, number=len(towns))
        for column, what in TOWN_TOPS.items():
            town = top(towns, column)["name"]
            world.fact(division, what, town, target=f"town:{town}")


def add_town(world: World, row: dict[str, str]) -> None:
    """Adds a municipality of Ontario."""
    town = world.add("town", row["name"], row["name"], f"{row['name']}, Ontario")
    world.fact(town, "type", row["csd_type"])
    division = row["census_div"]
    world.fact(town, "division", f"{division} census division", target=f"division:{division}")
    population, area = number_of(row["population_2021"]), number_of(row["land_area_km2"])
    if population:
        world.fact(town, "population", count(population), number=population)
    if area:
        world.fact(town, "area", f"{area:,.1f} square kilometres", number=area)
    before = number_of(row["population_1996"])
    if before:
        world.fact(town, "earlier population", count(before), number=before)


def add_cars(world: World) -> None:
    """Adds sports and luxury cars and their makers."""
    rows = sources.great_table("03-gtcars")
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
        power = math.floor(number_of(row["hp"]) or 0)
        world.fact(car, "power", f"{power} horsepower" if power else None, number=power)
        price = number_of(row["msrp"]) or 0
        world.fact(car, "price", f"${count(price)}" if price else None, number=price)
        world.fact(car, "year", row["year"].split(".")[0], number=number_of(row["year"]))
        world.fact(car, "body", row["bdy_style"])
    for name, cars in makers.items():
        maker = world.add("maker", name, name, f"{name} (car maker)")
        origin = cars[0]["ctry_origin"]
        world.fact(maker, "models", amount(len(cars), "model", "models"), number=len(cars))
        world.fact(maker, "country", origin, with_article(origin), target=countries.get(origin))
        strongest = max(cars, key=lambda row: (number_of(row["hp"]) or 0, row["model"]))
        if len(cars) > 1 and models[strongest["model"]] == 1:
            target = f"car:{name} {strongest['model']}"
            world.fact(maker, "most powerful", strongest["model"], target=target)
