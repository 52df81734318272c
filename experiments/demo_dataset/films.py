"""Films in competition at Cannes, their directors, and the languages and scripts of the world.

The sources are great_tables (films), babel (CLDR names, scripts, official languages) and pycountry
(ISO 639, ISO 15924).
"""

from collections import Counter, defaultdict

import pycountry
from babel import Locale, localedata
from babel.core import get_global

from cirag_jax.datasets.demo.wording import stable_hash
from experiments.demo_dataset import sources
from experiments.demo_dataset.graph import (
    CORRECTIONS,
    COUNTRIES,
    LIMITS,
    World,
    amount,
    with_article,
)
from experiments.demo_dataset.text import fold


def add_languages(world: World) -> None:
    """Adds languages that are official somewhere or spoken in a film, and their scripts."""
    names, scripts = Locale("en").languages, Locale("en").scripts
    users: Counter[str] = Counter()
    for country in world.of_kind("country"):
        users.update(str(f.target) for f in country.facts.get("country.language", []))
    spoken = {
        code.strip()
        for film in sources.great_table("09-films")
        for code in film["languages"].split(",")
    }
    codes = {key.removeprefix("language:") for key in users} | spoken
    for code in sorted(codes):
        entry = pycountry.languages.get(alpha_2=code) or pycountry.languages.get(alpha_3=code)
        if code not in names or entry is None:
            continue
        name = names[code]
        language = world.add("language", code, name, f"{name} language")
        world.fact(language, "iso", entry.alpha_3)
        likely = get_global("likely_subtags").get(code, "").split("_")
        script = likely[1] if len(likely) == 3 else ""
        if script in scripts and pycountry.scripts.get(alpha_4=script):
            script_name, target = scripts[script], f"script:{script}"
            world.fact(language, "script", script_name, f"the {script_name} script", target=target)
            add_script(world, script, script_name)
        world.fact(language, "own name", autonym(code, name))
        number = users.get(f"language:{code}", 0)
        if number:
            world.fact(language, "official in", amount(number, *COUNTRIES), number=number)


def autonym(code: str, name: str) -> str | None:
    """Returns a language's name for itself in CLDR, unless it equals the English name."""
    if not localedata.exists(code):
        return None
    autonym = localedata.load(code, merge_inherited=False).get("languages", {}).get(code)
    return autonym if autonym and fold(autonym) != fold(name) else None


def add_script(world: World, code: str, name: str) -> None:
    """Adds a script with its ISO 15924 code and number."""
    script = world.add("script", code, name, f"{name} script")
    world.fact(script, "code", code)
    entry = pycountry.scripts.get(alpha_4=code)
    world.fact(script, "numeric", entry.numeric if entry else None)


def add_films(world: World) -> None:
    """Adds films in competition at Cannes, and the directors with at least two of them."""
    rows = sources.great_table("09-films")
    by_director: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        by_director[row["director"].strip()].append(row)
    repeated = {name for name, films in by_director.items() if len(films) > 1}
    titles = Counter(row["title"].strip() for row in rows)
    # Films of repeated directors come first, because they have chains.
    order = sorted(
        rows,
        key=lambda r: (r["director"].strip() not in repeated, stable_hash("film", r["imdb_url"])),
    )
    keep = {row["imdb_url"] for row in order[: LIMITS["film"]]}
    for row in rows:
        if row["imdb_url"] in keep:
            add_film(world, row, titles, repeated)
    for name in sorted(repeated):
        add_director(world, name, by_director[name])


def film_key(row: dict[str, str]) -> str:
    """Returns the key of a film, which contains its IMDb number."""
    return f"film:{row['imdb_url'].rstrip('/').rsplit('/', 1)[-1]}"


def minutes(run_time: str) -> int:
    """Converts a running time such as ``1h 45m`` to minutes."""
    parts = run_time.split()
    return sum(int(part[:-1]) * (60 if part.endswith("h") else 1) for part in parts)


def add_film(world: World, row: dict[str, str], titles: Counter[str], repeated: set[str]) -> None:
    """Adds a film with its director, countries, languages and running time."""
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
        former = CORRECTIONS["countries"]["former"].get(code.strip())
        origin = country.name if country else former
        if origin:
            target = country.key if country else None
            world.fact(film, "country", origin, with_article(origin), target)
    names = Locale("en").languages
    for code in row["languages"].split(","):
        code = code.strip()
        world.fact(film, "language", names.get(code), target=f"language:{code}")
    length = minutes(row["run_time"])
    world.fact(film, "running time", f"{length} minutes", number=length)
    world.fact(film, "original title", row["original_title"])


def add_director(world: World, name: str, films: list[dict[str, str]]) -> None:
    """Adds a director, with the number of films, and the first and the latest film."""
    if "," in name:
        return
    director = world.add("director", name, name)
    years = sorted(films, key=lambda row: (row["year"], row["title"]))
    world.fact(director, "films", amount(len(films), "film", "films"), number=len(films))
    world.fact(director, "first year", years[0]["year"], number=int(years[0]["year"]))
    for what, row, next_row in (
        ("first film", years[0], years[1]),
        ("latest film", years[-1], years[-2]),
    ):
        # Half of the passages omit the latest film, so that the film's own passage is needed.
        if what == "latest film" and (len(films) < 3 or stable_hash("latest", name) % 2):
            continue
        if row["year"] != next_row["year"]:
            world.fact(director, what, row["title"].strip(), target=film_key(row))
    world.fact(director, "last year", years[-1]["year"], number=int(years[-1]["year"]))
