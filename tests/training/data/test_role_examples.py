"""Examples of any role: prompts equal those of inference, and the loss is on the target."""

import json

import numpy as np
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.distill import examples as examples_lib
from cirag_jax.distill.examples import RoleExample
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.types import Message
from cirag_jax.training.data import conversations
from cirag_jax.training.data.examples import Part
from cirag_jax.training.data.role_examples import role_examples
from tests import tiny_decoder

ASKED = (Message("system", "Be brief."), Message("user", "who?"))
SETTINGS = {"few_shot": False, "max_steps": 3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.load(tiny_decoder.folder(tmp_path_factory.mktemp("model")))


def example(number=0, role="reasoner", messages=ASKED, target="the sailor"):
    return RoleExample(role, f"q{number}", messages, f"{target} {number}")


def test_role_examples_supervise_target_and_end(tokenizer):
    continued = (*ASKED, Message("assistant", "it was"))
    records = [("f:1", example()), ("f:2", example(1, messages=continued, target=" the mason"))]
    found, dropped = role_examples(tokenizer, records, max_length=200)
    assert dropped == {} and [e.source for e in found] == ["q0", "q1"]
    for made, (_, record) in zip(found, records, strict=True):
        prompt = tokenizer.encode_prompt(record.messages, len(record.messages) == 3)
        assert made.tokens_T[: len(prompt)].tolist() == prompt.tolist()
        weighted = made.weight_T > 0
        assert not weighted[: len(prompt)].any() and weighted[len(prompt) :].all()
        assert tokenizer.decode(made.tokens_T[weighted][:-1], True) == record.target
        assert made.tokens_T[-1] in tokenizer.eos_ids
        assert set(made.part_T[weighted]) == {Part.ANSWER} and made.part_T[~weighted].max() == 0
        assert made.weight_T.dtype == np.float32 and made.part_T.dtype == np.uint8


def test_role_examples_too_long_are_dropped(tokenizer):
    records = [("f:1", example()), ("f:2", example(1, target="the harbour town " * 30))]
    found, dropped = role_examples(tokenizer, records, max_length=80)
    assert [e.source for e in found] == ["q0"] and dropped == {"dropped_too_long": 1}


def test_role_examples_that_the_chat_template_rejects_are_named(tokenizer, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="f:7 does not fit the student: .*roles must alternate"):
        role_examples(tokenizer, [("f:7", example())], max_length=80)


# ----------------------------------------------------------------------------- files and their data


def write(folder, rows, **sidecar):
    folder.mkdir(exist_ok=True)
    examples_lib.write_examples(folder / examples_lib.FILE, rows)
    sidecar = {"method": "dualrag", "settings": SETTINGS, **sidecar}
    (folder / examples_lib.SIDECAR).write_text(json.dumps(sidecar))
    return folder


@pytest.fixture
def folder(tmp_path):
    rows = [example(i, role) for i in range(10) for role in ("reasoner", "summarizer")]
    return write(tmp_path / "one", rows)


def load(tokenizer, path, *more):
    values = [f"conversations={path}", "dev_fraction=0.2", "length=200", *more]
    config = load_config("configs/role.py", [f"--config.{value}" for value in values])
    return conversations.load_data(config, tokenizer, 200)


def test_load_data_of_one_role(tokenizer, folder):
    data = load(tokenizer, folder, "role=reasoner")
    assert (len(data.train), len(data.dev)) == (8, 2)
    assert data.counts["roles"] == {"reasoner": 8} and data.counts["left_out"] == {}
    assert len(data.trained_on) == 8 and not {*data.trained_on} & {*data.measured_on}
    settings = {"method": "dualrag", "roles": ["reasoner"], "settings": SETTINGS}
    assert data.prompt_settings == settings and data.own_prompts is None
    assert data.inputs == {"few_shot": [False], "max_steps": [3]} and data.prompt_digest


def test_load_data_of_several_roles_prints_the_mixture(tokenizer, folder, tmp_path, capsys):
    more = write(tmp_path / "two", [example(20, "reasoner"), example(20, "summarizer")])
    role = "role=('summarizer','reasoner')"
    data = load(tokenizer, f"('{folder}','{more}')", role, "dev_fraction=0")
    assert data.counts["roles"] == {"summarizer": 11, "reasoner": 11}
    assert "11 of summarizer, 11 of reasoner, sum 22" in capsys.readouterr().err
    weighted = load(tokenizer, f"('{folder}','{more}')", role, "dev_fraction=0", "weights=(1,3)")
    assert weighted.sizes == (20, 2) and data.sizes == ()
    drawn = load(tokenizer, folder, role, "dev_fraction=0", "num_examples=5")
    assert sum(drawn.counts["roles"].values()) == 5
    dev = load(tokenizer, folder, role, f"dev={more}")
    assert (len(dev.train), dev.measured_on) == (20, ("q20",))


def test_load_data_bad_input_is_refused(tokenizer, folder, tmp_path):
    def refused(message, path, *more):
        with pytest.raises(UserError, match=message):
            load(tokenizer, path, *more)

    refused("config.role is required", folder)
    refused("config.conversations is required", "null", "role=reasoner")
    refused(
        "has no examples of the role 'planner'; it has 10 of reasoner, 10", folder, "role=planner"
    )
    refused("num_examples=9 exceeds the 8 training", folder, "role=reasoner", "num_examples=9")
    refused("config.dev has 10 of the training questions", folder, "role=reasoner", f"dev={folder}")
    both = f"('{folder}','{tmp_path / 'two'}')"
    for changes in ({"settings": {**SETTINGS, "few_shot": True}}, {"method": "direct"}):
        write(tmp_path / "two", [example(20)], **changes)
        refused("have examples of different prompts; use only one kind", both, "role=reasoner")
    write(tmp_path / "two", [example(20)], settings={**SETTINGS, "max_steps": 5})
    assert load(tokenizer, both, "role=reasoner").inputs["max_steps"] == [3, 5]


def test_load_data_held_out_questions_cause_a_warning(tokenizer, tmp_path, capsys):
    folder = write(tmp_path / "dev", [example(i) for i in range(3)], held_out={"split=dev": 3})
    load(tokenizer, folder, "role=reasoner", "dev_fraction=0")
    assert "training on up to 3 questions of split=dev" in capsys.readouterr().err
