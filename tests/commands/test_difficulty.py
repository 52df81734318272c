"""The difficulty matrix of runs: predictions as files, an encoder that says what it is told to."""

import dataclasses
import json
import math
import pathlib
import re
import runpy

import matplotlib.image
import numpy as np
import pytest

from cirag_jax import cli
from cirag_jax.commands import difficulty as command
from cirag_jax.datasets import jsonl
from cirag_jax.errors import UserError
from cirag_jax.io import write_lines
from cirag_jax.retrieval import encoders
from cirag_jax.types import Dataset, Passage, Question
from configs import difficulty as config_file
from tests import answering, tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Told:
    """A passage "cos 0.7" has that cosine with every question."""

    identity = {"model": "told"}
    dim = 2

    def encode(self, texts, kind="passage", progress=None):
        if kind == "query":
            return np.array([[1.0, 0.0]] * len(texts), np.float32)
        found = [float(text.partition("cos ")[2]) for text in texts]
        return np.array([[c, math.sqrt(1 - c * c)] for c in found], np.float32)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(command, "open_encoder_for", lambda block: Told())


def question(name, hops, cosines):
    """Its corpus and itself; a passage a cosine."""
    passages = [Passage(f"{name}-{i}", "", f"cos {c:.6f}") for i, c in enumerate(cosines)]
    found = Question(
        name, f"{name}?", ("right",), hops=hops, supporting=tuple(p.id for p in passages)
    )
    return passages, found


def dataset(root, *questions):
    """A dataset folder of what `question` gives."""
    corpus = {p.id: p for passages, _ in questions for p in passages}
    corpus["other"] = Passage("other", "", "cos 0.0")
    jsonl.write_dataset(Dataset("made", tuple(q for _, q in questions), corpus, {}), root / "data")
    return root / "data"


def prediction(question, *, right, found=True, error=None):
    passages = (question.supporting or ()) if found else ("other",)
    answer = "it is right" if right else "wrong"
    return {"id": question.id, "answer": answer, "passages": passages, "error": error}


def run(root, name, rows, data=None):
    folder = root / name
    folder.mkdir()
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(data or root / "data")
    (folder / "config.json").write_text(json.dumps({"data": {"dir": data, "split": None}}))
    return f"{name}={folder}"


def evaluate(root, *runs, **fields):
    config = config_file.get_config()
    config.runs = runs
    config.update_from_flattened_dict({"bootstrap_samples": 100, **fields})
    (root / "w").mkdir(exist_ok=True)
    return command.evaluate(config.lock(), root / "w")


def grid(hops=(2, 3), per_cell=4):
    """Questions whose D_r grows with their number, in an order that says nothing."""
    made = [
        question(f"q{hop}-{i}", hop, [0.99, 0.95 - 0.1 * hop - 0.01 * i])
        for hop in hops
        for i in range(4 * per_cell)
    ]
    return [made[i] for i in np.random.default_rng(3).permutation(len(made))]


def place(question, per_cell=4):
    """Column of a question of `grid`, and its place there."""
    return divmod(int(question.id.partition("-")[2]), per_cell)


# ------------------------------------------------------------------------------------ the figures


@pytest.fixture
def two_runs(tmp_path):
    """Of each cell ``column + hop - 2`` answers of four are wrong; of the other run all are."""
    made = grid()
    dataset(tmp_path, *made)
    rows, worse = [], []
    for _, one in made:
        column, i = place(one)
        wrong = i < column + one.hops - 2
        rows.append(prediction(one, right=not wrong, found=not wrong or i > 0))
        worse.append({**prediction(one, right=False), "error": "lost" if column == 3 else None})
    return tmp_path, run(tmp_path, "a", rows), run(tmp_path, "b", worse)


def test_the_matrix_of_a_known_function_is_recovered(two_runs):
    root, first, _ = two_runs
    result = evaluate(root, first)
    system = result["systems"]["a"]
    for hop, rates in ((2, [0, 1, 2, 3]), (3, [1, 2, 3, 4])):
        assert [4 * cell["value"] for cell in system["matrix"][hop]] == rates
        assert [cell["num_questions"] for cell in system["matrix"][hop]] == [4] * 4
        assert system["by_hops"][hop]["value"] == sum(rates) / 16
        edges = 0.05 + 0.1 * hop + 0.01 * np.array([3.75, 7.5, 11.25])
        assert result["hops"][hop]["edges"] == pytest.approx(edges, abs=1e-6)
    assert system["error"]["value"] == 16 / 32 and result["num_questions"] == 32
    # The first wrong answer of a cell lacks its gold passages.
    kinds = {name: found["errors"] for name, found in system["failures"].items()}
    assert kinds == {"retriever": 7, "reader": 9, "unanswered": 0}
    assert system["matrix"][3][2]["errors"] == {"retriever": 1, "reader": 2, "unanswered": 0}
    assert system["correlations"]["min"]["mean"]["value"] == pytest.approx(1)
    # The mean grows with the minimum; the power mean does, too, but on no line.
    assert system["strongest"] == ["min", "mean"]
    lines = answering.lines(root / "w" / "difficulty.jsonl")
    one = next(line for line in lines if line["id"] == "q3-13")
    assert one["quartile"] == 4 and one["hops"] == 3
    low = 0.95 - 0.3 - 0.13
    assert one["difficulty"]["min"] == pytest.approx(1 - low, abs=1e-6)
    assert one["difficulty"]["mean"] == pytest.approx(1 - (low + 0.99) / 2, abs=1e-6)
    assert one["errors"] == {"a": 1.0} and one["whose"] == {"a": "reader"}


def test_two_systems_are_subtracted_on_the_same_questions(two_runs):
    root, first, second = two_runs
    result = evaluate(root, first, second)
    pair = result["differences"]["a-b"]
    assert [4 * cell["value"] for cell in pair["matrix"][2]] == [-4, -3, -2, -1]
    assert pair["error"]["value"] == -0.5 and pair["error"]["high"] < 0
    assert pair["matrix"][3][3] == {"value": 0.0, "low": 0.0, "high": 0.0, "num_questions": 4}
    # The questions of b's last column broke down: neither retriever nor reader.
    assert result["systems"]["b"]["failures"]["unanswered"]["errors"] == 8
    assert result["systems"]["b"]["failures"]["reader"]["errors"] == 24


def test_what_a_person_sees(two_runs, capsys):
    root, first, second = two_runs
    evaluate(root, first, second)
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-2] == (
        "a: error 50.0 % of 32 questions; from 0.0 % (hops 2, Q1) to 100.0 % (hops 3, Q4); "
        "r(D_r, error) +0.46 (p=0.008; 32); "
        "of the errors 7 lack a gold passage, 9 have all gold passages"
    )
    assert told[-1].endswith(
        "of the errors 0 lack a gold passage, 24 have all gold passages, 8 have no answer"
    )
    table = (root / "w" / "table.md").read_text()
    assert "a: error (1 - Acc) in per cent" in table and "a-b, in points" in table
    assert re.search(r"^\| 2 +\| +0\.0 \[0\.0, 0\.0\] \(4\) \| +25\.0 \[", table, re.MULTILINE)
    for name, panels in (("matrix", 2), ("difference", 1)):
        # Inches at 150 dots each: 4.6 a panel and 0.75, and room for three rows.
        height, width, _ = matplotlib.image.imread(root / "w" / f"{name}.png").shape
        assert (width, height) == (round(150 * (4.6 * panels + 0.75)), round(150 * 3.36))
        text = (root / "w" / f"{name}.svg").read_text()
        assert "<!-- Q1, low -->" in text and "<!-- hops -->" in text and "n=4" in text


# ---------------------------------------------------------------------------- what cannot be said


def test_questions_that_cannot_be_graded(tmp_path):
    """No gold, no hops, no answer; three of a hop; a hop of one difficulty."""
    few = [question(f"few{i}", 4, [0.1 * i]) for i in range(3)]
    same = [question(f"same{i}", 5, [0.5]) for i in range(6)]
    odd = [
        (p, dataclasses.replace(q, **change))
        for (p, q), change in (
            (question("bare", 2, [0.5]), {"supporting": None}),
            (question("empty", 2, [0.5]), {"supporting": ()}),
            (question("deep", 2, [0.5]), {"hops": None}),
            (question("hidden", 2, [0.5]), {"answers": ()}),
        )
    ]
    made = [*few, *same, *odd]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=place_ % 2 == 0) for place_, (_, one) in enumerate(made)]
    result = evaluate(tmp_path, run(tmp_path, "a", rows))
    assert result["num_questions"] == 9
    left_out = {"no gold passages": 2, "no number of hops": 1, "no gold answer": 1}
    assert result["left_out"] == left_out
    assert result["hops"] == {
        4: {"num_questions": 3, "edges": None, "reason": "fewer than 4 questions (3)"},
        5: {"num_questions": 6, "edges": None, "reason": "all 6 questions have the same D_r"},
    }
    system = result["systems"]["a"]
    for hop, reason in ((4, "fewer than 4 questions (3)"), (5, "all 6 questions have the same")):
        for cell in system["matrix"][hop]:
            assert cell["value"] is None and cell["reason"].startswith(reason)
        assert system["correlations"]["min"]["bins"][hop]["reason"].startswith(reason)
    assert system["by_hops"][4]["value"] == pytest.approx(1 / 3)
    assert system["correlations"]["min"]["mean"]["reason"] == "no hop has a correlation"
    table = (tmp_path / "w" / "table.md").read_text()
    assert re.search(r"^\| 4 +\| +n/a \|", table, re.MULTILINE) and "nan" not in table
    assert "Hops 4: no quartiles, fewer than 4 questions (3)." in table
    assert "Questions left out: no gold passages (2), no number of hops (1), no gold" in table
    assert "<!-- n/a -->" in (tmp_path / "w" / "matrix.svg").read_text()


def test_predictions_that_do_not_count(tmp_path, capsys):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(8)]
    dataset(tmp_path, *made)
    asked = [one for _, one in made]
    rows = [prediction(one, right=True) for one in asked[:4]]
    rows += [rows[0], prediction(dataclasses.replace(asked[0], id="nobody"), right=True)]
    rows += [prediction(asked[4], right=False, error="not answered yet")]
    rows += [prediction(asked[5], right=False, found=False)]
    whole = [prediction(one, right=True) for one in asked]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), run(tmp_path, "b", whole))
    system = result["systems"]["a"]
    assert system["left_out"] == {
        "question unknown": 1,
        "more than one prediction": 1,
        "not answered yet": 1,
        "no prediction": 2,
    }
    assert (system["error"]["value"], system["error"]["num_questions"]) == (0.25, 4)
    # Two questions a quartile: the first counts one, the last none.
    assert [cell["num_questions"] for cell in system["matrix"][2]] == [1, 2, 1, 0]
    empty = system["matrix"][2][3]
    assert (empty["value"], empty["reason"]) == (None, "no question")
    assert result["systems"]["b"]["error"]["num_questions"] == 8
    assert result["differences"]["a-b"]["error"]["num_questions"] == 4
    assert result["differences"]["a-b"]["matrix"][2][3]["reason"] == "no question"
    assert "Predictions of a left out: question unknown (1), more than" in capsys.readouterr().err


def test_cells_of_few_questions_are_not_told(two_runs, capsys):
    """Of the first column of 2 hops one of four predictions counts, of the last three."""
    root, _, second = two_runs
    made = grid()
    gone = {"q2-0", "q2-1", "q2-2", "q2-12"}
    rows = [prediction(q, right=place(q)[1] > 1) for _, q in made if q.id not in gone]
    result = evaluate(root, run(root, "c", rows), second, least_in_cell=4)
    first, *between, last = result["systems"]["c"]["matrix"][2]
    assert first["value"] is None and "low" not in first and first["num_questions"] == 1
    assert first["reason"] == "fewer than 4 questions (1)"
    assert last["reason"] == "fewer than 4 questions (3)"
    assert [cell["value"] for cell in between] == [0.5, 0.5]
    pair = result["differences"]["c-b"]["matrix"]
    assert pair[2][0] == {"value": None, "reason": first["reason"], "num_questions": 1}
    assert pair[3][0]["value"] == -0.5
    correlations = result["systems"]["c"]["correlations"]["min"]
    assert correlations["bins"][2]["reason"] == "fewer than 3 points (2)"
    assert correlations["diagonal"]["reason"] == "fewer than 3 points (1)"
    assert correlations["questions"]["2"]["num_points"] == 12
    assert result["systems"]["c"]["by_hops"][2]["num_questions"] == 12
    assert result["settings"]["least_in_cell"] == 4
    table = (root / "w" / "table.md").read_text()
    assert re.search(r"^\| 2 +\| +n/a \| +50\.0 \[", table, re.MULTILINE)
    assert "Cells of fewer than 4 questions are n/a and left out of r." in table
    for name, count in (("matrix", 2), ("difference", 2)):
        assert (root / "w" / f"{name}.svg").read_text().count("<!-- n/a -->") == count


def test_a_run_of_which_nothing_counts(tmp_path, capsys):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=True) for _, one in made] * 2
    result = evaluate(tmp_path, run(tmp_path, "a", rows))
    assert result["systems"]["a"]["error"]["reason"] == "no question"
    assert "a: error n/a (no question)" in capsys.readouterr().err


def test_a_run_that_retrieves_nothing_has_no_split(tmp_path, capsys):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [{**prediction(one, right=False), "passages": []} for _, one in made]
    result = evaluate(tmp_path, run(tmp_path, "a", rows))
    system = result["systems"]["a"]
    assert system["failures"] == {"reason": "the run retrieved nothing"}
    assert "errors" not in system["matrix"][2][0]
    assert system["correlations"]["min"]["questions"]["all"]["reason"].startswith("the error is")
    table = (tmp_path / "w" / "table.md").read_text()
    assert "Failures of a: n/a, the run retrieved nothing." in table
    assert "r(D_r, error) n/a (the error is constant" in capsys.readouterr().err


def test_gold_passages_count_as_retrieved_among_the_first(tmp_path):
    made = [question(f"q{i}", 2, [0.9, 0.8 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=False) for _, one in made]
    rows[0]["passages"] = ["other", *rows[0]["passages"]]
    name = run(tmp_path, "a", rows)
    for most, missing in ((0, 0), (3, 0), (2, 1), (1, 4)):
        split = evaluate(tmp_path, name, retrieved_at=most)["systems"]["a"]["failures"]
        assert (split["retriever"]["errors"], split["reader"]["errors"]) == (missing, 4 - missing)


def test_a_gold_sentence_counts_as_found_in_every_chunk_that_has_it(tmp_path):
    """Chunks of one article that share their third sentence."""
    parts = [
        Passage("a@1", "A", "One. Two. cos 0.5", ("One.", "Two.", "cos 0.5")),
        Passage("a@2", "A", "cos 0.5 Four.", ("cos 0.5", "Four.")),
    ]
    made = [
        (
            parts,
            Question(
                f"q{i}", "?", ("right",), hops=2, supporting=("a@1",),
                supporting_sentences=(("a@1", place),) if place is not None else None,
            ),
        )
        for i, place in enumerate((2, 1, None, 2))
    ]  # fmt: skip
    dataset(tmp_path, *made)
    rows = [{**prediction(one, right=False), "passages": ["a@2"]} for _, one in made]
    rows[3]["passages"] = ["other", "a@2"]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), retrieved_at=1)
    lines = answering.lines(tmp_path / "w" / "difficulty.jsonl")
    whose = {line["id"]: line["whose"]["a"] for line in lines}
    assert whose == {"q0": "reader", "q1": "retriever", "q2": "retriever", "q3": "retriever"}
    assert result["systems"]["a"]["failures"]["reader"]["errors"] == 1


def test_a_prediction_that_failed_is_wrong_whatever_it_left(tmp_path):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=True, error="lost") for _, one in made]
    system = evaluate(tmp_path, run(tmp_path, "a", rows))["systems"]["a"]
    assert system["error"]["value"] == 1 and system["failures"]["unanswered"]["errors"] == 4


@pytest.mark.parametrize("score", ["em", "f1", "acc"])
def test_the_score_is_chosen(tmp_path, score):
    """ "it is right" for "right": contained, one word of three, not the same."""
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=True) for _, one in made]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), score=score)
    wanted = {"em": 1.0, "f1": 0.5, "acc": 0.0}[score]
    assert result["systems"]["a"]["error"]["value"] == pytest.approx(wanted)


def test_a_judge_says_what_is_right(tmp_path):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(5)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=i > 1) for i, (_, one) in enumerate(made)]
    rows[3]["error"] = "lost"
    name = run(tmp_path, "a", rows)
    (tmp_path / "j").mkdir()
    verdicts = [True, True, None, True]  # of the last nothing
    told = [
        {"id": row["id"], "system": "a", "judged": row["answer"], "judge": verdict}
        for row, verdict in zip(rows, verdicts, strict=False)
    ]
    told.append({"id": "q4", "system": "b", "judged": "it is right", "judge": True})
    file = tmp_path / "j" / "judgements.jsonl"
    write_lines(file, told)
    result = evaluate(tmp_path, name, judgements=str(tmp_path / "j"))
    system = result["systems"]["a"]
    assert (system["error"]["value"], system["error"]["num_questions"]) == (pytest.approx(1 / 3), 3)
    assert system["left_out"] == {"no verdict": 2}
    assert "a: error (by the judge) in per cent" in (tmp_path / "w" / "table.md").read_text()
    with pytest.raises(
        UserError,
        match=r"judgements.jsonl has no verdicts about the run c; .*as in this file: a, b\.",
    ):
        evaluate(tmp_path, run(tmp_path, "c", rows), judgements=str(tmp_path / "j"))
    with pytest.raises(
        UserError, match=r"w is not a workdir of configs/judge.py: it has no judgem"
    ):
        evaluate(tmp_path, name, judgements=str(tmp_path / "w"))
    write_lines(file, [*told, told[1]])
    with pytest.raises(UserError, match=r"jsonl:6: field 'id' repeats the verdict about 'q1' of"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))
    write_lines(file, [{**told[0], "judge": 3}])
    with pytest.raises(UserError, match=r"judgements.jsonl:1: field 'judge' must be"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))
    file.write_text('{"id": "q0", "system": "a", "judge": true}\n')
    with pytest.raises(UserError, match=r"judgements.jsonl:1: field 'judged' is missing"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))


def test_a_verdict_about_another_answer_does_not_count(tmp_path, capsys):
    """The run was made anew since; the judge strips what it is shown, or saw a whole response."""
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(6)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=True) for _, one in made]
    rows[0]["answer"], rows[5]["error"] = " it is right\n", "lost"
    judged = [
        {"judged": "it is right"},
        {"judged": "it was right"},
        {"judged": "So it is right.", "answer": "it is right"},
        {"judged": "it is right", "answer": "wrong"},
        {"judged": "it was right", "judge": None},
        {"judged": "it was right"},  # a failure is one, whatever was there before
    ]
    told = [{"id": f"q{i}", "system": "a", "judge": True, **row} for i, row in enumerate(judged)]
    (tmp_path / "j").mkdir()
    write_lines(tmp_path / "j" / "judgements.jsonl", told)
    result = evaluate(tmp_path, run(tmp_path, "a", rows), judgements=str(tmp_path / "j"))
    system = result["systems"]["a"]
    assert (system["error"]["value"], system["error"]["num_questions"]) == (pytest.approx(1 / 3), 3)
    assert system["left_out"] == {"another answer was judged": 3}
    assert "left out: another answer was judged (3)" in (tmp_path / "w" / "table.md").read_text()


def test_the_aggregate_makes_the_columns(tmp_path):
    """The least similar passage says one order, the mean another."""
    lows, highs = (0.5, 0.4, 0.3, 0.2), (0.5, 0.65, 0.8, 0.95)
    made = [question(f"q{i}", 2, pair) for i, pair in enumerate(zip(lows, highs, strict=True))]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=i < 2) for i, (_, one) in enumerate(made)]
    name = run(tmp_path, "a", rows)
    for aggregate, wanted in (("min", [0, 0, 1, 1]), ("mean", [1, 1, 0, 0])):
        result = evaluate(tmp_path, name, aggregate=aggregate)
        assert [cell["value"] for cell in result["systems"]["a"]["matrix"][2]] == wanted
        assert result["systems"]["a"]["strongest"] == ["min"]
        median = {"min": 0.65, "mean": 1 - (0.525 + 0.55) / 2}[aggregate]
        assert result["hops"][2]["edges"][1] == pytest.approx(median, abs=1e-6)


@pytest.mark.parametrize("size", [(64, 128, 25), (128, 256, 50), (256, 512, 100)])
def test_chunks_and_articles_are_embedded_where_they_are_asked_for(tmp_path, monkeypatch, size):
    """Of an article of 600 words only what holds the gold sentence."""
    seen = []

    class Counting(Told):
        def encode(self, texts, kind="passage", progress=None):
            seen.extend(texts if kind == "passage" else ())
            return np.full((len(texts), 2), math.sqrt(0.5), np.float32)

    monkeypatch.setattr(command, "open_encoder_for", lambda block: Counting())
    sentences = [f"{' '.join(f's{s}w{i}' for i in range(9))} end." for s in range(60)]
    parts = [
        Passage(f"a#{p}", "A", " ".join(own), tuple(own))
        for p, own in enumerate((sentences[:30], sentences[30:]), 1)
    ]
    made = [
        (
            parts,
            Question(
                f"q{i}", "?", ("x",), hops=2, supporting=("a#2",),
                supporting_sentences=(("a#2", 25),),
            ),
        )
        for i in range(4)
    ]  # fmt: skip
    dataset(tmp_path, *made)
    name = run(tmp_path, "a", [prediction(one, right=True) for _, one in made])
    least, most, overlap = size
    chunks = {"chunks.least": least, "chunks.most": most, "chunks.overlap": overlap}
    result = evaluate(tmp_path, name, unit="chunk", **chunks)
    assert result["settings"]["chunks"] == {"least": least, "most": most, "overlap": overlap}
    assert f"over chunks of {least} to {most} words" in (tmp_path / "w" / "table.md").read_text()
    assert seen and all("s55w3" in text for text in seen)
    assert all(least <= len(text.split()) - 1 <= most for text in seen)
    seen.clear()
    evaluate(tmp_path, name, unit="article")
    assert [len(text.split()) for text in seen] == [601]


# -------------------------------------------------------------------------------------- bad input


def test_bad_input(tmp_path):
    made = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *made)
    rows = [prediction(one, right=True) for _, one in made]
    good = run(tmp_path, "a", rows)

    def refuses(message, *runs, **fields):
        with pytest.raises(UserError, match=message):
            evaluate(tmp_path, *runs, **fields)

    refuses(r"config\.runs is required")
    refuses("two runs named a; rename one", good, f"a={tmp_path / 'a'}")
    refuses("it has no predictions.jsonl; set config.runs to folders in it: a", str(tmp_path))
    refuses(r"config\.score='bleu' is not one of em, f1, acc", good, score="bleu")
    refuses(r"config\.unit='word' is not one of passage, chunk, article", good, unit="word")
    refuses(r"config\.chunks: overlap must not exceed least", good, **{"chunks.most": 100})
    refuses(r"config\.aggregate='max' is not one of min, mean", good, aggregate="max")
    refuses(r"config\.power must not be 0", good, power=0.0)
    refuses(r"config\.profile='x' is an unknown profile", good, profile="x")
    refuses(r"config\.bootstrap_samples=0 must be at least 1", good, bootstrap_samples=0)
    refuses(r"config\.least_in_cell=0 must be at least 1", good, least_in_cell=0)
    refuses(r"config\.retrieved_at=-1 must not be negative", good, retrieved_at=-1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "predictions.jsonl").write_text('{"id": "q0", "answer": 3}\n')
    refuses(r"bad/predictions.jsonl:1: field 'answer' must be a string", str(tmp_path / "bad"))
    (tmp_path / "bad" / "predictions.jsonl").write_text('{"id": "q0", "answer": "right"}\n')
    refuses(r"bad/config.json does not exist; set --config.data.dir to the dataset of the run",
            str(tmp_path / "bad"))  # fmt: skip
    # A run of other software needs no config where the dataset is named.
    data = str(tmp_path / "data")
    found = evaluate(tmp_path, str(tmp_path / "bad"), **{"data.dir": data})
    assert found["num_questions"] == 1
    (tmp_path / "bad" / "config.json").write_text('{"data": 3}')
    refuses(r"bad/config.json: field 'data' must be an object", str(tmp_path / "bad"))
    gone = run(tmp_path, "gone", rows, data=tmp_path / "elsewhere")
    refuses(r"gone/config.json: the dataset .*elsewhere does not exist; set", gone)
    refuses("gone answered questions of .*elsewhere, .*a of .*data", good, gone)
    unknown = run(tmp_path, "unknown", [{**row, "id": f"x{row['id']}"} for row in rows])
    refuses("data has no question of .*unknown; set --config.data.dir", unknown)


def test_data_without_gold_are_refused(tmp_path):
    made = [question(f"q{i}", 2, [0.5]) for i in range(2)]
    dataset(tmp_path, *((p, dataclasses.replace(q, supporting=None)) for p, q in made))
    name = run(tmp_path, "a", [prediction(one, right=True, found=False) for _, one in made])
    with pytest.raises(UserError, match="no question of data can be graded: 2 have no gold pass"):
        evaluate(tmp_path, name)


# ------------------------------------------------------------------------------ the whole command


def launch(capsys, script, argv):
    """What a command prints on standard output and on standard error."""
    main = runpy.run_path(str(_ROOT / "launch" / script))["main"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, "configs/retrieval.py", [script, *argv])
    found = capsys.readouterr()
    assert end.value.code == 0, found.err
    return found


def test_a_run_of_the_answering_command(tmp_path, capsys, monkeypatch):
    """Answers, then their matrix; the run's folder says which dataset it was."""
    monkeypatch.setattr(command, "open_encoder_for", encoders.open_encoder_for)
    folders = answering.tiny_folders(tmp_path)
    more = ("--config.native_rag.num_read=1", "--config.reader.max_tokens=2")
    argv = answering.arguments(folders, tmp_path / "run", *more, method="native_rag")
    launch(capsys, "answer.py", argv)
    argv = [
        "--config=configs/difficulty.py", f"--config.runs={tmp_path / 'run'}",
        f"--config.encoder.model={folders['encoder']}", "--config.bootstrap_samples=50",
    ]  # fmt: skip
    done = launch(capsys, "evaluate.py", [*argv, f"--workdir={tmp_path / 'w'}"])
    result = json.loads(done.out)
    assert json.loads((tmp_path / "w" / "result.json").read_text()) == result
    assert result["num_questions"] == 8 and list(result["hops"]) == ["2"]
    cells = result["systems"]["run"]["matrix"]["2"]
    assert [cell["num_questions"] for cell in cells] == [2] * 4
    assert "NaN" not in done.out and "run: error " in done.err
    questions = {q.id: q for q in tiny.dataset().questions}
    predicted = answering.lines(tmp_path / "run" / "predictions.jsonl")
    missing = sum(not set(questions[r["id"]].supporting) <= set(r["passages"]) for r in predicted)
    assert result["systems"]["run"]["failures"]["retriever"]["num_questions"] == missing
