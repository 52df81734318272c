"""The answering command in tests: a tiny dataset, tiny models, and runs in other processes."""

import dataclasses
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
from typing import Any

from tests import tiny, tiny_decoder

_ROOT = pathlib.Path(__file__).resolve().parents[1]
VOLATILE = {"seconds", "seconds_per_question", "load_seconds"}


def tiny_folders(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """A dataset of which eight questions are asked, an encoder and a decoder, all tiny."""
    return {
        "data": tiny.dataset_folder(root / "data"),
        "encoder": tiny.model_folder(root / "encoder"),
        "decoder": tiny_decoder.folder(root / "decoder", max_position_embeddings=2048),
    }


def arguments(folders, workdir, *more, method="cirag") -> list[str]:
    roles = ("integrator", "reader") if method == "cirag" else ("reader",)
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
    """One run of the command: its status, its result, and what its backends were asked."""

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


def execute(folder: pathlib.Path, plans: list[dict[str, Any]]) -> list[Run]:
    """Runs the command as `tests.answer_driver` says."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans):
        plan.setdefault("keep", None)
        plan |= {name: str(folder / f"{index}.{name}") for name in ("log", "out", "err")}
    (folder / "plan.json").write_text(json.dumps(plans))
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "CIRAG_JAX_CACHE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.answer_driver", str(folder / "plan.json")],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [
        Run(
            status,
            pathlib.Path(plan["out"]).read_text("utf-8"),
            pathlib.Path(plan["err"]).read_text("utf-8"),
            _batches(plan["log"]),
        )
        for status, plan in zip(json.loads(done.stdout), plans, strict=True)
    ]


def _batches(log: str) -> list[tuple[str, set[tuple[str, int, int]]]]:
    lines = map(json.loads, pathlib.Path(log).read_text("utf-8").splitlines())
    return [(name, {tuple(place) for place in places}) for name, places in lines]


def journalled(workdir: pathlib.Path, name: str = "journal.sqlite") -> set[tuple[str, int, int]]:
    """Places of the responses that a journal holds."""
    with sqlite3.connect(workdir / name) as db:
        found = set(db.execute("SELECT program, ordinal, part FROM responses"))
    db.close()
    return found


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
