"""How facts are said: the names of relations in triples, and the sentences of passages.

The tables are the style. A row of `SENTENCES` lists the relations that it needs and several
phrasings; a placeholder is a relation without its kind, ``{name}`` the entity. A relation also has
several names (`RELATIONS`), as open information extraction gives it.
"""

Row = tuple[tuple[str, ...], tuple[str, ...]]

RELATIONS: dict[str, tuple[str, ...]] = {
    "airport.iata": ("IATA code", "has IATA code"),
    "airport.icao": ("ICAO code", "has ICAO code"),
    "airport.city": ("serves", "city served", "is the airport of"),
    "airport.one city": ("serves", "city served"),
    "airport.place": ("serves", "located at"),
    "airport.area": ("located in", "lies in"),
    "airport.country": ("country", "is in"),
    "airport.elevation": ("elevation", "lies at an elevation of"),
    "airport.coordinates": ("coordinates", "located at"),
    "car.maker": ("manufacturer", "built by"),
    "car.power": ("engine output", "horsepower"),
    "car.price": ("list price", "sold for"),
    "car.year": ("model year", "year"),
    "car.body": ("body style", "built as"),
    "city.subdivision": ("located in", "administrative division", "belongs to"),
    "city.country": ("country", "located in"),
    "city.role": ("role", "serves as"),
    "city.population": ("population", "number of inhabitants"),
    "city.zone": ("time zone", "observes time zone"),
    "city.coordinates": ("coordinates", "located at"),
    "country.capital": ("capital", "capital city", "seat of government"),
    "country.currency": ("currency", "official currency", "legal tender"),
    "country.language": ("official language", "language"),
    "country.region": ("region", "located in", "part of"),
    "country.area": ("area", "covers"),
    "country.population": ("population", "number of inhabitants"),
    "country.domain": ("internet domain", "top-level domain"),
    "country.dialling": ("calling code", "telephone code"),
    "country.iso3": ("ISO country code", "three-letter code"),
    "country.demonym": ("demonym", "its people are"),
    "country.neighbour": ("borders", "shares border with"),
    "county.state": ("state", "located in", "county of"),
    "county.fips": ("FIPS code", "has FIPS code"),
    "county.namesakes": ("name is used in", "counties of the same name exist in"),
    "currency.code": ("ISO 4217 code", "currency code"),
    "currency.numeric": ("numeric code", "ISO 4217 number"),
    "currency.decimals": ("written with", "decimal places"),
    "currency.users": ("used in", "circulates in"),
    "director.films": ("films in Cannes competition", "competed at Cannes with"),
    "director.first year": ("first in Cannes competition in", "Cannes debut year"),
    "director.first film": ("first film in Cannes competition", "Cannes debut film"),
    "director.latest film": ("latest film in Cannes competition", "most recent Cannes entry"),
    "director.last year": ("last in Cannes competition in", "latest Cannes year"),
    "discoverer.elements": ("sole discoverer of", "number of elements discovered"),
    "discoverer.first year": ("first discovery in", "year of first discovery"),
    "discoverer.first element": ("first element discovered", "earliest discovery"),
    "discoverer.last element": ("last element discovered", "final discovery"),
    "division.municipalities": ("contains", "number of municipalities"),
    "division.most populous": ("most populous municipality", "has most residents in"),
    "division.largest": ("largest municipality by area", "widest municipality"),
    "element.symbol": ("chemical symbol", "symbol"),
    "element.number": ("atomic number", "has atomic number"),
    "element.series": ("belongs to", "series"),
    "element.period": ("period", "is in period"),
    "element.density": ("density", "has a density of"),
    "element.antiquity": ("known since", "in use since"),
    "element.year": ("discovery year", "discovered in"),
    "element.place": ("place of discovery", "discovered in"),
    "element.discoverer": ("discovered by", "discoverer"),
    "film.year": ("in Cannes competition in", "Cannes Film Festival year"),
    "film.director": ("directed by", "director"),
    "film.country": ("country of origin", "produced in"),
    "film.language": ("language", "spoken language"),
    "film.running time": ("running time", "runs for"),
    "film.original title": ("original title", "originally titled"),
    "language.iso": ("ISO 639-3 code", "language code"),
    "language.script": ("written in", "writing system"),
    "language.own name": ("native name", "own name"),
    "language.official in": ("official in", "official status in"),
    "line.stations": ("number of stations", "has"),
    "line.busiest": ("busiest station", "most used station"),
    "line.northernmost": ("northernmost station", "reaches farthest north at"),
    "maker.country": ("country", "based in", "comes from"),
    "maker.models": ("number of models", "represented by"),
    "maker.most powerful": ("most powerful model", "strongest car"),
    "region.continent": ("continent", "part of"),
    "region.members": ("number of countries", "contains"),
    "region.largest": ("largest country by area", "largest country"),
    "region.most populous": ("most populous country", "country with most inhabitants"),
    "script.code": ("ISO 15924 code", "script code"),
    "script.numeric": ("ISO 15924 number", "numeric code"),
    "station.line": ("served by", "is on", "line"),
    "station.passengers": ("annual passengers", "yearly entries"),
    "station.rer": ("connects to", "interchange with"),
    "station.tram": ("connects to", "interchange with"),
    "station.location": ("located in", "lies in"),
    "subdivision.capital": ("capital", "state capital"),
    "subdivision.statehood": ("admitted to the Union in", "statehood year"),
    "subdivision.fips": ("FIPS code", "numeric FIPS code"),
    "subdivision.counties": ("divided into", "number of counties"),
    "subdivision.type": ("type", "is a"),
    "subdivision.country": ("country", "part of", "administrative division of"),
    "subdivision.peers": ("one of", "shares its status with"),
    "subdivision.code": ("ISO 3166-2 code", "subdivision code"),
    "subdivision.largest city": ("largest city", "most populous city"),
    "town.type": ("municipal status", "is a"),
    "town.division": ("census division", "part of"),
    "town.population": ("population in 2021", "residents in 2021"),
    "town.area": ("land area", "covers"),
    "town.earlier population": ("population in 1996", "residents in 1996"),
}

# Placeholders are the relations without their kind; {name} is the entity.
SENTENCES: dict[str, tuple[Row, ...]] = {
    "airport": (
        (
            ("city", "iata", "icao"),
            (
                "{name} (IATA: {iata}, ICAO: {icao}) is an airport serving {city}.",
                "{name} is the airport of {city}; its codes are {iata} (IATA) and {icao} (ICAO).",
                "With the codes {iata} (IATA) and {icao} (ICAO), {name} is the gateway to {city}.",
            ),
        ),
        (
            ("one city", "iata", "icao"),
            (
                "{name} (IATA: {iata}, ICAO: {icao}) is one of the airports serving {one_city}.",
                "{name}, coded {iata} by IATA and {icao} by ICAO, is an airport for {one_city}.",
            ),
        ),
        (
            ("place", "area", "country", "iata"),
            (
                "{name} (IATA: {iata}) is an airport at {place} in {area}, {country}.",
                "{name}, known to IATA as {iata}, lies at {place} in {area}, {country}.",
            ),
        ),
        (("icao",), ("Its ICAO code is {icao}.", "To ICAO it is {icao}.")),
        (
            ("elevation",),
            (
                "The airfield lies {elevation} above mean sea level.",
                "Its elevation is {elevation} above sea level.",
                "The airport sits {elevation} above the sea.",
            ),
        ),
        (
            ("coordinates",),
            (
                "It is found at {coordinates}.",
                "Its coordinates are {coordinates}.",
                "On a map the airport is at {coordinates}.",
            ),
        ),
    ),
    "car": (
        (
            ("maker", "body"),
            (
                "The {name} is a car with a {body} body made by {maker}.",
                "The {name} is a {body} built by {maker}.",
            ),
        ),
        (
            ("power", "year"),
            ("Its {year} version has {power}.", "In {year} its engine gave {power}."),
        ),
        (("price",), ("The car was listed at {price}.", "It cost {price} new.")),
    ),
    "city": (
        (
            ("subdivision", "role"),
            (
                "{name} is the {role} of its country and lies in {subdivision}.",
                "{name}, a city in {subdivision}, is the {role} of its country.",
            ),
        ),
        (
            ("subdivision",),
            (
                "{name} is a city in {subdivision}.",
                "{name} is a populated place belonging to {subdivision}.",
                "The city of {name} lies in {subdivision}.",
            ),
        ),
        (("country",), ("{name} is a city in {country}.", "{name} is a place in {country}.")),
        (
            ("role",),
            (
                "{name} is a city that serves as the {role} of a country or territory.",
                "{name} is the {role} of a country or territory.",
            ),
        ),
        (
            ("population",),
            (
                "It has a population of {population}.",
                "About {population} people live there.",
                "The city has {population} inhabitants.",
            ),
        ),
        (
            ("zone",),
            (
                "Clocks follow the {zone} time zone.",
                "Its time zone is {zone}.",
                "The city keeps the time of {zone}.",
            ),
        ),
        (("coordinates",), ("It is located at {coordinates}.", "Its position is {coordinates}.")),
    ),
    "country": (
        (
            ("region", "capital"),
            (
                "{name} is a country or territory in {region} whose capital is {capital}.",
                "{name} lies in {region}; {capital} is its capital.",
                "{name}, governed from {capital}, is part of {region}.",
            ),
        ),
        (("region",), ("{name} is a country or territory in {region}.",)),
        (("capital",), ("{name} is a country or territory with its capital at {capital}.",)),
        (
            ("area", "population"),
            (
                "It covers {area} and has {population} inhabitants.",
                "Its area is {area} and its population {population}.",
                "Some {population} people live there on {area}.",
            ),
        ),
        (
            ("currency", "language"),
            (
                "Its currency is {currency}, and official use is made of {language}.",
                "People pay with {currency}; official status belongs to {language}.",
            ),
        ),
        (("currency",), ("Its currency is {currency}.", "Its money is {currency}.")),
        (("language",), ("Official use is made of {language}.",)),
        (
            ("dialling", "domain"),
            (
                "Its calling code is {dialling} and its internet domain {domain}.",
                "Telephone numbers there begin with {dialling}, web addresses end in {domain}.",
            ),
        ),
        (
            ("neighbour",),
            ("It borders {neighbour}.", "By land it touches {neighbour}."),
        ),
        (
            ("iso3", "demonym"),
            (
                "Its ISO code is {iso3}, and its people are described as {demonym}.",
                "ISO codes it as {iso3}, and its demonym is {demonym}.",
            ),
        ),
        (("iso3",), ("Its ISO code is {iso3}.", "ISO lists it as {iso3}.")),
    ),
    "county": (
        (
            ("state",),
            ("{name} is a county or equivalent in {state}.", "{name} belongs to {state}."),
        ),
        (
            ("namesakes",),
            (
                "Counties of that name exist in {namesakes}.",
                "The name is common: {namesakes} have such a county.",
            ),
        ),
        (("fips",), ("Its FIPS code is {fips}.", "The census knows it by the FIPS code {fips}.")),
    ),
    "currency": (
        (
            ("code", "numeric"),
            (
                "The {name} is a currency with the ISO 4217 code {code} and the number {numeric}.",
                "The {name} is money known to banks as {code}, or by the number {numeric}.",
            ),
        ),
        (
            ("users",),
            (
                "It is legal tender in {users}.",
                "It circulates in {users}.",
                "As legal tender the currency serves {users}.",
            ),
        ),
        (
            ("decimals",),
            (
                "Amounts are written with {decimals}.",
                "Prices in the currency have {decimals}.",
            ),
        ),
    ),
    "director": (
        (
            ("films",),
            (
                "{name} is a film director with {films} in competition at Cannes.",
                "{name} is a filmmaker who took {films} to the competition at Cannes.",
                "The director {name} has competed at the Cannes Film Festival with {films}.",
            ),
        ),
        (
            ("first film", "first year"),
            (
                "The first of them was {first_film} in {first_year}.",
                "It began with {first_film} in {first_year}.",
                "The series opened in {first_year} with {first_film}.",
            ),
        ),
        (("first year",), ("The first entry came in {first_year}.",)),
        (
            ("latest film", "last year"),
            (
                "The most recent was {latest_film} in {last_year}.",
                "In {last_year} followed the latest one, {latest_film}.",
            ),
        ),
        (
            ("last year",),
            ("The latest entry came in {last_year}.", "The last dates from {last_year}."),
        ),
    ),
    "discoverer": (
        (
            ("elements",),
            (
                "{name} is credited alone with the discovery of {elements}.",
                "{name} is the sole discoverer of {elements}.",
            ),
        ),
        (
            ("first element", "first year"),
            (
                "The earliest was {first_element} in {first_year}.",
                "In {first_year} came the first, {first_element}.",
            ),
        ),
        (("first year",), ("The discovery dates from {first_year}.", "That was in {first_year}.")),
        (("last element",), ("The last of them was {last_element}.",)),
    ),
    "division": (
        (
            ("municipalities",),
            (
                "The {name} is part of Ontario and has {municipalities}.",
                "In Ontario, the {name} groups {municipalities}.",
            ),
        ),
        (
            ("most populous",),
            (
                "{most_populous} has the most residents.",
                "Its most populous municipality is {most_populous}.",
            ),
        ),
        (
            ("largest",),
            ("{largest} is the largest by land area.", "The most land belongs to {largest}."),
        ),
    ),
    "element": (
        (
            ("symbol", "number"),
            (
                "{name} is a chemical element with the symbol {symbol} and atomic number {number}.",
                "{name} ({symbol}) is the chemical element with atomic number {number}.",
            ),
        ),
        (
            ("series", "period"),
            (
                "It belongs to the {series} and stands in period {period} of the periodic table.",
                "One of the {series}, it is found in period {period}.",
            ),
        ),
        (("density",), ("Its density is {density}.", "The element has a density of {density}.")),
        (
            ("discoverer", "year", "place"),
            (
                "{discoverer} discovered it in {place} in {year}.",
                "It was discovered by {discoverer} in {year} in {place}.",
            ),
        ),
        (("discoverer", "year"), ("It was discovered by {discoverer} in {year}.",)),
        (("year", "place"), ("It was discovered in {place} in {year}.",)),
        (("year",), ("Its discovery dates from {year}.",)),
        (
            ("antiquity",),
            ("It has been known since {antiquity}.", "People knew it in {antiquity}."),
        ),
    ),
    "film": (
        (
            ("year", "director"),
            (
                "{name} is a film by {director} that competed at Cannes in {year}.",
                "Directed by {director}, {name} was in competition at Cannes in {year}.",
                "{name} was shown in competition at the {year} Cannes Film Festival; "
                "its director is {director}.",
                "{name} is a film that {director} brought to the Cannes competition of {year}.",
            ),
        ),
        (
            ("country", "language"),
            (
                "The film comes from {country} and its dialogue is in {language}.",
                "It was produced in {country} and is spoken in {language}.",
                "A production of {country}, it uses {language}.",
            ),
        ),
        (("country",), ("The film comes from {country}.", "It was produced in {country}.")),
        (("language",), ("Its dialogue is in {language}.",)),
        (
            ("running time",),
            (
                "It runs for {running_time}.",
                "The running time is {running_time}.",
                "It lasts {running_time}.",
            ),
        ),
        (
            ("original title",),
            (
                "Its original title is {original_title}.",
                "At home it was called {original_title}.",
            ),
        ),
    ),
    "language": (
        (
            ("own name", "iso"),
            (
                "{name} is a language whose ISO 639-3 code is {iso}; its own name is {own_name}.",
                "{name}, in the language itself {own_name}, has the ISO 639-3 code {iso}.",
            ),
        ),
        (("iso",), ("{name} is a language with the ISO 639-3 code {iso}.",)),
        (("script",), ("It is usually written in {script}.", "Its writing uses {script}.")),
        (
            ("official in",),
            ("It is official in {official_in}.", "The language is official in {official_in}."),
        ),
    ),
    "line": (
        (
            ("stations",),
            (
                "{name} of the Paris Métro serves {stations}.",
                "{name} is a line of the Paris Métro with {stations}.",
            ),
        ),
        (
            ("busiest",),
            (
                "Its busiest station is {busiest}.",
                "Of its stations {busiest} counts the most passengers.",
            ),
        ),
        (
            ("northernmost",),
            (
                "It reaches farthest north at {northernmost}.",
                "No station of the line lies farther north than {northernmost}.",
            ),
        ),
    ),
    "maker": (
        (
            ("country",),
            ("{name} is a car maker from {country}.", "{name} builds cars in {country}."),
        ),
        (
            ("models",),
            (
                "Among the sports and luxury cars of 2014 to 2017 it was represented by {models}.",
                "It contributed {models} to the sports and luxury cars of 2014 to 2017.",
            ),
        ),
        (
            ("most powerful",),
            ("The most powerful of them is the {most_powerful}.",),
        ),
    ),
    "region": (
        (
            ("continent", "members"),
            (
                "{name} is a region of {continent} with {members}.",
                "{name}, a region of {continent}, comprises {members}.",
            ),
        ),
        (("largest",), ("By area the largest of them is {largest}.",)),
        (("most populous",), ("The most people live in {most_populous}.",)),
    ),
    "script": (
        (
            ("code",),
            (
                "The {name} script is a writing system with the ISO 15924 code {code}.",
                "The writing system {name} is listed in ISO 15924 as {code}.",
            ),
        ),
        (
            ("numeric",),
            ("Its number in that standard is {numeric}.", "It has the number {numeric}."),
        ),
    ),
    "station": (
        (
            ("line", "location"),
            (
                "{name} is a station of the Paris Métro on {line}, located in {location}.",
                "{name} is a Métro station in {location} served by {line}.",
                "In {location} lies {name}, a station of the Paris Métro on {line}.",
            ),
        ),
        (
            ("passengers",),
            (
                "Some {passengers} passengers enter it in a year.",
                "It counts {passengers} passengers a year.",
                "The station is used by {passengers} passengers a year.",
            ),
        ),
        (("rer",), ("Travellers can change there to {rer}.", "It has a connection to {rer}.")),
        (("tram",), ("Outside stops {tram}.", "Passengers can also change to {tram}.")),
    ),
    "subdivision": (
        (
            ("type", "country", "code"),
            (
                "{name} (ISO 3166-2: {code}) is a {type} of {country}.",
                "{name}, with the ISO 3166-2 code {code}, is a {type} in {country}.",
            ),
        ),
        (
            ("peers",),
            (
                "It is one of {peers} with that status.",
                "The country has {peers} of this type.",
            ),
        ),
        (
            ("capital", "statehood"),
            (
                "It joined the Union in {statehood} and has its capital at {capital}.",
                "Its capital is {capital}, and it has been a state since {statehood}.",
            ),
        ),
        (
            ("largest city",),
            (
                "Its most populous city is {largest_city}.",
                "No city there has more people than {largest_city}.",
                "The largest city is {largest_city}.",
            ),
        ),
        (
            ("counties", "fips"),
            (
                "It is divided into {counties}, and its FIPS code is {fips}.",
                "There are {counties}; the FIPS code is {fips}.",
            ),
        ),
    ),
    "town": (
        (
            ("type", "division"),
            (
                "{name} is a {type} in the {division} of Ontario.",
                "{name}, Ontario, has the status of a {type} and is part of the {division}.",
                "The {type} of {name} belongs to the {division}, Ontario.",
            ),
        ),
        (
            ("population", "area"),
            (
                "In 2021 it had {population} residents on {area} of land.",
                "Its land area is {area}; the census of 2021 counted {population} people.",
            ),
        ),
        (
            ("earlier population",),
            (
                "The census of 1996 had found {earlier_population}.",
                "In 1996 there had been {earlier_population}.",
            ),
        ),
    ),
}
