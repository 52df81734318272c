"""The result page: several runs on the same questions, with a link to every answer's trace.

``index.html`` stands beside the traces that it links, ``trace-1.html`` and so on; each is one file
that fetches nothing.
"""

import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.io import write_text
from cirag_jax.reports import comparison, figures, pages, trace
from cirag_jax.reports.pages import Section
from cirag_jax.runtime.records import Record
from cirag_jax.types import Prediction

PAGE = "index.html"


def write(
    result: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Record]],
    workdir: pathlib.Path,
    *,
    title: str | None = None,
    note: str = "",
    more: Sequence[Section] = (),
) -> dict[str, Any]:
    """Writes ``index.html`` and every run's trace; all of them or none.

    Args:
      result: of `commands.comparison.measure_runs`.
      records: of every run's questions, by id.
      workdir: an existing folder.
      title: by default the runs' names.
      note: what stands below the title.
      more: sections that stand before the questions.

    Returns:
      ``page`` and ``traces``: the paths.
    """
    settings = result["settings"]
    names = {run: f"trace-{number}.html" for number, run in enumerate(settings["runs"], start=1)}
    page = _page(result, records, names, title or ", ".join(names), note, more)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{PAGE}.", dir=workdir) as folder:
            aside = pathlib.Path(folder)
            for run, name in names.items():
                profile = settings["profile"]
                trace.write_trace(settings["runs"][run], aside / name, title=run, profile=profile)
            write_text(aside / PAGE, page)
            for name in (*names.values(), PAGE):
                os.replace(aside / name, workdir / name)
    except OSError as error:
        raise UserError(f"{workdir / PAGE} cannot be written: {error.strerror or error}.") from None
    traces = {run: str(workdir / name) for run, name in names.items()}
    return {"page": str(workdir / PAGE), "traces": traces}


def _page(
    result: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Record]],
    traces: Mapping[str, str],
    title: str,
    note: str,
    more: Sequence[Section],
) -> Iterator[str]:
    pictures = {name: figures.svg(drawn) for name, drawn in comparison.draw(result)}
    found = [*comparison.sections(result, pictures), *more]
    profile = result["settings"]["profile"]
    several = any(system["repeats"]["count"] > 1 for system in result["systems"].values())
    before, after = pages.template(
        "results.html",
        title,
        comparison.STYLE,
        ["page.js", "results.js"],
        images=True,
        links="".join(pages.link(f"#{pages.anchor(s.title)}", s.title) for s in found),
        traces="".join(pages.link(name, run, tab=name) for run, name in traces.items()),
        note=f"<p>{pages.text(note)}</p>" if note else "",
        sections=pages.sections(found),
        profile=pages.text(profile),
        seed=", of the first seed" if several else "",
    )
    yield before
    yield pages.data_block(
        "index",
        {
            "runs": [{"name": run, "page": name} for run, name in traces.items()],
            "questions": list(_rows(records, profile)),
        },
    )
    yield after


def _rows(records: Mapping[str, Mapping[str, Record]], profile: str) -> Iterator[dict[str, Any]]:
    """Every question, and of every run its verdict, its answer, and its number in the trace."""
    places = {run: {i: n for n, i in enumerate(own, start=1)} for run, own in records.items()}
    for i, record in next(iter(records.values())).items():
        cells = []
        for run, own in records.items():
            judged = trace.judged(own[i], own[i].result(Prediction), profile)
            cells.append([judged["verdict"], judged["answer"], places[run][i]])
        yield {**trace.asked(record), "runs": cells}
