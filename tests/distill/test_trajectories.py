"""Reading, filtering and counting trajectories."""

import dataclasses
import json

import pytest

from cirag_jax.distill import trajectories
from cirag_jax.distill.oracle import gold_of
from cirag_jax.errors import UserError
from cirag_jax.types import Question, Sentence, Step, Trajectory, Triple
from tests.distill import by_hand

BORN = Triple("Ola", "born in", "Vik", "p", 0)
LIES = Triple("Vik", "lies in", "Sogn", "v", None)
NOISE = Triple("Vik", "is a", "novel", "n", 2)
STEPS = (
    Step("q?", ("p", "n"), (NOISE, BORN), (0.5, 0.25), "Ola.", (BORN,), "Where is Vik?", "text\n"),
    Step("Where is Vik?", ("n",), (NOISE,), (0.5,), "Nothing.", (), "Vik lies in", "é"),
    Step("Vik lies in", ("v",), (LIES, NOISE), (1.0, 0.0), "Done.", (LIES,), None, ""),
)
WHOLE = Trajectory("a", "q?", "annotations", STEPS, "stopped", True, {"passage_not_extracted": 1})
CUT = Trajectory("b", "r?", "tutor", STEPS[:2], "max_steps", None, {"truncated": 1})
WRONG = dataclasses.replace(CUT, question_id="c", parse_errors={}, solved=False, end="stopped")
ALL = (WHOLE, CUT, WRONG)


def test_read_trajectories_returns_written_ones(tmp_path):
    trajectories.write_trajectories(tmp_path / trajectories.FILE, ALL)
    assert trajectories.read_trajectories(tmp_path) == ALL
    assert trajectories.read_trajectories(str(tmp_path / trajectories.FILE)) == ALL
    with pytest.raises(UserError, match=r"trajectories\.json cannot be read"):
        trajectories.read_sidecar(tmp_path)
    (tmp_path / trajectories.SIDECAR).write_text('{"normalization": "ascii"}')
    assert trajectories.read_sidecar(tmp_path) == {"normalization": "ascii"}
    (tmp_path / trajectories.SIDECAR).write_text('{"form": "ascii", "rendering": "paper"}')
    with pytest.raises(UserError, match="by an earlier version of this program"):
        trajectories.read_sidecar(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("question"), "field 'question' is missing"),
        (
            lambda row: row.update(end="early"),
            "field 'end' cannot be used: invalid enum value 'early'",
        ),
        (lambda row: row.update(steps=[]), "field 'steps' is empty"),
        (lambda row: row.update(solved="yes"), "field 'solved' must be a boolean, not a string"),
        (
            lambda row: row.update(parse_errors={"x": "1"}),
            "field 'parse_errors.*' must be an integer",
        ),
        (lambda row: row.update(question_id="a"), "field 'question_id' repeats 'a'"),
        (
            lambda row: row["steps"][0]["scores"].__setitem__(0, 10**400),
            "scores[0]' cannot be used: number out",
        ),
        (
            lambda row: row["steps"][0]["scores"].pop(),
            "field 'steps[0].scores' must have one score per candidate",
        ),
        (lambda row: row["steps"][1].update(next_query=3), "'steps[1].next_query' must be a str"),
        (
            lambda row: row["steps"][0]["candidates"].__setitem__(0, ["a", "b"]),
            "'steps[0].candidates[0]' must be",
        ),
        (lambda row: row["steps"][0]["kept"][0].__setitem__(0, "Eva"), "kept' has a fact that"),
    ],
)
def test_read_trajectories_damaged_line_is_reported_with_place(tmp_path, change, words):
    path = tmp_path / "some.jsonl"
    trajectories.write_trajectories(path, [WHOLE, dataclasses.replace(WHOLE, question_id="z")])
    first, second = path.read_text("utf-8").splitlines()
    row = json.loads(second)
    change(row)
    path.write_text(f"{first}\n{json.dumps(row)}\n")
    with pytest.raises(UserError) as error:
        trajectories.read_trajectories(path)
    assert str(error.value).startswith(f"{path}:2: ") and words in str(error.value)


def test_read_trajectories_keeps_texts_of_sentences(tmp_path):
    trajectory = by_hand.of_sentences(by_hand.trajectory(1))
    path = tmp_path / "some.jsonl"
    trajectories.write_trajectories(path, [trajectory])
    assert trajectories.read_trajectories(path) == (trajectory,)
    (read,) = trajectories.read_trajectories(path)
    texts = [fact.text for fact in read.steps[0].candidates if isinstance(fact, Sentence)]
    assert texts[0] == "Edda Brandt: Its born in: Hafenstadt." and len(texts) == 4
    assert trajectories.units_of([read, read]) == "sentence"
    assert trajectories.units_of(ALL) == "triple" == trajectories.units_of([])
    with pytest.raises(UserError, match="some trajectories have units=triple and some have"):
        trajectories.units_of([read, WHOLE])
    row = json.loads(path.read_text("utf-8"))
    del row["steps"][1]["candidates"][1]["text"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"'steps\[1\].candidates' has a sentence without text"):
        trajectories.read_trajectories(path)


def test_read_trajectories_integer_score_is_a_float(tmp_path):
    path = tmp_path / "some.jsonl"
    trajectories.write_trajectories(path, [WHOLE])
    row = json.loads(path.read_text("utf-8"))
    row["steps"][0]["scores"][0] = 1
    path.write_text(json.dumps(row) + "\n")
    (read,) = trajectories.read_trajectories(path)
    assert read.steps[0].scores[0] == 1.0 and type(read.steps[0].scores[0]) is float


def test_read_trajectories_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"trajectories\.jsonl does not exist; launch/distill\.py"):
        trajectories.read_trajectories(tmp_path)


def test_select_filters_are_nested():
    def kept(keep):
        return [t.question_id for t in trajectories.select(ALL, keep)]

    assert kept("all") == ["a", "b", "c"]
    assert kept("parsed") == ["a", "c"]  # Retrieval errors are not the teacher's.
    assert kept("correct_only") == ["a"]
    reasons = [trajectories.drop_reason(t, "correct_only") for t in ALL]
    assert reasons == [None, "parse_errors", "not_solved"]
    unknown = dataclasses.replace(WRONG, solved=None)
    assert trajectories.drop_reason(unknown, "correct_only") == "unknown"
    assert trajectories.drop_reason(dataclasses.replace(CUT, parse_errors={"asked_again": 1}),
                                    "parsed") == "parse_errors"  # fmt: skip
    rounds = {t.question_id: len(t.steps) for t in ALL}
    longest = max(rounds.values())
    assert min(rounds.values()) < longest
    many = trajectories.select(ALL, "all", min_steps=longest)
    assert [t.question_id for t in many] == [n for n, size in rounds.items() if size == longest]
    assert {trajectories.drop_reason(t, "parsed", longest + 1) for t in ALL} == {"short"}
    with pytest.raises(UserError, match="keep=correct_only needs"):
        trajectories.select((CUT, unknown), "correct_only")
    with pytest.raises(UserError, match="config.keep='best' is not one of all, parsed"):
        trajectories.select(ALL, "best")


def test_select_smaller_draw_is_subset_of_larger():
    many = [dataclasses.replace(WHOLE, question_id=str(i)) for i in range(40)]

    def draw(seed, limit):
        return [int(t.question_id) for t in trajectories.select(many, "all", seed, limit)]

    assert set(draw(0, 10)) < set(draw(0, 20)) < set(draw(0, 0)) and len(draw(0, 20)) == 20
    assert draw(0, 20) == sorted(draw(0, 20)) == draw(0, 20) != draw(1, 20)
    assert draw(0, 50) == list(range(40))
    with pytest.raises(UserError, match="must not be negative"):
        draw(0, -1)


def test_statistics_equal_hand_computed_values():
    question = Question(
        "a", "q?", ("Sogn",), supporting=("p", "v", "w"),
        evidences=(("Ola", "born in", "Vik"), ("Vik", "lies in", "Sogn")),
    )  # fmt: skip
    gold = gold_of(question, {}, {}, "ascii")
    stats = trajectories.statistics(ALL, {"a": gold})
    assert stats["trajectories"] == 3
    assert stats["teachers"] == {"annotations": 1, "tutor": 2}
    assert stats["steps"] == 7 / 3 and stats["step_counts"] == {"2": 2, "3": 1}
    assert stats["ends"] == {"max_steps": 1, "stopped": 2}
    assert stats["candidates"] == (2 + 1 + 2 + 2 + 1 + 2 + 1) / 7
    assert stats["core"] == 4 / 7 and stats["core_sizes"] == {"0": 3, "1": 4}
    assert stats["empty_core"] == 3 / 7
    assert stats["retried"] == 1 / 3  # Only WHOLE continues after an empty round.
    assert stats["solved"] == 1 / 2 and stats["early_stops"] == 1 / 2  # Known for two trajectories.
    assert stats["retrieval_misses"] == 1 / 3  # The second round misses it.
    # Rounds after the last fact do not count.
    longer = dataclasses.replace(WHOLE, steps=(*STEPS, STEPS[1]))
    assert trajectories.statistics([longer], {"a": gold})["retrieval_misses"] == 1 / 3
    assert stats["gold_retrieved"] == 2 / 3
    assert stats["parse_errors"] == {"truncated": 1, "passage_not_extracted": 1}
    text = trajectories.table(stats)
    assert "2.33" in text and "33.3 %" in text and "66.7 %" in text


def test_statistics_of_no_trajectories():
    stats = trajectories.statistics((), {})
    assert stats["trajectories"] == 0 and stats["steps"] is None and stats["solved"] is None
    assert "unknown" in trajectories.table(stats)


def test_until_second_empty_round_drops_later_rounds():
    kept, empty = STEPS[0], STEPS[1]

    def truncate(*steps):
        return trajectories.until_second_empty_round(steps)

    assert truncate(kept, empty, kept) == (kept, empty, kept)
    assert truncate(kept, empty, empty, kept) == (kept, empty)
    assert truncate(empty, kept, empty) == (empty, kept)
    assert truncate(empty) == (empty,) and truncate(kept) == (kept,)


def test_shuffled_keeps_candidates_scores_and_kept():
    many = tuple(NOISE._replace(tail=f"novel {i}") for i in range(8))
    scores = tuple(1.0 - i / 10 for i in range(10))
    step = dataclasses.replace(
        STEPS[0], candidates=(BORN, LIES, *many), scores=scores, kept=(BORN, LIES)
    )
    whole = dataclasses.replace(WHOLE, steps=(step, *STEPS[1:]))
    assert trajectories.shuffled([whole], 0.0, 0) == (whole,)
    first, second = trajectories.shuffled([whole, whole], 1.0, 0)
    assert first.steps[0].candidates != step.candidates != second.steps[0].candidates
    assert first != second  # Two draws.
    assert trajectories.shuffled([whole, whole], 1.0, 0) == (first, second)
    for shuffled in (first, second):
        now = shuffled.steps[0]
        pairs = dict(zip(step.candidates, step.scores, strict=True))
        assert dict(zip(now.candidates, now.scores, strict=True)) == pairs
        assert set(now.kept) == {BORN, LIES}
        assert now.kept == tuple(fact for fact in now.candidates if fact in now.kept)
    some = trajectories.shuffled([whole] * 40, 0.5, 0)
    assert 8 < sum(shuffled == whole for shuffled in some) < 32
    with pytest.raises(UserError, match=r"shuffled=1\.5 must lie between 0 and 1"):
        trajectories.shuffled([whole], 1.5, 0)
