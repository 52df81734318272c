"""Training and dev examples: held-out questions, dropped examples and rendering."""

import dataclasses
import json
import pathlib

import pytest

from cirag_jax.datasets import jsonl
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common import own_prompts
from cirag_jax.methods.registry import find_method
from cirag_jax.training.data import conversations
from tests import tiny
from tests.distill import by_hand
from tests.training.students import config_of, write

pytestmark = pytest.mark.usefixtures("short_instruction")


def load(config, length=448):
    tokenizer = ChatTokenizer.load(config.model.spec)
    return conversations.load_data(config, tokenizer, length)


def sources(examples):
    return [example.source for example in examples]


def test_load_data_train_and_dev_are_disjoint(folders, tmp_path):
    base, _ = folders
    one = [by_hand.trajectory(number, 2) for number in range(10)]
    two = [dataclasses.replace(t, teacher="llm") for t in one[:6]]
    both = f"('{write(tmp_path / 'a', one)}', '{write(tmp_path / 'b', two)}')"
    data = load(config_of((base, both), dev_fraction=0.3))
    assert not set(sources(data.train)) & set(sources(data.dev))
    assert len(set(sources(data.dev))) == 3 and len(data.train) + len(data.dev) == 16
    assert sum(data.counts["teachers"].values()) == len(data.train)
    few = load(config_of((base, both), dev_fraction=0.3, num_trajectories=4))
    more = load(config_of((base, both), dev_fraction=0.3, num_trajectories=8))
    assert len(few.train) == 4 and set(sources(few.train)) <= set(sources(more.train))
    assert sources(few.dev) == sources(data.dev) and few.identity != more.identity
    apart = config_of((base, tmp_path / "b"), dev=write(tmp_path / "c", one[6:]), num_dev=2)
    assert len(load(apart).dev) == 2 and len(load(apart).train) == 6
    assert len(data.trained_on) == 7 and set(data.trained_on) == set(sources(data.train))
    assert data.num_candidates == max(len(s.candidates) for t in one for s in t.steps) > 0
    with pytest.raises(UserError, match="config.dev has 6 of the training questions"):
        load(config_of((base, tmp_path / "b"), dev=tmp_path / "a", num_dev=0))


def test_load_data_with_weights_has_the_sizes_of_all_files(folders, tmp_path):
    one = [by_hand.trajectory(number, 2) for number in range(10)]
    two = [dataclasses.replace(t, teacher="llm") for t in one[:6]]
    both = f"('{write(tmp_path / 'a', one)}', '{write(tmp_path / 'b', two)}')"
    settings = {"dev_fraction": 0.3, "shuffled": 0.5}
    plain = load(config_of((folders[0], both), **settings))
    data = load(config_of((folders[0], both), weights="(1,2)", **settings))
    assert data.sizes == tuple(data.counts["teachers"].values()) and sum(data.sizes) == 11
    assert plain.sizes == () and plain.identity != data.identity  # Only sizes differ.
    assert sources(plain.train) == sources(data.train) and sources(plain.dev) == sources(data.dev)
    few = load(config_of((folders[0], both), weights="(1,2)", num_trajectories=6, **settings))
    assert few.sizes == tuple(few.counts["teachers"].values()) and sum(few.sizes) == 6
    # With this format, a trajectory has an example for each of its two rounds.
    own = {**settings, "prompt_format": "paper"}
    steps = load(config_of((folders[0], both), weights="(1,2)", **own), 4000)
    assert steps.sizes == tuple(2 * size for size in data.sizes)


def test_load_data_reader_with_weights_has_the_sizes_of_all_folders(folders, tmp_path):
    dataset = tiny.dataset()
    jsonl.write_dataset(dataset, tmp_path / "all")
    one = dataclasses.replace(dataset.questions[0], id="other")
    jsonl.write_dataset(dataclasses.replace(dataset, questions=(one,)), tmp_path / "one")
    own = {"trajectories": ..., "data.split": "train", "weights": "(1,2)", "dev.split": ""}
    config = config_of(folders, script="reader", **{**own, "dev_fraction": 0.0})
    config.folders = (str(tmp_path / "all"), str(tmp_path / "one"))
    data = load(config, 10_000)
    assert data.sizes == (len(data.train) - 1, 1) and data.train[-1].source == "other"
    assert len(data.train) > 2


def test_load_data_counts_dropped_and_cut_examples(folders, tmp_path):
    trajectories = [by_hand.trajectory(number) for number in range(4)]
    trajectories[0] = dataclasses.replace(trajectories[0], parse_errors={"no_facts": 1})
    trajectories[1] = dataclasses.replace(trajectories[1], solved=None)
    trajectories[2] = dataclasses.replace(trajectories[2], solved=False)
    trajectories[3] = dataclasses.replace(
        trajectories[3], parse_errors={"passage_without_triples": 2}
    )
    config = config_of((folders[0], write(tmp_path / "t", trajectories)), dev_fraction=0.0)
    assert load(config).counts["left_out"] == {"dropped_parse_errors": 1}
    config.keep = "correct_only"
    expected = {"dropped_parse_errors": 1, "dropped_unknown": 1, "dropped_not_solved": 1}
    assert load(config).counts["left_out"] == expected
    config.keep = "all"
    longest = max(len(example.tokens_T) for example in load(config).train)
    left_out = load(config, longest - 1).counts["left_out"]
    assert left_out["cut_trajectories"] >= 1 and left_out["cut_steps"] >= 1
    with pytest.raises(UserError, match=r"no supervised tokens.*dropped_too_long.*4"):
        load(config, 40)


def test_load_data_rendering_follows_config_and_sidecar(folders, tmp_path):
    base, _ = folders
    trajectories = [by_hand.trajectory(number) for number in range(3)]
    paper = write(tmp_path / "paper", trajectories, prompt_format="paper", few_shot=True)
    data = load(config_of((base, paper), dev_fraction=0.0), 4000)
    prompt_settings = {
        "units": "triple",
        "normalization": "ascii",
        "prompt_format": "paper",
        "few_shot": True,
    }
    assert data.prompt_settings == prompt_settings
    assert len(data.train) == 9
    overridden = load(config_of((base, paper), prompt_format="multi_turn", dev_fraction=0.0), 4000)
    assert overridden.prompt_settings == {**prompt_settings, "prompt_format": "multi_turn"}
    with pytest.raises(UserError, match="prompt_format='papr' is not one of"):
        load(config_of((base, paper), prompt_format="papr"), 4000)
    other = write(tmp_path / "other", trajectories)
    with pytest.raises(UserError, match=r"field (prompt_format|few_shot) is .* but .*/paper/"):
        load(config_of((base, f"('{paper}', '{other}')")))
    (paper / trajectories_lib.SIDECAR).unlink()
    bare = load(
        config_of((base, paper / trajectories_lib.FILE), normalization="unicode", dev_fraction=0.0)
    )
    assert bare.prompt_settings == {
        "units": "triple",
        "normalization": "unicode",
        "prompt_format": "multi_turn",
        "few_shot": False,
    }


def test_load_data_prompt_file_changes_examples_and_is_recorded(folders, tmp_path):
    base, _ = folders
    folder = write(tmp_path / "t", [by_hand.trajectory(number) for number in range(3)])
    config = config_of((base, folder), dev_fraction=0.0)
    ours = load(config, 4000)

    def render():
        return find_method("cirag").render(CiragConfig())

    config.prompt_file = str(tmp_path / "own.toml")
    text = own_prompts.export(render).replace("[[## thought ##]]", "### Idea")
    (tmp_path / "own.toml").write_text(text)
    data = load(config, 4000)
    decoded = ChatTokenizer.load(config.model.spec).decode(data.train[0].tokens_T)
    assert "### Idea" in decoded and "[[## thought" not in decoded
    own = own_prompts.read(config.prompt_file, render, "cirag")
    assert data.own_prompts == own_prompts.digest({"integrator": own["integrator"]})
    assert ours.own_prompts is None and ours.identity != data.identity
    (tmp_path / "own.toml").write_text(text[text.index("[reader.triple]") :])
    with pytest.raises(UserError, match=r"own.toml has no \[integrator\]"):
        load(config, 4000)


def test_load_data_inputs_are_the_distinct_values_of_the_sidecars(folders, tmp_path):
    base, _ = folders
    trajectories = [by_hand.trajectory(number) for number in range(3)]
    one = write(tmp_path / "one", trajectories[:2], encoder="bge", triples="Qwen", max_steps=4)
    two = write(tmp_path / "two", trajectories[2:], encoder="NV", triples=None, max_steps=4)
    data = load(config_of((base, f"('{one}', '{two}')"), dev_fraction=0.0), 4000)
    assert data.inputs == {
        "num_candidates": [15],
        "max_steps": [4],
        "encoder": ["bge", "NV"],
        "triples": ["Qwen"],
    }


def test_load_data_units_follow_trajectories(folders, tmp_path):
    base, triples = folders
    trajectories = [by_hand.of_sentences(by_hand.trajectory(number)) for number in range(3)]
    folder = write(
        tmp_path / "s", trajectories, prompt_format="compact"
    )  # The steps determine the units.
    data = load(config_of((base, folder), dev_fraction=0.0), 4000)
    assert data.prompt_settings["units"] == "sentence" and len(data.train) == 3
    prompt_settings = {**data.prompt_settings, "units": "triple"}
    assert data.prompt_digest != data._replace(prompt_settings=prompt_settings).prompt_digest
    with pytest.raises(UserError, match="some trajectories have units=triple and some have"):
        load(config_of((base, f"('{folder}', '{triples}')")))
    with pytest.raises(UserError, match="units=sentence needs .*prompt_format=compact, not paper"):
        load(config_of((base, folder), prompt_format="paper"))


def test_load_data_extractor_uses_references(folders, tmp_path):
    data_folder = pathlib.Path(tiny.dataset_folder(tmp_path))
    changes = {"data.dir": data_folder, "data.fold": "null", "dev": "null"}
    config = config_of(
        folders, script="extractor", **changes, trajectories=..., **{"data.split": "train"}
    )
    data = load(config, 10_000)
    assert len(data.train) == 2 * data.counts["num_passages"]
    assert data.dev and not set(sources(data.train)) & set(sources(data.dev))
    assert len(data.trained_on) == data.counts["num_passages"] and data.num_candidates == 0
    with pytest.raises(UserError, match="num_passages=-1 must not be negative"):
        config.num_passages = -1
        load(config)
    rows = [json.loads(line) for line in (data_folder / "questions.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "fold": "tune"}) for row in rows]
    (data_folder / "questions.jsonl").write_text("\n".join(lines))
    config.num_passages, config.dev = 0, "tune"
    with pytest.raises(UserError, match=r"config\.dev has \d+ of the training passages"):
        load(config, 10_000)
    config.component = "judge"
    with pytest.raises(UserError, match="config.component='judge' is not one of integrator"):
        load(config)


@pytest.mark.parametrize("script", ["integrator", "reader", "extractor"])
def test_load_data_one_question_is_enough(folders, tmp_path, script):
    dataset = tiny.dataset()
    one = dataclasses.replace(dataset, questions=dataset.questions[:1])
    jsonl.write_dataset(one, tmp_path / "data")
    trajectories = write(tmp_path / "t", [by_hand.trajectory(0)])
    own: dict = {"trajectories": trajectories}
    if script != "integrator":
        own = {"trajectories": ..., "data.split": "train"}
    if script == "extractor":
        own |= {"data.dir": tmp_path / "data", "data.fold": "null", "dev": "null"}
    config = config_of(folders, script=script, dev_fraction=0.05, **own)
    if script == "reader":
        config.folders, config.dev.split = (str(tmp_path / "data"),), ""
    data = load(config, 10_000)
    assert data.train and not data.dev
    with pytest.raises(UserError, match=r"config\.length=20 tokens .* at least one example"):
        load(config, 20)
    if script == "reader":
        config.dev.split = "valid"
        with pytest.raises(UserError, match=r"config\.dev\.split=valid matches no question"):
            load(config, 10_000)


def test_load_data_evaluation_questions_cause_warning(folders, tmp_path, capsys):
    trajectories = [by_hand.trajectory(number) for number in range(3)]
    paths = write(tmp_path / "a", trajectories, held_out={"fold=test": 3})
    load(config_of((folders[0], paths), dev_fraction=0.0))
    warning = "a/trajectories.json: training on up to 3 questions of fold=test"
    assert warning in capsys.readouterr().err


def test_load_data_without_room_for_training_is_refused(folders):
    with pytest.raises(UserError, match=r"dev_fraction=1\.0 must be at least 0 and below 1"):
        load(config_of(folders, dev_fraction=1.0))
