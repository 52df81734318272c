"""Results in journals of extraction and of generated questions that are not what was written."""

import contextlib
import json
import re
import shutil
import sqlite3

import pytest

from cirag_jax.commands import backends
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.commands.generate_questions import generate_questions
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.runtime import journal
from cirag_jax.triples.store import TripleStore
from tests import tiny
from tests.attacks.hostile import CHANGES, attack, garbled, held
from tests.grade.articles import Model, write_articles


class Extractor(Model):
    """Lists the first word of a passage, then one triple; entities are asked for first."""

    def extractor(self, shown):
        if "Named entities:" in shown:
            return json.dumps({"triples": [["Ule", "feeds", "Tarn"]]})
        return json.dumps({"named_entities": ["Ule"]})


def _questions(root):
    """Its config, and a workdir that a whole run left."""
    pytest.importorskip("sklearn")
    pytest.importorskip("networkx")
    config = load_config("configs/grade.py")
    config.update_from_flattened_dict(
        {
            "documents": str(write_articles(root / "articles")),
            "encoder.model": str(tiny.model_folder(root / "encoder")),
            "clusters.reduction": "pca",
            "clusters.most_components": 1,
        }
    )
    (root / "work").mkdir()
    generate_questions(config.lock(), root / "work")
    return config


def _triples(root):
    """Its config, and a workdir whose run ended before it stored what was extracted."""
    config = load_config("configs/extract.py")
    (root / "data").mkdir()
    rows = [{"id": f"p{n}", "title": "Ule", "text": "Ule feeds Tarn."} for n in range(2)]
    (root / "data" / "corpus.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config.data.dir = str(root / "data")
    (root / "work").mkdir()

    def full(*_):
        raise UserError("the disk is full")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="full"):
        patch.setattr(TripleStore, "commit", full)
        extract_corpus(config.lock(), root / "work")
    return config


# What runs, which rows of its journal are damaged, and the model that made them.
COMMANDS = {
    "questions": (_questions, generate_questions, Model),
    "extract": (_triples, extract_corpus, Extractor),
}
STEPS = [("questions", s) for s in ("claim", "triples", "clusters", "same", "question")]
STEPS.append(("extract", "p"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of each command what goes on in a workdir."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "of_model", str)  # there are no such weights
        for name, (prepare, command, model) in COMMANDS.items():
            opened = model()
            patch.setattr(backends, "open_backend", lambda config, spent, m=opened: m)
            root = tmp_path_factory.mktemp(name)
            found[name] = root, prepare(root), command
        yield found


def _damaged(whole, command, step, change):
    """The journal and a program of a step, of which it has another result; and what goes on."""
    root, config, run = whole[command]
    shutil.rmtree(root / "copy", ignore_errors=True)
    work = shutil.copytree(root / "work", root / "copy")
    with contextlib.closing(sqlite3.connect(work / journal.FILE)) as db:
        rows = "SELECT id, outcome FROM programs WHERE id LIKE ? AND outcome IS NOT NULL"
        program, text = db.execute(f"{rows} ORDER BY id", (f"{step}%",)).fetchone()
        other = change(text)
        db.execute("UPDATE programs SET outcome = ? WHERE id = ?", (other, program))
        db.commit()
    return work / journal.FILE, program, lambda: run(config, work)


def _with_nan(text):
    """NaN in place of the first value."""
    value = json.loads(text)
    place = next(iter(value)) if isinstance(value, dict) else 0
    value[place] = float("nan")
    return json.dumps(value)


BROKEN = {
    "cut": lambda text: text[:-2],
    "no JSON": lambda text: "zz",
    "other type": lambda text: '"x"',
    "null": lambda text: "null",
    "NaN": lambda text: "NaN",
    "NaN inside": _with_nan,
    "fields missing": lambda text: "{}",
}


@pytest.mark.parametrize(("command", "step"), STEPS)
@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_result_is_named(whole, command, step, how):
    file, program, go_on = _damaged(whole, command, step, BROKEN[how])
    told = f"{file}: the result of {program!r} is damaged ("
    with pytest.raises(UserError, match=re.escape(told)):
        go_on()


@pytest.mark.parametrize(
    ("step", "other"),
    [
        ("triples", '{"triples": [["Ule", "feeds", "Tarn", 6]], "problems": []}'),  # of six claims
        ("triples", '{"triples": [["Ule", "feeds", "Tarn", -1]], "problems": []}'),
        ("clusters", "[[0, 1, 6]]"),
    ],
)
def test_a_place_that_there_is_not_is_named(whole, step, other):
    file, program, go_on = _damaged(whole, "questions", step, lambda text: other)
    with pytest.raises(UserError, match=re.escape(f"{file}: the result of {program!r} is damaged")):
        go_on()


# Another claim is another text to embed, which takes seconds.
@pytest.mark.parametrize(("command", "step"), STEPS[1:])
@attack(4, CHANGES)
def test_other_values_end_in_one_sentence(whole, command, step, changes):
    def change(text):
        return garbled(json.loads(text), changes).decode("utf-8", "replace")

    held(_damaged(whole, command, step, change)[2])
