"""How questions are asked. The words differ from the relations of the triples, as users' words do.

Descriptions nest, ``{}`` standing for the description of the head: the last question of a chain is
an ``ASKS``, around the ``STEPS`` that lead to its head, around the start.
"""

# How a question names its first entity.
STARTS: dict[str, tuple[str, ...]] = {
    "airport": ("{name}", "the airport called {name}"),
    "car": ("the {name}", "the {name} car"),
    "city": ("the city of {name}", "{name}"),
    "country": ("{name}",),
    "county": ("{name}",),
    "director": ("{name}", "the filmmaker {name}"),
    "discoverer": ("{name}",),
    "element": ("the element {lower}", "{lower}"),
    "film": ("the film {name}", "{name}", "the movie {name}"),
    "language": ("the {name} language",),
    "line": ("{name} of the Paris Métro",),
    "station": ("the Métro station {name}", "{name} station in the Paris underground"),
    "subdivision": ("{name}",),
    "town": ("{name} in Ontario", "the Ontario community of {name}"),
}

# Relation -> how a question describes its tail, given a description of its head.
STEPS: dict[str, tuple[str, ...]] = {
    "airport.city": (
        "the place where one gets off a plane at {}",
        "the town that travellers reach through {}",
        "the city whose residents fly from {}",
    ),
    "car.maker": ("the company behind {}", "the firm that makes {}", "the marque that sells {}"),
    "city.subdivision": (
        "the region around {}",
        "the province or state that includes {}",
        "the part of the country that surrounds {}",
    ),
    "country.capital": (
        "the city that is home to the government of {}",
        "the place where ministers sit who govern {}",
        "the city from which one rules {}",
    ),
    "country.currency": (
        "the money spent in {}",
        "the money that shoppers need in {}",
        "the cash handed over in shops of {}",
    ),
    "country.language": (
        "the tongue used by the authorities of {}",
        "the tongue of lawmakers in {}",
        "what civil servants speak in {}",
    ),
    "country.neighbour": (
        "the only state with a land frontier to {}",
        "the one land next door to {}",
    ),
    "county.state": ("the state around {}", "the state that includes {}"),
    "director.first film": (
        "the movie that opened the festival career of {}",
        "the movie that was the debut on the Croisette of {}",
        "the earliest work shown to the festival jury by {}",
    ),
    "director.latest film": (
        "the newest work shown to the festival jury by {}",
        "the last movie brought to the Croisette by {}",
    ),
    "discoverer.first element": (
        "the substance that opened the list of finds of {}",
        "the earliest find of {}",
    ),
    "discoverer.last element": ("the final find of {}",),
    "division.most populous": (
        "the community with the biggest headcount in {}",
        "the place that most people call home in {}",
    ),
    "division.largest": (
        "the community with the most ground in {}",
        "the vastest community of {}",
    ),
    "element.discoverer": (
        "the scientist who found {}",
        "whoever first identified {}",
        "the one to whom chemistry owes {}",
    ),
    "element.place": (
        "the land of the first people to isolate {}",
        "the land where chemists found {}",
    ),
    "film.country": (
        "the nation that made {}",
        "the nation whose studios shot {}",
        "the homeland of {}",
    ),
    "film.director": (
        "the filmmaker behind {}",
        "the person who made {}",
        "the artist in charge of {}",
        "whoever called the shots on {}",
    ),
    "film.language": (
        "the tongue heard in {}",
        "the tongue that actors speak in {}",
        "the tongue of the characters in {}",
    ),
    "language.script": ("the letters used for {}", "the characters used to put down {}"),
    "line.busiest": ("the most crowded stop of {}", "the stop that most riders use on {}"),
    "line.northernmost": ("the stop nearest to the pole on {}", "the top stop on a map of {}"),
    "maker.country": ("the nation that is home to {}", "the homeland of {}"),
    "maker.most powerful": ("the car with the strongest engine by {}",),
    "station.line": ("the route that stops at {}", "the route that takes riders to {}"),
    "subdivision.capital": (
        "the city that is home to the governor of {}",
        "the meeting place of the lawmakers of {}",
    ),
    "subdivision.country": (
        "the nation that includes {}",
        "the nation that rules {}",
        "the nation around {}",
    ),
    "subdivision.largest city": (
        "the biggest town in {}",
        "the town with the greatest headcount in {}",
    ),
    "town.division": (
        "the statistical area around {}",
        "the upper district that includes {}",
        "the county-like unit that takes in {}",
    ),
}

# Relation -> the last question, given a description of its head.
ASKS: dict[str, tuple[str, ...]] = {
    "airport.city": ("Where does one get off a plane at {}?",),
    "airport.icao": ("Which four letters do pilots use for {}?",),
    "airport.elevation": ("How high is the ground at {}?", "How far above the waves is {}?"),
    "car.power": ("How strong is the engine of {}?",),
    "car.price": ("How much did buyers pay for {}?",),
    "city.population": ("How many people live in {}?", "How many residents are there in {}?"),
    "city.subdivision": ("Which province or state includes {}?", "Which region surrounds {}?"),
    "city.zone": (
        "Which tz database entry sets the clocks in {}?",
        "By what clock do people live in {}?",
    ),
    "country.area": ("How big is {}?", "How much land is there in {}?"),
    "country.capital": (
        "Which city is home to the government of {}?",
        "Where do ministers sit who govern {}?",
    ),
    "country.currency": (
        "What money is used in {}?",
        "What does one pay with in {}?",
        "Which banknotes does a visitor need in {}?",
    ),
    "country.dialling": (
        "Which prefix does one dial to phone {}?",
        "Which digits come first in foreign phone calls to {}?",
    ),
    "country.domain": (
        "Which suffix is carried by websites of {}?",
        "What are the last letters of a web site's name in {}?",
    ),
    "country.iso3": ("Which three letters stand for {}?", "What is the short form for {}?"),
    "country.language": (
        "Which tongue is used by the authorities of {}?",
        "What do civil servants speak in {}?",
    ),
    "country.population": ("How many people live in {}?", "How many souls are there in {}?"),
    "country.region": ("Which part of the world includes {}?", "Where on the globe lies {}?"),
    "country.demonym": (
        "Which adjective describes people from {}?",
        "What does one call the inhabitants of {}?",
    ),
    "county.state": ("Which state includes {}?",),
    "currency.code": (
        "Which three letters do bankers write for {}?",
        "How do banks abbreviate {}?",
    ),
    "currency.numeric": ("Which three digits identify {}?",),
    "currency.users": ("How many lands accept {}?",),
    "director.films": (
        "How many works did the jury on the Croisette see by {}?",
        "How many times did the festival jury judge works by {}?",
    ),
    "director.first film": (
        "Which movie was the debut on the Croisette of {}?",
        "Which movie opened the festival career of {}?",
    ),
    "director.first year": ("When did the Croisette first welcome {}?",),
    "director.last year": ("When did the Croisette last welcome {}?",),
    "discoverer.elements": ("How many substances were found by nobody but {}?",),
    "discoverer.first element": ("Which substance opened the list of finds of {}?",),
    "discoverer.first year": ("When was the earliest find of {}?",),
    "division.municipalities": ("How many communities are there in {}?",),
    "division.most populous": ("Which place do most people call home in {}?",),
    "division.largest": ("Which community has the most ground in {}?",),
    "element.density": ("How heavy is a cubic centimetre of {}?",),
    "element.number": ("How many protons are there in an atom of {}?",),
    "element.symbol": ("How do chemists abbreviate {}?",),
    "element.year": ("When did chemists find {}?",),
    "film.country": ("Which nation made {}?", "What is the homeland of {}?"),
    "film.director": ("Who made {}?", "Which filmmaker is behind {}?"),
    "film.language": ("Which tongue is heard in {}?", "What do the actors speak in {}?"),
    "film.original title": (
        "What did audiences at home call {}?",
        "Under what name was one first able to see {}?",
    ),
    "film.running time": ("How long is {}?", "How long does it take to watch {}?"),
    "film.year": ("When did the festival jury see {}?",),
    "language.iso": ("Which three letters stand for {}?",),
    "language.official in": ("How many lands write laws in {}?",),
    "language.own name": ("What do native speakers call {}?",),
    "language.script": ("Which letters are used for {}?",),
    "line.busiest": ("Which stop do most riders use on {}?",),
    "line.northernmost": ("What is the top stop on a map of {}?",),
    "line.stations": ("How many stops are there on {}?",),
    "maker.country": ("Which nation is home to {}?",),
    "maker.most powerful": ("Which car has the strongest engine by {}?",),
    "region.members": ("How many lands make up {}?",),
    "script.code": ("Which four letters stand for {}?",),
    "script.numeric": ("Which three digits identify {}?",),
    "station.location": ("Which neighbourhood surrounds {}?", "Where does one surface at {}?"),
    "station.passengers": ("How many riders pass through {}?",),
    "subdivision.capital": (
        "Where do the lawmakers meet in {}?",
        "Which city is home to the governor of {}?",
    ),
    "subdivision.code": ("How does the standards body abbreviate {}?",),
    "subdivision.country": ("Which nation rules {}?", "Which nation includes {}?"),
    "subdivision.counties": ("How many pieces make up {}?",),
    "subdivision.largest city": ("What is the biggest town in {}?",),
    "subdivision.statehood": ("When did Washington admit {}?",),
    "town.area": ("How much ground is there in {}?",),
    "town.division": ("Which statistical area contains {}?",),
    "town.population": ("How many people were counted last in {}?",),
}

# Relation -> (question for the larger number, question for the smaller), {a} and {b} the names.
COMPARES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "airport.elevation": (
        ("Which airport is higher, {a} or {b}?",),
        ("Which of the airports {a} and {b} is closer to sea level?",),
    ),
    "city.population": (
        ("Do more people live in {a} or in {b}?",),
        ("Which city has fewer people, {a} or {b}?",),
    ),
    "country.area": (("Which is bigger, {a} or {b}?",), ("Which is smaller, {a} or {b}?",)),
    "country.population": (
        ("Where do more people live, {a} or {b}?",),
        ("Which has fewer people, {a} or {b}?",),
    ),
    "director.films": (
        ("Who sent more works to the Croisette, {a} or {b}?",),
        ("Who sent fewer works to the Croisette, {a} or {b}?",),
    ),
    "element.year": (
        ("Which was found later, {a} or {b}?",),
        ("Which was found earlier, {a} or {b}?",),
    ),
    "element.density": (
        ("Which is heavier for its size, {a} or {b}?",),
        ("Which is lighter for its size, {a} or {b}?",),
    ),
    "film.running time": (
        ("Which movie is longer, {a} or {b}?", "Does {a} or {b} take longer to watch?"),
        ("Which movie is shorter, {a} or {b}?", "Does {a} or {b} end sooner?"),
    ),
    "film.year": (
        ("Which movie came to the Croisette later, {a} or {b}?",),
        ("Which movie came to the Croisette first, {a} or {b}?",),
    ),
    "station.passengers": (
        ("Which Métro station has more riders, {a} or {b}?",),
        ("Which Métro station has fewer riders, {a} or {b}?",),
    ),
    "town.population": (
        ("Which Ontario community had more people in 2021, {a} or {b}?",),
        ("Which Ontario community had fewer people in 2021, {a} or {b}?",),
    ),
    "town.area": (
        ("Which Ontario community has more ground, {a} or {b}?",),
        ("Which Ontario community has less ground, {a} or {b}?",),
    ),
}

# (step, relation of its tail) -> questions for the larger and the smaller number.
BRIDGE_COMPARES: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("film.director", "director.films"): (
        (
            "Which movie was made by the person who sent more works to the Croisette, {a} or {b}?",
            "Of {a} and {b}, which has the filmmaker with more works shown on the Croisette?",
        ),
        ("Whose filmmaker sent fewer works to the Croisette, that of {a} or that of {b}?",),
    ),
    ("film.director", "director.first year"): (
        ("Which movie was made by the person with the later debut on the Croisette, {a} or {b}?",),
        (
            "Which movie was made by the person who came to the Croisette earlier, {a} or {b}?",
            "Of {a} and {b}, whose filmmaker made the earlier festival debut?",
        ),
    ),
    ("film.country", "country.area"): (
        ("Which movie comes from the bigger nation, {a} or {b}?",),
        ("Which movie comes from the smaller nation, {a} or {b}?",),
    ),
    ("film.country", "country.population"): (
        ("Which movie was made in the nation with more people, {a} or {b}?",),
        ("Which movie was made in the nation with fewer people, {a} or {b}?",),
    ),
    ("airport.city", "city.population"): (
        ("Which airport takes travellers to the place with more people, {a} or {b}?",),
        ("Which airport takes travellers to the place with fewer people, {a} or {b}?",),
    ),
    ("county.state", "subdivision.statehood"): (
        ("Which lies in the state that entered the nation later, {a} or {b}?",),
        ("Which lies in the state that entered the nation first, {a} or {b}?",),
    ),
    ("element.place", "country.population"): (
        ("Which was found in the land with more people today, {a} or {b}?",),
        ("Which was found in the land with fewer people today, {a} or {b}?",),
    ),
    ("station.line", "line.stations"): (
        ("Which Métro station is on the route with more stops, {a} or {b}?",),
        ("Which Métro station is on the route with fewer stops, {a} or {b}?",),
    ),
    ("town.division", "division.municipalities"): (
        ("Which Ontario community is in the area with more communities, {a} or {b}?",),
        ("Which Ontario community is in the area with fewer communities, {a} or {b}?",),
    ),
}
