"""Query writing: decomposed questions become conversations with supervised next queries."""

import json
import pathlib

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.methods.cirag import compact
from cirag_jax.training.data import conversations
from cirag_jax.training.data.query_examples import written_queries
from cirag_jax.types import Passage, Question, SubQuestion
from tests.distill import by_hand

_ROOT = pathlib.Path(__file__).resolve().parents[3]
CORPUS = {
    "song": Passage("song", "Hill Song", "Hill Song is by Ann Lee."),
    "ann": Passage("ann", "Ann Lee", "Ann Lee lived in Oslo."),
}
DECOMPOSED = Question(
    "m1",
    "Where did the performer of Hill Song live?",
    ("Oslo",),
    split="train",
    supporting=("song", "ann"),
    decomposition=(
        SubQuestion("Hill Song >> performer", "Ann Lee", "song"),
        SubQuestion("where did #1 live ?", "Oslo", "ann"),
    ),
)
ANNOTATED = Question(
    "w1",
    "Who is the father of the director of Blue?",
    ("Per Ek",),
    split="train",
    supporting=("song", "ann"),
    evidences=(("Blue", "director", "Jan Ek"), ("Jan Ek", "father", "Per Ek")),
)
BARE = Question("n1", "Which came first?", ("Blue",), split="train", supporting=("song",))


def render_turns(trajectory):
    """Returns the turns in the compact format, without the instruction and the question."""
    last = trajectory.steps[-1]
    turns = compact.messages(trajectory.question, trajectory.steps[:-1], last.candidates)
    texts = [turn.text.rpartition("Facts:\n")[2] for turn in turns[1:]]
    return [*texts, compact.render_decision(last)]


def test_written_queries_fill_in_earlier_answers():
    (trajectory,) = written_queries([DECOMPOSED, BARE], CORPUS)
    assert (trajectory.question_id, trajectory.question) == ("m1", DECOMPOSED.question)
    assert render_turns(trajectory) == [
        "none",
        "Keep: none\nNext: Who performed Hill Song?",
        "1. Hill Song | performer | Ann Lee",
        "Keep: 1\nNext: Where did Ann Lee live?",
        "1. Ann Lee live | is | Oslo",
        "Keep: 1\nNext: done",
    ]
    assert [step.query for step in trajectory.steps] == [
        *(DECOMPOSED.question, "Who performed Hill Song?", "Where did Ann Lee live?")
    ]


def test_written_queries_show_annotated_triples():
    (trajectory,) = written_queries([ANNOTATED], CORPUS)
    assert [line for line in render_turns(trajectory) if "|" in line] == [
        *("1. Blue | director | Jan Ek", "1. Jan Ek | father | Per Ek")
    ]


@pytest.fixture
def data(tmp_path):
    """Examples from two trajectories (one is held out) and from a folder with more questions."""
    folder = tmp_path / "musique"
    folder.mkdir()
    steps = [{"question": s.question, "answer": s.answer, "supporting": s.supporting}
             for s in DECOMPOSED.decomposition or ()]  # fmt: skip
    rows = [
        {"id": name, "question": DECOMPOSED.question, "answers": ["Oslo"], "split": split,
         "fold": fold, "supporting": ["song", "ann"], "decomposition": steps}
        for name, split, fold in (
            ("m1", "train", None), ("m2", "train", "train"),
            ("q0", "train", None), ("q1", "train", None),
            ("m3", "train", "test"), ("m4", "train", "tune"), ("m5", "dev", "dev_tune"),
        )
    ]  # fmt: skip
    passages = [{"id": p.id, "title": p.title, "text": p.text} for p in CORPUS.values()]
    for name, lines in (("questions", rows), ("corpus", passages)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    trajectories = [by_hand.trajectory(number) for number in range(2)]
    trajectories_lib.write_trajectories(tmp_path / "t.jsonl", trajectories)
    config = load_config(
        str(_ROOT / "configs/integrator.py"),
        [
            f"--config.trajectories={tmp_path / 't.jsonl'}",
            f"--config.query_folders={folder}",
            "--config.prompt_format=compact",
            "--config.dev_fraction=0.5",
            "--config.stop_weight=3",
        ],
    )
    return conversations.load_data(config, by_hand.tiny_tokenizer(tmp_path / "base"), 4000)


def test_load_data_query_writing_excludes_held_out_questions(data):
    held_out = set(data.measured_on)
    assert len(held_out) == 1
    expected = {"m1", "m2", "q0", "q1"} - held_out
    assert set(data.trained_on) == expected
    assert data.counts["num_query_writing"] == len(expected)


def test_load_data_query_writing_supervises_queries_and_stop(data, tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path / "again")
    (example,) = [e for e in data.train if e.source == "m1"]
    text = tokenizer.decode(example.tokens_T[example.weight_T == 1], True)
    assert text.replace("\n", "") == ("Next: Who performed Hill Song?Next: Where did Ann Lee live?")
    assert tokenizer.decode(example.tokens_T[example.weight_T == 3], True) == "Next: done"
