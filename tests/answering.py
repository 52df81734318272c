"""Helpers that run launch/answer.py in another process, on a tiny dataset with tiny models."""

import dataclasses
import json
import pathlib
import shutil
import sqlite3
from typing import Any

from tests import tiny, tiny_decoder

VOLATILE = {"seconds", "seconds_per_question", "load_seconds", "truncated_texts"}


def tiny_folders(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Makes a tiny dataset with eight questions to answer, a tiny encoder and a tiny decoder."""
    return {
        "data": tiny.dataset_folder(root / "data"),
        "encoder": tiny.model_folder(root / "encoder"),
        "decoder": tiny_decoder.folder(root / "decoder", max_position_embeddings=2048),
    }


def arguments(folders, workdir, *more, method="cirag") -> list[str]:
    first = {"cirag": ("integrator",), "c2rag": ("planner",)}
    roles = (*first.get(method, ()), "reader")
    values = {"data.dir": folders["data"], "data.split": "train", "in_flight": 5}
    values["reader.max_tokens"] = 6
    if method != "direct":
        values |= {"encoder.model": folders["encoder"], f"{method}.num_passages": 3}
    if method == "native_rag":
        values["native_rag.num_read"] = 2
    if method == "cirag":
        values |= {
            "cirag.max_steps": 2, "cirag.num_candidates": 4, "cirag.prefilled_headers": True,
            "cirag.decision_tokens": 5,
        }  # fmt: skip
    for role in roles:
        values[f"{role}.model"] = folders["decoder"]
        values[f"{role}.prefix_tokens"] = 0
        values[f"{role}.batch_size"] = 4
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    config = f"--config=configs/methods/{method}.py"
    return [config, *overrides, *more, f"--workdir={workdir}"]


# ------------------------------------------------------------------------------- in other processes


@dataclasses.dataclass
class Run:
    """The exit status, the result and the backend requests of one run of the command."""

    status: int
    out: str
    err: str
    batches: list[tuple[str, set[tuple[str, int, int]]]]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def asked(self) -> list[tuple[str, int, int]]:
        return [place for _, places in self.batches for place in places]


def execute(command, folder: pathlib.Path, plans: list[dict[str, Any]]) -> list[Run]:
    """Runs ``launch/answer.py`` once per plan, with the fixture ``command``.

    A plan has ``arguments`` and two optional keys: ``stop`` has the arguments of
    `tests.hooks.signal_at_write`, and ``keep`` is a pair of a workdir and the folder to which its
    journal is copied after the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for index, plan in enumerate(plans):
        log = folder / f"{index}.log"
        hooks = [["watch_backends", str(log)]]
        if plan.get("stop"):
            hooks.append(["signal_at_write", *plan["stop"]])
        done = command("answer.py", *plan["arguments"], hooks=hooks)
        if "keep" in plan:
            workdir, to = plan["keep"]
            to.mkdir(parents=True)
            for path in workdir.glob("journal.sqlite*"):  # including its write-ahead log
                shutil.copy(path, to)
        runs.append(Run(*done, _batches(log)))
    return runs


def _batches(log: pathlib.Path) -> list[tuple[str, set[tuple[str, int, int]]]]:
    lines = map(json.loads, log.read_text("utf-8").splitlines())
    return [(name, {tuple(place) for place in places}) for name, places in lines]


def journalled(workdir: pathlib.Path, name: str = "journal.sqlite") -> set[tuple[str, int, int]]:
    """Returns the keys of the responses that a journal has recorded."""
    with sqlite3.connect(workdir / name) as db:
        keys = set(db.execute("SELECT program, ordinal, part FROM responses"))
    db.close()
    return keys


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
