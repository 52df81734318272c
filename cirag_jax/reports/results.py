"""The result page: compares runs on the same questions and links to the trace of every answer.

``index.html`` links to the traces in its folder, ``trace-1.html`` and so on.
"""

import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cirag_jax.io import write_text, writing
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
    """Writes ``index.html`` and the trace of every run; after an error, none is written.

    Args:
      result: result of `commands.comparison.measure_runs`.
      records: the records of each run, by run and question id.
      workdir: an existing folder.
      title: title of the page; by default, the names of the runs.
      note: text below the title.
      more: additional sections before the questions.

    Returns:
      The paths of ``page`` and ``traces``.
    """
    settings = result["settings"]
    names = {run: f"trace-{number}.html" for number, run in enumerate(settings["runs"], start=1)}
    page = _page(result, records, names, title or ", ".join(names), note, more)
    with (
        writing(workdir / PAGE),
        tempfile.TemporaryDirectory(prefix=f".{PAGE}.", dir=workdir) as folder,
    ):
        aside = pathlib.Path(folder)
        for run, name in names.items():
            profile = settings["profile"]
            trace.write_trace(settings["runs"][run], aside / name, title=run, profile=profile)
        write_text(aside / PAGE, page)
        for name in (*names.values(), PAGE):
            os.replace(aside / name, workdir / name)
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
    pictures = {name: figures.svg(figure) for name, figure in comparison.draw(result)}
    sections = [*comparison.sections(result, pictures), *more]
    profile = result["settings"]["profile"]
    is_repeated = any(system["repeats"]["count"] > 1 for system in result["systems"].values())
    before, after = pages.template(
        "results.html",
        title,
        comparison.STYLE,
        ["page.js", "results.js"],
        images=True,
        links="".join(pages.link(f"#{pages.anchor(s.title)}", s.title) for s in sections),
        traces="".join(pages.link(name, run, tab=name) for run, name in traces.items()),
        note=f"<p>{pages.text(note)}</p>" if note else "",
        sections=pages.sections(sections),
        profile=pages.text(profile),
        seed=", first seed" if is_repeated else "",
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
    """Yields each question with every run's verdict, answer and position in the run's trace."""
    positions = {run: {i: n for n, i in enumerate(ids, start=1)} for run, ids in records.items()}
    for i, record in next(iter(records.values())).items():
        cells = []
        for run, by_id in records.items():
            answer = trace.answer_fields(
                by_id[i], by_id[i].result(Prediction, partial=True), profile
            )
            cells.append([answer["verdict"], answer["answer"], positions[run][i]])
        yield {**trace.question_fields(record), "runs": cells}
