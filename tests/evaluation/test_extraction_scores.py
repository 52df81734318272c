"""Scores of extracted triples, compared with hand-computed values and SciPy; the command."""

import contextlib
import itertools
import json

import numpy as np
import pytest

from cirag_jax.commands import evaluate_extraction, evaluation, series
from cirag_jax.commands.evaluate_extraction import PassageExtraction, score
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.references import Reference, select_references
from cirag_jax.errors import UserError
from cirag_jax.evaluation.triples import entity_overlap, exact_overlap, similarities, soft_overlap
from cirag_jax.llm.types import Usage
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.methods.common.extraction import ExtractionSettings
from cirag_jax.runtime.requests import Generated, RequestError
from cirag_jax.runtime.run import Runner
from cirag_jax.sqlite import MEMORY
from cirag_jax.types import Dataset, Passage, Question, Triple
from configs import common, extractor_eval


def triple(text):
    return Triple(*(part.strip() for part in text.split(";")))


# ----------------------------------------------------------------------------------------- scoring


def test_exact_overlap_matches_hand_computed_values():
    predicted = [triple("Ule; feeds; Tarn"), triple("ule!; Feeds; TARN"), triple("Osk; is; big")]
    gold = [triple("Ule; feeds; Tarn"), triple("Tarn; governs; Osk")]
    result = exact_overlap(predicted, gold)
    assert (result.matched, result.predicted, result.gold) == (1, 2, 2)
    assert exact_overlap([triple("Bråk; a; b")], [triple("Br k; a; b")]).matched == 1
    assert exact_overlap([triple("Bråk; a; b")], [triple("Br k; a; b")], "unicode").matched == 0


def test_soft_overlap_matches_hand_computed_values():
    # Token F1 of "ule feeds tarn" and "the ule river feeds tarn" is 2*3/(3+5). The other is 0.
    predicted = [triple("Ule; feeds; Tarn"), triple("Osk; is; big")]
    gold = [triple("the Ule river; feeds; Tarn")]
    result = soft_overlap(predicted, gold)
    assert result.matched == pytest.approx(6 / 8)
    assert result.precision == pytest.approx(6 / 16) and result.recall == pytest.approx(6 / 8)
    assert result.f1 == pytest.approx(2 * (6 / 8) / 3)
    # Moving a word from relation to tail changes nothing; repeated words count twice.
    assert soft_overlap([triple("a; moved to; b in 1835")], [triple("a; moved; to b in 1835")]).f1
    assert similarities(["a a b"], ["a b b"])[0, 0] == pytest.approx(2 * 2 / 6)
    assert similarities([""], ["", "a"]).tolist() == [[0, 0]]
    for empty in (soft_overlap([], gold), soft_overlap(gold, []), exact_overlap([], gold)):
        assert empty.f1 == 0
    assert soft_overlap([], []).f1 == 1


def test_soft_overlap_is_best_one_to_one_matching():
    # Greedy matching would pair "a b c" with "a b c d" and leave the others unmatched: 6/7 + 0.
    predicted, gold = (
        [triple("a; b; c"), triple("a; b; y")],
        [triple("a; b; c d"), triple("c; w; z")],
    )
    assert soft_overlap(predicted, gold).matched == pytest.approx(1 / 3 + 4 / 7)
    crossed = [triple("p; q; r"), triple("p; q; s")], [triple("p; q; t"), triple("p; q; r")]
    assert soft_overlap(*crossed).matched == pytest.approx(1 + 2 / 3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        words = [[" ".join(rng.choice(list("abcde"), 3)) for _ in range(4)] for _ in range(2)]
        left, right = ([Triple(*text.split()) for text in side] for side in words)
        left, right = list(dict.fromkeys(left)), list(dict.fromkeys(right))
        table = similarities(
            *([" ".join((t.head, t.relation, t.tail)) for t in side] for side in (left, right))
        )
        small, large = sorted((len(left), len(right)))
        table = table if len(left) <= len(right) else table.T
        best = max(
            sum(table[i, j] for i, j in enumerate(order))
            for order in itertools.permutations(range(large), small)
        )
        assert soft_overlap(left, right).matched == pytest.approx(best)


def test_entity_overlap_matches_hand_computed_values():
    result = entity_overlap(["Ule", "ULE", "Tarn", "?"], ["ule", "Osk", "!"])
    assert (result.matched, result.predicted, result.gold) == (1, 3, 3)  # "?" is not "!"


def test_scores_macro_and_micro_over_passages():
    passage = Passage("p", "t", "x")
    gold = (triple("a; b; c"), triple("d; e; f"))
    references = [Reference(passage, ("a", "d"), gold), Reference(passage, ("g",), gold[:1])]
    result = [PassageExtraction((gold[0], triple("d; e; x")), ("a",), "ok"), PassageExtraction()]
    actual = {name: ratio.value for name, ratio in score(references, result).items()}
    assert actual["exact/f1"] == pytest.approx((1 / 2 + 0) / 2)
    assert actual["soft/f1"] == pytest.approx((2 * (1 + 2 / 3) / 4 + 0) / 2)
    assert actual["exact/precision"] == pytest.approx((1 / 2 + 0) / 2)
    assert actual["exact/recall"] == pytest.approx((1 / 2 + 0) / 2)
    assert actual["exact/micro_precision"] == 1 / 2
    assert actual["exact/micro_recall"] == pytest.approx(1 / 3)
    assert actual["exact/micro_f1"] == pytest.approx(2 / (2 + 3))
    assert actual["entities/f1"] == pytest.approx((2 / 3 + 0) / 2)


# ------------------------------------------------------------------------------------- the passages


def dataset():
    """Folds: p0 train, p1 both, others test. p3 was not extracted, and p4 has no triples."""
    corpus = {
        f"p{i}": Passage(f"p{i}", f"T{i}", f"T{i} knows U{i}. V{i} is odd.") for i in range(6)
    }
    facts = {f"p{i}": (Triple(f"T{i}", "knows", f"U{i}", f"p{i}", 0),) for i in (0, 1, 2, 5)}

    def question(name, fold, context):
        return Question(name, "?", ("a",), split="train", fold=fold, context=context)

    questions = (
        question("q0", "train", ("p0", "p1")),
        question("q1", "test", ("p1", "p2", "p3", "p4", "p5")),
        question("q2", None, ("p2",)),  # has no fold, so it removes no passages
    )
    return Dataset("d", questions, corpus, {**facts, "p4": ()})


@pytest.fixture
def data(tmp_path):
    jsonl.write_dataset(dataset(), tmp_path / "data")
    return tmp_path / "data"


def block(folder, fold):
    config = common.data(split="")
    config.dir, config.fold = str(folder), fold
    return config


def test_passages_shared_with_another_fold_are_left_out(data):
    result, counts = select_references(block(data, "test"))
    assert {r.passage.id for r in result} == {"p2", "p5"}
    assert counts == {
        "passages": 5, "without_triples": 1, "empty": 1, "shared": 1, "kept": 2, "sampled": 2
    }  # fmt: skip
    (only,), counts = select_references(block(data, "train"))
    assert only == Reference(
        dataset().corpus["p0"], ("T0", "U0"), (Triple("T0", "knows", "U0", "p0", 0),)
    )
    assert counts["shared"] == 1
    sample, counts = select_references(block(data, "test"), limit=1, seed=3)
    assert len(sample) == counts["sampled"] == 1
    assert sample == select_references(block(data, "test"), seed=3)[0][:1]
    with pytest.raises(UserError, match="fold=tune"):
        select_references(block(data, "tune"))


def test_reference_entities_come_from_the_file(data, monkeypatch):
    lines = (data / "openie.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["entities"] = ["Zed", "U0", "Zed"] if row["passage_id"] == "p0" else []
    rows.append({**rows[0], "entities": ["W", "Zed"]})  # p0 again
    (data / "openie.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HOME", str(data.parent))
    for folder in (data, "~/data"):
        assert select_references(block(folder, "train"))[0][0].entities == ("Zed", "U0", "W")
    # Without listed entities, heads and tails are the entities.
    test = {r.passage.id: r.entities for r in select_references(block(data, "test"))[0]}
    assert test["p5"] == ("T5", "U5")


# -------------------------------------------------------------------------------------- the command


class Canned:
    """A model that answers by the passage's title, or fails."""

    is_slow, is_exhausted = True, False

    def __init__(self, good: bool):
        self.good = good
        self.asked: list[str] = []

    def __call__(self, calls, done):
        for index, call in enumerate(calls):
            text = call.request.messages[-1].text
            number = text[len("Title: T") : len("Title: T") + 1]
            self.asked.append(call.key.program.partition("@")[0])
            usage = Usage(prompt_tokens=5, generated_tokens=2)
            if not self.good and number == "2":
                done(index, RequestError("too long"))
            elif "Named entities:" in text:
                answer = prompts.render_triples([(f"T{number}", "knows", f"U{number}")])
                done(index, Generated(answer if self.good else "nothing", "stop", usage))
            else:
                answer = prompts.render_entities([f"U{number}", f"T{number}"])
                done(index, Generated(answer if self.good else "[[", "stop", usage))


def evaluate(data, workdir, **fields):
    config = extractor_eval.get_config()
    config.update_from_flattened_dict({"data.dir": str(data), "bootstrap_samples": 50, **fields})
    workdir.mkdir(exist_ok=True)
    return evaluate_extraction.evaluate(config.lock(), workdir)


def test_command_compares_student_and_base(data, tmp_path, monkeypatch, capsys):
    models = {"student": Canned(True), "base": Canned(False)}
    opened = []

    @contextlib.contextmanager
    def open_model(config, model, roles, journal):
        opened.append((model.block.adapter, *roles))
        yield models["student" if model.block.adapter else "base"]

    monkeypatch.setattr(evaluation, "open_model", open_model)
    peft = str(tmp_path / "peft")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    result = evaluate(data, tmp_path / "e", checkpoint=peft)
    assert opened == [(peft, "extractor"), (None, "extractor")]
    student, base = result["systems"]["student"], result["systems"]["base"]
    for kind in ("exact", "soft", "entities"):
        assert student[kind]["f1"] == {"value": 1, "low": 1, "high": 1}
        assert base[kind]["f1"]["value"] == 0
        difference = result["differences"]["student-base"][kind]["f1"]
        assert difference == {"difference": 1, "low": 1, "high": 1}
    assert student["outcomes"] == {"ok": 2, "empty": 0, "failed": 0}
    assert base["outcomes"]["failed"] == 2
    assert base["failures"] == {"request: too long": 1, "answer: no_json": 1}
    assert student["prompt_tokens"] == 20 and student["triples_per_passage"] == 1
    assert result["num_passages"] == 2 and result["selection"]["shared"] == 1
    assert sorted(models["student"].asked) == ["p2", "p2", "p5", "p5"]
    main = series.figures(result, series.metric_of(extractor_eval.get_config()))
    assert next(iter(main.items())) == ("f1", 1) and "micro_f1" in main
    json.dumps(result)
    said = capsys.readouterr()
    assert said.out == "" and "student-base" in said.err
    path = tmp_path / "e" / "extractions.jsonl"
    rows = {(r["passage"], r["system"]): r for r in map(json.loads, path.read_text().splitlines())}
    assert rows["p5", "student"]["triples"] == [["T5", "knows", "U5"]]
    assert rows["p5", "student"]["entities"] == ["U5", "T5"]
    assert rows["p2", "base"]["cause"] == "request: too long" and len(rows) == 4
    # A rerun only opens the model with a failed request.
    del models["base"].asked[:]
    evaluate(data, tmp_path / "e", checkpoint=peft)
    assert opened[2:] == [(None, "extractor")] and models["base"].asked == ["p2"]
    with pytest.raises(UserError, match="triple_tokens"):
        evaluate(data, tmp_path / "e", checkpoint=peft, triple_tokens=9)


def test_changed_passage_is_extracted_again():
    passage = Passage("p1", "T1", "T1 knows U1.")
    changed = Passage("p1", "T1", "T1 knows U1 well.")
    model = Canned(True)
    with Runner(MEMORY, {}, lambda *_: {"extractor": model}) as runner:
        for one in (passage, passage, changed):
            jobs = [evaluate_extraction.job(one, ExtractionSettings())]
            assert runner.run(jobs)
            records = runner.records(jobs)
            (result,) = evaluate_extraction.read([Reference(one, (), ())], records)
            assert result.status == "ok" and result.entities == ("U1", "T1")
            assert result.triples == (Triple("T1", "knows", "U1", "p1", 0),)
    assert len(model.asked) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data.fold": "tune"}, "fold=tune"),
        ({"data.dir": "nowhere"}, "nowhere"),
        ({"entity_tokens": 0}, "entity_tokens"),
        ({"limit": -1}, "limit"),
        ({"normalization": "ASCII"}, "config.normalization='ASCII' is not one of ascii, unicode"),
        ({"extractor.adapter": "x"}, "config.checkpoint"),
        ({"checkpoint": "nowhere"}, "nowhere is neither a training workdir"),
    ],
)
def test_command_rejects_bad_input(data, tmp_path, fields, message, monkeypatch):
    monkeypatch.setattr(evaluation, "open_model", None)  # input is rejected before opening a model
    with pytest.raises(UserError, match=message):
        evaluate(data, tmp_path / "e", **fields)


def test_command_out_of_time_has_no_scores(data, tmp_path):
    result = evaluate(data, tmp_path / "e", stop_after_minutes=1e-9)
    assert not result["complete"] and result["systems"] == {}
