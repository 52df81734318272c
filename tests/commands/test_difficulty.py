"""The difficulty matrix of runs, with made-up predictions and an encoder with given cosines."""

import collections
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


class CosineEncoder:
    """An encoder that gives the passage "cos 0.7" a cosine of 0.7 with each question."""

    identity = {"model": "told"}
    dim = 2

    truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        if kind == "query":
            return np.array([[1.0, 0.0]] * len(texts), np.float32)
        cosines = [float(text.partition("cos ")[2]) for text in texts]
        return np.array([[c, math.sqrt(1 - c * c)] for c in cosines], np.float32)


@pytest.fixture(autouse=True)
def cosine_encoder(monkeypatch):
    monkeypatch.setattr(command, "open_encoder_for", lambda block: CosineEncoder())


def question(name, hops, cosines):
    """Returns a question's gold passages, which have these cosines, and the question."""
    passages = [Passage(f"{name}-{i}", "", f"cos {c:.6f}") for i, c in enumerate(cosines)]
    found = Question(
        name, f"{name}?", ("right",), hops=hops, supporting=tuple(p.id for p in passages)
    )
    return passages, found


def dataset(root, *questions):
    """Writes a dataset folder from results of `question`."""
    corpus = {p.id: p for passages, _ in questions for p in passages}
    corpus["other"] = Passage("other", "", "cos 0.0")
    jsonl.write_dataset(Dataset("made", tuple(q for _, q in questions), corpus, {}), root / "data")
    return root / "data"


def simple_questions(root, count):
    """Writes a dataset of two-hop questions of increasing difficulty; returns the questions."""
    pairs = [question(f"q{i}", 2, [0.9 - 0.1 * i]) for i in range(count)]
    dataset(root, *pairs)
    return [q for _, q in pairs]


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
    """Returns questions in random order; D_r increases with a question's number."""
    pairs = [
        question(f"q{hop}-{i}", hop, [0.99, 0.95 - 0.1 * hop - 0.01 * i])
        for hop in hops
        for i in range(4 * per_cell)
    ]
    return [pairs[i] for i in np.random.default_rng(3).permutation(len(pairs))]


def cell_of(question, per_cell=4):
    """Returns the column of a question of `grid`, and the question's index in the cell."""
    return divmod(int(question.id.partition("-")[2]), per_cell)


@pytest.fixture
def two_runs(tmp_path):
    """Writes two runs: ``column + hops - 2`` answers per cell are wrong, or all are."""
    pairs = grid()
    dataset(tmp_path, *pairs)
    rows, worse = [], []
    for _, q in pairs:
        column, i = cell_of(q)
        wrong = i < column + q.hops - 2
        rows.append(prediction(q, right=not wrong, found=not wrong or i > 0))
        worse.append({**prediction(q, right=False), "error": "lost" if column == 3 else None})
    return tmp_path, run(tmp_path, "a", rows), run(tmp_path, "b", worse)


def test_difficulty_matrix_of_a_known_function_is_recovered(two_runs):
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
    # In each cell, the first wrong answer lacks its gold passages.
    kinds = {name: found["errors"] for name, found in system["failures"].items()}
    assert kinds == {"retriever": 7, "reader": 9, "unanswered": 0}
    assert system["matrix"][3][2]["errors"] == {"retriever": 1, "reader": 2, "unanswered": 0}
    assert system["correlations"]["min"]["mean"]["value"] == pytest.approx(1)
    # With mean, D_r is a linear function of D_r with min; with power_mean, it is not.
    assert system["strongest"] == ["min", "mean"]
    lines = answering.lines(root / "w" / "difficulty.jsonl")
    row = next(line for line in lines if line["id"] == "q3-13")
    assert row["quartile"] == 4 and row["hops"] == 3
    low = 0.95 - 0.3 - 0.13
    assert row["difficulty"]["min"] == pytest.approx(1 - low, abs=1e-6)
    assert row["difficulty"]["mean"] == pytest.approx(1 - (low + 0.99) / 2, abs=1e-6)
    assert row["errors"] == {"a": 1.0} and row["whose"] == {"a": "reader"}


def test_difficulty_difference_uses_the_same_questions(two_runs):
    root, first, second = two_runs
    result = evaluate(root, first, second)
    pair = result["differences"]["a-b"]
    assert [4 * cell["value"] for cell in pair["matrix"][2]] == [-4, -3, -2, -1]
    assert pair["error"]["value"] == -0.5 and pair["error"]["high"] < 0
    assert pair["matrix"][3][3] == {"value": 0.0, "low": 0.0, "high": 0.0, "num_questions": 4}
    # The questions of the last column failed in b, so they have no answer.
    assert result["systems"]["b"]["failures"]["unanswered"]["errors"] == 8
    assert result["systems"]["b"]["failures"]["reader"]["errors"] == 24


def test_difficulty_writes_summary_table_and_figures(two_runs, capsys):
    root, first, second = two_runs
    evaluate(root, first, second)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2] == (
        "a: error 50.0 % of 32 questions; from 0.0 % (hops 2, Q1) to 100.0 % (hops 3, Q4); "
        "r(D_r, error) +0.46 (p=0.008; 32); "
        "of the errors 7 lack a gold passage, 9 have all gold passages"
    )
    assert lines[-1].endswith(
        "of the errors 0 lack a gold passage, 24 have all gold passages, 8 have no answer"
    )
    table = (root / "w" / "table.md").read_text()
    assert "a: error (1 - Acc) in per cent" in table and "a-b, in points" in table
    assert re.search(r"^\| 2 +\| +0\.0 \[0\.0, 0\.0\] \(4\) \| +25\.0 \[", table, re.MULTILINE)
    for name, panels in (("matrix", 2), ("difference", 1)):
        # At 150 dots per inch: 4.6 inches wide per panel plus 0.75, and 3.36 high for three rows.
        height, width, _ = matplotlib.image.imread(root / "w" / f"{name}.png").shape
        assert (width, height) == (round(150 * (4.6 * panels + 0.75)), round(150 * 3.36))
        text = (root / "w" / f"{name}.svg").read_text()
        assert "<!-- Q1, low -->" in text and "<!-- hops -->" in text and "n=4" in text


def test_difficulty_ungradable_questions_are_left_out(tmp_path):
    """Questions without gold or hops, with too few peers, or with only equal D_r are left out."""
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
    pairs = [*few, *same, *odd]
    dataset(tmp_path, *pairs)
    rows = [prediction(q, right=i % 2 == 0) for i, (_, q) in enumerate(pairs)]
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


def test_difficulty_unusable_predictions_are_left_out(tmp_path, capsys):
    questions = simple_questions(tmp_path, 8)
    rows = [prediction(q, right=True) for q in questions[:4]]
    rows += [rows[0], prediction(dataclasses.replace(questions[0], id="unknown"), right=True)]
    rows += [prediction(questions[4], right=False, error="not answered yet")]
    rows += [prediction(questions[5], right=False, found=False)]
    whole = [prediction(q, right=True) for q in questions]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), run(tmp_path, "b", whole))
    system = result["systems"]["a"]
    assert system["left_out"] == {
        "question unknown": 1,
        "more than one prediction": 1,
        "not answered yet": 1,
        "no prediction": 2,
    }
    assert (system["error"]["value"], system["error"]["num_questions"]) == (0.25, 4)
    # Each quartile has two questions; some have no usable prediction.
    assert [cell["num_questions"] for cell in system["matrix"][2]] == [1, 2, 1, 0]
    empty = system["matrix"][2][3]
    assert (empty["value"], empty["reason"]) == (None, "no question")
    assert result["systems"]["b"]["error"]["num_questions"] == 8
    assert result["differences"]["a-b"]["error"]["num_questions"] == 4
    assert result["differences"]["a-b"]["matrix"][2][3]["reason"] == "no question"
    assert "Predictions of a left out: question unknown (1), more than" in capsys.readouterr().err


def test_difficulty_small_cells_are_undefined(two_runs, capsys):
    """With 2 hops, the first column has one usable prediction, and the last column has three."""
    root, _, second = two_runs
    pairs = grid()
    missing = {"q2-0", "q2-1", "q2-2", "q2-12"}
    rows = [prediction(q, right=cell_of(q)[1] > 1) for _, q in pairs if q.id not in missing]
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
    assert "Cells with fewer than 4 questions are n/a and ignored by r." in table
    for name, count in (("matrix", 2), ("difference", 2)):
        assert (root / "w" / f"{name}.svg").read_text().count("<!-- n/a -->") == count


def test_difficulty_run_without_usable_predictions_is_undefined(tmp_path, capsys):
    questions = simple_questions(tmp_path, 4)
    rows = [prediction(q, right=True) for q in questions] * 2
    result = evaluate(tmp_path, run(tmp_path, "a", rows))
    assert result["systems"]["a"]["error"]["reason"] == "no question"
    assert "a: error n/a (no question)" in capsys.readouterr().err


def test_difficulty_run_without_retrieval_has_no_causes(tmp_path, capsys):
    questions = simple_questions(tmp_path, 4)
    rows = [{**prediction(q, right=False), "passages": []} for q in questions]
    result = evaluate(tmp_path, run(tmp_path, "a", rows))
    system = result["systems"]["a"]
    assert system["failures"] == {"reason": "the run retrieved nothing"}
    assert "errors" not in system["matrix"][2][0]
    assert system["correlations"]["min"]["questions"]["all"]["reason"].startswith("the error is")
    table = (tmp_path / "w" / "table.md").read_text()
    assert "Failures of a: n/a, the run retrieved nothing." in table
    assert "r(D_r, error) n/a (the error is constant" in capsys.readouterr().err


def test_difficulty_retrieved_at_limits_the_passages(tmp_path):
    pairs = [question(f"q{i}", 2, [0.9, 0.8 - 0.1 * i]) for i in range(4)]
    dataset(tmp_path, *pairs)
    rows = [prediction(q, right=False) for _, q in pairs]
    rows[0]["passages"] = ["other", *rows[0]["passages"]]
    name = run(tmp_path, "a", rows)
    for most, missing in ((0, 0), (3, 0), (2, 1), (1, 4)):
        split = evaluate(tmp_path, name, retrieved_at=most)["systems"]["a"]["failures"]
        assert (split["retriever"]["errors"], split["reader"]["errors"]) == (missing, 4 - missing)


def test_difficulty_gold_sentence_is_retrieved_with_any_chunk(tmp_path):
    """Either of the two chunks that contain the gold sentence may be retrieved."""
    parts = [
        Passage("a@1", "A", "One. Two. cos 0.5", ("One.", "Two.", "cos 0.5")),
        Passage("a@2", "A", "cos 0.5 Four.", ("cos 0.5", "Four.")),
    ]
    pairs = [
        (
            parts,
            Question(
                f"q{i}", "?", ("right",), hops=2, supporting=("a@1",),
                supporting_sentences=(("a@1", place),) if place is not None else None,
            ),
        )
        for i, place in enumerate((2, 1, None, 2))
    ]  # fmt: skip
    dataset(tmp_path, *pairs)
    rows = [{**prediction(q, right=False), "passages": ["a@2"]} for _, q in pairs]
    rows[3]["passages"] = ["other", "a@2"]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), retrieved_at=1)
    lines = answering.lines(tmp_path / "w" / "difficulty.jsonl")
    causes = {line["id"]: line["whose"]["a"] for line in lines}
    assert causes == {"q0": "reader", "q1": "retriever", "q2": "retriever", "q3": "retriever"}
    assert result["systems"]["a"]["failures"]["reader"]["errors"] == 1


def test_difficulty_failed_prediction_is_wrong(tmp_path):
    questions = simple_questions(tmp_path, 4)
    rows = [prediction(q, right=True, error="lost") for q in questions]
    system = evaluate(tmp_path, run(tmp_path, "a", rows))["systems"]["a"]
    assert system["error"]["value"] == 1 and system["failures"]["unanswered"]["errors"] == 4


@pytest.mark.parametrize("score", ["em", "f1", "acc"])
def test_difficulty_score_setting_selects_the_metric(tmp_path, score):
    """The answer "it is right" contains the gold answer "right", one of its three words."""
    questions = simple_questions(tmp_path, 4)
    rows = [prediction(q, right=True) for q in questions]
    result = evaluate(tmp_path, run(tmp_path, "a", rows), score=score)
    wanted = {"em": 1.0, "f1": 0.5, "acc": 0.0}[score]
    assert result["systems"]["a"]["error"]["value"] == pytest.approx(wanted)


def test_difficulty_judgements_replace_scores(tmp_path):
    questions = simple_questions(tmp_path, 5)
    rows = [prediction(q, right=i > 1) for i, q in enumerate(questions)]
    rows[3]["error"] = "lost"
    name = run(tmp_path, "a", rows)
    (tmp_path / "j").mkdir()
    verdicts = [True, True, None, True]  # none about q4
    judgements = [
        {"id": row["id"], "system": "a", "judged": row["answer"], "judge": verdict}
        for row, verdict in zip(rows, verdicts, strict=False)
    ]
    judgements.append({"id": "q4", "system": "b", "judged": "it is right", "judge": True})
    file = tmp_path / "j" / "judgements.jsonl"
    write_lines(file, judgements)
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
    write_lines(file, [*judgements, judgements[1]])
    with pytest.raises(UserError, match=r"jsonl:6: field 'id' repeats the verdict about 'q1' of"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))
    write_lines(file, [{**judgements[0], "judge": 3}])
    with pytest.raises(UserError, match=r"judgements.jsonl:1: field 'judge' must be"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))
    file.write_text('{"id": "q0", "system": "a", "judge": true}\n')
    with pytest.raises(UserError, match=r"judgements.jsonl:1: field 'judged' is missing"):
        evaluate(tmp_path, name, judgements=str(tmp_path / "j"))


def test_difficulty_verdict_about_another_answer_is_ignored(tmp_path, capsys):
    """A verdict is used only if it is about the run's answer or its full response."""
    questions = simple_questions(tmp_path, 6)
    rows = [prediction(q, right=True) for q in questions]
    rows[0]["answer"], rows[5]["error"] = " it is right\n", "lost"
    judged = [
        {"judged": "it is right"},
        {"judged": "it was right"},
        {"judged": "So it is right.", "answer": "it is right"},
        {"judged": "it is right", "answer": "wrong"},
        {"judged": "it was right", "judge": None},
        {"judged": "it was right"},  # ignored, because the question failed
    ]
    judgements = [
        {"id": f"q{i}", "system": "a", "judge": True, **row} for i, row in enumerate(judged)
    ]
    (tmp_path / "j").mkdir()
    write_lines(tmp_path / "j" / "judgements.jsonl", judgements)
    result = evaluate(tmp_path, run(tmp_path, "a", rows), judgements=str(tmp_path / "j"))
    system = result["systems"]["a"]
    assert (system["error"]["value"], system["error"]["num_questions"]) == (pytest.approx(1 / 3), 3)
    assert system["left_out"] == {"another answer was judged": 3}
    assert "left out: another answer was judged (3)" in (tmp_path / "w" / "table.md").read_text()


def test_difficulty_aggregate_selects_the_columns(tmp_path):
    """The aggregates min and mean order the questions differently."""
    lows, highs = (0.5, 0.4, 0.3, 0.2), (0.5, 0.65, 0.8, 0.95)
    pairs = [question(f"q{i}", 2, pair) for i, pair in enumerate(zip(lows, highs, strict=True))]
    dataset(tmp_path, *pairs)
    rows = [prediction(q, right=i < 2) for i, (_, q) in enumerate(pairs)]
    name = run(tmp_path, "a", rows)
    for aggregate, wanted in (("min", [0, 0, 1, 1]), ("mean", [1, 1, 0, 0])):
        result = evaluate(tmp_path, name, aggregate=aggregate)
        assert [cell["value"] for cell in result["systems"]["a"]["matrix"][2]] == wanted
        assert result["systems"]["a"]["strongest"] == ["min"]
        median = {"min": 0.65, "mean": 1 - (0.525 + 0.55) / 2}[aggregate]
        assert result["hops"][2]["edges"][1] == pytest.approx(median, abs=1e-6)


@pytest.mark.parametrize("size", [(64, 128, 25), (128, 256, 50), (256, 512, 100)])
def test_difficulty_unit_selects_the_embedded_texts(tmp_path, monkeypatch, size):
    """Of a 600-word article, only chunks with the gold sentence are embedded."""
    seen = []

    class RecordingEncoder(CosineEncoder):
        truncated = collections.Counter()

        def encode(self, texts, kind="passage", progress=None):
            seen.extend(texts if kind == "passage" else ())
            return np.full((len(texts), 2), math.sqrt(0.5), np.float32)

    monkeypatch.setattr(command, "open_encoder_for", lambda block: RecordingEncoder())
    sentences = [f"{' '.join(f's{s}w{i}' for i in range(9))} end." for s in range(60)]
    parts = [
        Passage(f"a#{p}", "A", " ".join(own), tuple(own))
        for p, own in enumerate((sentences[:30], sentences[30:]), 1)
    ]
    pairs = [
        (
            parts,
            Question(
                f"q{i}", "?", ("x",), hops=2, supporting=("a#2",),
                supporting_sentences=(("a#2", 25),),
            ),
        )
        for i in range(4)
    ]  # fmt: skip
    dataset(tmp_path, *pairs)
    name = run(tmp_path, "a", [prediction(q, right=True) for _, q in pairs])
    least, most, overlap = size
    chunks = {"chunks.least": least, "chunks.most": most, "chunks.overlap": overlap}
    result = evaluate(tmp_path, name, unit="chunk", **chunks)
    sizes = {"least": least, "most": most, "overlap": overlap}
    assert result["settings"]["chunks"] == sizes | {"tokenizer": ""}
    assert f"over chunks of {least} to {most} words" in (tmp_path / "w" / "table.md").read_text()
    assert seen and all("s55w3" in text for text in seen)
    assert all(least <= len(text.split()) - 1 <= most for text in seen)
    seen.clear()
    counted = {**chunks, "chunks.tokenizer": str(tiny.model_folder(tmp_path / "model"))}
    evaluate(tmp_path, name, unit="chunk", **counted)
    assert "words" not in (table := (tmp_path / "w" / "table.md").read_text())
    assert f"over chunks of {least} to {most} tokens of" in table
    # The tiny tokenizer splits each word into several tokens.
    assert seen and all(len(text.split()) < most / 2 for text in seen)
    seen.clear()
    evaluate(tmp_path, name, unit="article")
    assert [len(text.split()) for text in seen] == [601]


def test_difficulty_bad_input_is_refused(tmp_path):
    questions = simple_questions(tmp_path, 4)
    rows = [prediction(q, right=True) for q in questions]
    good = run(tmp_path, "a", rows)

    def refuses(message, *runs, **fields):
        with pytest.raises(UserError, match=message):
            evaluate(tmp_path, *runs, **fields)

    refuses(r"config\.runs is required")
    refuses("two runs named a; rename one", good, f"a={tmp_path / 'a'}")
    refuses("it has no predictions.jsonl; set config.runs to folders in it: a", str(tmp_path))
    refuses(r"config\.score='bleu' is not one of em, f1, acc", good, score="bleu")
    refuses(r"config\.unit='word' is not one of passage, chunk, article", good, unit="word")
    refuses(r"config\.chunks: expected overlap <= least <= most", good, **{"chunks.most": 100})
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
    # A run of other software needs no config if the dataset is set.
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


def test_difficulty_data_without_gold_are_refused(tmp_path):
    pairs = [question(f"q{i}", 2, [0.5]) for i in range(2)]
    dataset(tmp_path, *((p, dataclasses.replace(q, supporting=None)) for p, q in pairs))
    name = run(tmp_path, "a", [prediction(q, right=True, found=False) for _, q in pairs])
    with pytest.raises(UserError, match="no question of data can be graded: 2 have no gold pass"):
        evaluate(tmp_path, name)


def launch(capsys, script, argv):
    """Runs a command; returns its standard output and standard error."""
    main = runpy.run_path(str(_ROOT / "launch" / script))["main"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, "configs/retrieval.py", [script, *argv])
    found = capsys.readouterr()
    assert end.value.code == 0, found.err
    return found


def test_difficulty_command_reads_a_run_of_answer(tmp_path, capsys, monkeypatch):
    """The config in the run's folder names the dataset."""
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
