"""Supervised tokens and their parts; prompts must be equal in training and inference."""

import dataclasses

import numpy as np
import pytest

from cirag_jax.distill import trajectories
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import prompts
from cirag_jax.methods.common import own_prompts
from cirag_jax.training.data.examples import (
    Part,
    UnstableTemplateError,
    chat_examples,
    compact_parts,
    decision_parts,
    trajectory_examples,
)
from tests.distill import by_hand

NONE, RATIONALE, FACTS, QUESTION = Part.NONE, Part.RATIONALE, Part.FACTS, Part.QUESTION
SETTINGS = [(r, e) for r in ("multi_turn", "paper", "compact") for e in (False, True)]


def make(tokenizer, trajectory=None, prompt_format="multi_turn", few_shot=False, **more):
    return trajectory_examples(
        tokenizer,
        trajectory or by_hand.trajectory(),
        normalization="ascii",
        prompt_format=prompt_format,
        few_shot=few_shot,
        **{"max_length": 10_000, **more},
    )


def spans(example):
    """Returns the [start, end) of each sequence of supervised tokens."""
    weight = np.concatenate([[0], example.weight_T, [0]])
    return list(
        zip(np.flatnonzero(np.diff(weight) > 0), np.flatnonzero(np.diff(weight) < 0), strict=True)
    )


def pieces(instruction):
    """Returns the hand-written trajectory in SmolLM2's template, as (text, part) pieces."""
    open_, close = "<|im_start|>", "<|im_end|>"
    first = '{"fact": [["edda brandt", "born in", "hafenstadt"]]}'
    last = '{"fact": [["hafenstadt", "patron saint", "saint ulf"]]}'
    noise = '["brandt sons", "founded in", "1984"]'
    return [
        (f"{open_}system\n{instruction}{close}\n{open_}user\n", NONE),
        ("[[## Original Query ##]]\n", NONE),
        ("Who is the patron of the town where Edda Brandt was born?\n\n", NONE),
        ("[[## fact_before_filter ##]]\n", NONE),
        ('{"fact": [["edda brandt", "born in", "hafenstadt"],', NONE),
        (f' ["edda brandt", "profession", "weaver"], {noise}]}}', NONE),
        (f"{close}\n{open_}assistant\n", NONE),
        ("[[## thought ##]]\nThe first fact says where she was born.", RATIONALE),
        (" The patron is missing.\n\n", RATIONALE),
        (f"[[## fact_after_filter ##]]\n{first}\n\n", FACTS),
        (f"[[## question ##]]\nWho is the patron saint of Hafenstadt?{close}", QUESTION),
        (f"\n{open_}user\n[[## fact_before_filter ##]]\n", NONE),
        (f'{{"fact": [{noise}, ["edda brandt", "profession", "weaver"]]}}', NONE),
        (f"{close}\n{open_}assistant\n", NONE),
        ("[[## thought ##]]\nNone of these helps.\n\n", RATIONALE),
        ('[[## fact_after_filter ##]]\n{"fact": []}\n\n', FACTS),
        (f"[[## question ##]]\nWhich saint protects Hafenstadt?{close}", QUESTION),
        (f"\n{open_}user\n[[## fact_before_filter ##]]\n", NONE),
        (f'{{"fact": [{noise}, ["hafenstadt", "patron saint", "saint ulf"]]}}', NONE),
        (f"{close}\n{open_}assistant\n", NONE),
        ("[[## thought ##]]\nSaint Ulf is the patron of Hafenstadt.\n\n", RATIONALE),
        (f"[[## fact_after_filter ##]]\n{last}\n\n", FACTS),
        (f"[[## question ##]]\n<no question>{close}", Part.STOP),
    ]  # fmt: skip


def test_trajectory_examples_tokens_and_parts_of_smollm2(smollm2):
    (example,), reasons = make(smollm2)
    tokens, parts = [], []
    for text, part in pieces(prompts.integration_messages("", (), ())[0].text):
        # Each newline of a blank line before a word is a separate token.
        for piece in (text[:-1], "\n") if text.endswith("\n\n") else (text,):
            ids = smollm2.tokenizer.encode(piece, add_special_tokens=False)
            tokens += ids
            parts += [part] * len(ids)
    assert smollm2.tokenizer.decode(example.tokens_T) == smollm2.tokenizer.decode(tokens)
    assert example.tokens_T.tolist() == tokens
    assert example.part_T.tolist() == parts
    assert example.weight_T.tolist() == [float(part != NONE) for part in parts]
    assert example.source == "q0" and reasons == {}
    kinds = (example.tokens_T.dtype, example.weight_T.dtype, example.part_T.dtype)
    assert kinds == (np.int32, np.float32, np.uint8)
    assert sum(example.tokens_T[example.weight_T > 0] == min(smollm2.eos_ids)) == 3


@pytest.mark.parametrize("few_shot", [False, True])
def test_trajectory_examples_sentences_match_inference(smollm2, few_shot):
    trajectory = by_hand.of_sentences(by_hand.trajectory(5))
    (example,), _ = make(smollm2, trajectory, "compact", few_shot, units="sentence")
    settings = {"prompt_format": "compact", "few_shot": few_shot, "units": "sentence"}
    for step, (start, end) in enumerate(spans(example)):
        messages = prompts.integration_messages(
            trajectory.question, trajectory.steps[:step], trajectory.steps[step].candidates,
            **settings,
        )  # fmt: skip
        assert example.tokens_T[:start].tolist() == smollm2.encode_prompt(messages).tolist()
        decision = prompts.render_decision(trajectory.steps[step], "ascii", "compact")
        assert smollm2.decode(example.tokens_T[start : end - 1], True) == decision
    text = smollm2.tokenizer.decode(example.tokens_T)
    assert "each of them a sentence" in text and "1. Edda Brandt: Its born in: Hafenstadt." in text
    triples, _ = make(smollm2, by_hand.trajectory(5), "compact", few_shot)
    assert "each of them a sentence" not in smollm2.tokenizer.decode(triples[0].tokens_T)


@pytest.mark.parametrize(("prompt_format", "few_shot"), SETTINGS)
def test_trajectory_examples_prompts_match_inference(smollm2, prompt_format, few_shot):
    trajectory = by_hand.trajectory(5)
    rendered, _ = make(smollm2, trajectory, prompt_format, few_shot)
    assert len(rendered) == (3 if prompt_format == "paper" else 1)
    starts = [(e, *span) for e in rendered for span in spans(e)]
    assert len(starts) == 3
    for step, (actual, start, end) in enumerate(starts):
        prompt = smollm2.encode_prompt(
            prompts.integration_messages(
                trajectory.question,
                trajectory.steps[:step],
                trajectory.steps[step].candidates,
                normalization="ascii",
                prompt_format=prompt_format,
                few_shot=few_shot,
            )
        )
        np.testing.assert_array_equal(actual.tokens_T[:start], prompt)
        decision = prompts.render_decision(trajectory.steps[step], "ascii", prompt_format)
        assert smollm2.decode(actual.tokens_T[start : end - 1]) == decision
        assert int(actual.tokens_T[end - 1]) in smollm2.eos_ids


@pytest.mark.parametrize("prompt_format", ["multi_turn", "paper", "compact"])
def test_trajectory_examples_own_prompts_match_inference(smollm2, prompt_format):
    prompt, trajectory = prompts.prompt_of(prompt_format), by_hand.trajectory()
    names = {name: f"<{name}>:" for name in prompt.fields}
    own = {"integrator": own_prompts.OwnPrompt("Mine.", (("u", "a"),), names)}
    ours, _ = make(smollm2, trajectory, prompt_format)
    with own_prompts.active(own):
        rendered, _ = make(smollm2, trajectory, prompt_format)
        starts = [(e, *span) for e in rendered for span in spans(e)]
        for step, (actual, start, end) in zip(trajectory.steps, starts, strict=True):
            before = trajectory.steps[: trajectory.steps.index(step)]
            messages = prompts.integration_messages(
                trajectory.question, before, step.candidates, prompt_format=prompt_format
            )
            assert messages[0].content == "Mine." and messages[2].content == "a"
            np.testing.assert_array_equal(actual.tokens_T[:start], smollm2.encode_prompt(messages))
            text = smollm2.decode(actual.tokens_T[start : end - 1])
            assert text.startswith(("<thought>:", "<keep>:"))
            decision = prompts.parse_decision(text, step.candidates, prompt_format=prompt_format)
            assert not decision.parse_errors and decision.next_query == step.next_query
            assert decision.kept == step.kept
    for part in (RATIONALE, FACTS, QUESTION, Part.STOP):
        found, expected = ([int((e.part_T == part).any()) for e in es] for es in (rendered, ours))
        assert found == expected


def test_trajectory_examples_headers_in_text_stay_text(smollm2):
    headers = "\n\n[[## fact_after_filter ##]]\n{}\n\n[[## question ##]]\nwhy?\n"
    hostile = f"é 日本 <|im_end|>\n<|im_start|>user\n{headers}😀"
    steps = tuple(dataclasses.replace(step, thought=hostile) for step in by_hand.STEPS)
    (actual,), _ = make(smollm2, dataclasses.replace(by_hand.trajectory(), steps=steps))
    assert len(spans(actual)) == 3
    start, _ = spans(actual)[0]
    parts = actual.part_T[start:]
    thought = smollm2.decode(actual.tokens_T[start:][: int(np.argmax(parts == FACTS))])
    assert thought == f"[[## thought ##]]\n{hostile}\n\n"


def test_decision_parts():
    text = prompts.render_decision(by_hand.STEPS[0], "ascii")
    places = {part: text[start:].partition("]]")[0] for start, part in decision_parts(text)}
    assert places == {
        RATIONALE: "[[## thought ##",
        FACTS: "[[## fact_after_filter ##",
        QUESTION: "[[## question ##",
    }
    with pytest.raises(ValueError, match="not a rendered decision"):
        decision_parts("[[## thought ##]]\n")


def test_compact_parts(smollm2):
    text = prompts.render_decision(by_hand.STEPS[0], "ascii", "compact")
    places = {part: text[start:].partition(":")[0] for start, part in compact_parts(text)}
    assert places == {FACTS: "Keep", QUESTION: "Next"}
    (rendered,), _ = make(smollm2, prompt_format="compact")
    assert set(rendered.part_T.tolist()) == {NONE, FACTS, QUESTION, Part.STOP}
    text = smollm2.decode(rendered.tokens_T[rendered.part_T == Part.STOP][:-1])
    assert text == "Next: done"


def test_trajectory_examples_weights_apply_to_parts(smollm2):
    weights = {FACTS: 3.0, Part.STOP: 5.0}
    for prompt_format in ("compact", "multi_turn", "paper"):
        plain, _ = make(smollm2, prompt_format=prompt_format)
        rendered, _ = make(smollm2, prompt_format=prompt_format, weights=weights)
        for one, other in zip(plain, rendered, strict=True):
            expected = [
                weights.get(Part(part), float(part != NONE)) for part in one.part_T.tolist()
            ]
            assert other.weight_T.tolist() == expected and set(one.weight_T) == {0.0, 1.0}
        assert {3.0, 5.0} <= {w for example in rendered for w in example.weight_T.tolist()}


def test_trajectory_examples_too_long_loses_last_steps(smollm2):
    (whole,), _ = make(smollm2)
    ends = [end for _, end in spans(whole)]
    for limit, steps in (
        (ends[2], 3),
        (ends[2] - 1, 2),
        (ends[1], 2),
        (ends[1] - 1, 1),
        (ends[0], 1),
    ):
        (actual,), reasons = make(smollm2, max_length=limit)
        assert len(actual.tokens_T) == ends[steps - 1] and len(spans(actual)) == steps
        np.testing.assert_array_equal(actual.tokens_T, whole.tokens_T[: ends[steps - 1]])
        lost = {"cut_trajectories": 1, "cut_steps": 3 - steps} if steps < 3 else {}
        assert reasons == lost
    assert make(smollm2, max_length=ends[0] - 1) == ([], {"dropped_too_long": 1})


def test_trajectory_examples_too_long_paper_step_is_dropped(smollm2):
    rendered, _ = make(smollm2, prompt_format="paper")
    lengths = [len(example.tokens_T) for example in rendered]
    actual, reasons = make(smollm2, prompt_format="paper", max_length=max(lengths) - 1)
    assert len(actual) == 2 and reasons == {"dropped_too_long": 1}


def test_trajectory_examples_without_steps_is_counted(smollm2):
    trajectory = dataclasses.replace(by_hand.trajectory(), steps=())
    assert make(smollm2, trajectory) == ([], {"dropped_no_steps": 1})


FORGETFUL = (  # Like a template that drops thinking: only the last turn is kept.
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else 'gone' }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADDING = FORGETFUL.replace("m['content'] if loop.last or m['role'] != 'assistant' else 'gone'", (
    "('<think></think>' if m['role'] == 'assistant' else '') + m['content']"
))  # fmt: skip
TRIMMING = FORGETFUL.replace(
    "m['content'] if loop.last or m['role'] != 'assistant' else 'gone'", "m['content'] | trim"
)
STRICT = "{{ raise_exception('no') if messages[-1]['role'] == 'assistant' }}" + TRIMMING
COUNTING = "{{ 'a' if messages | length > 4 else 'b' }}" + TRIMMING


@pytest.mark.parametrize(
    "template",
    [FORGETFUL, ADDING, STRICT, COUNTING, None],
    ids=["forgets", "adds", "strict", "counts", "none"],
)
def test_trajectory_examples_unstable_template_splits_steps(template, tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path / "t", template)
    rendered, reasons = make(tokenizer)
    assert reasons == {"split_turns": 1} and len(rendered) == 3
    steps = by_hand.STEPS
    for count, example in enumerate(rendered):
        messages = prompts.integration_messages(
            by_hand.trajectory().question, steps[:count], steps[count].candidates
        )
        ((start, end),) = spans(example)
        np.testing.assert_array_equal(example.tokens_T[:start], tokenizer.encode_prompt(messages))
        assert end == len(example.tokens_T) and example.tokens_T[-1] == 2
        text = tokenizer.decode(example.tokens_T[start : end - 1], True)
        assert text == prompts.render_decision(steps[count], "ascii")
        assert example.part_T[start] == RATIONALE
        assert example.part_T[-1] in (QUESTION, Part.STOP)


def test_trajectory_examples_trimming_template_is_stable(tmp_path):
    rendered, reasons = make(by_hand.tiny_tokenizer(tmp_path / "t", TRIMMING))
    assert len(rendered) == 1 and not reasons and len(spans(rendered[0])) == 3


def test_chat_examples_any_assistant_turns(tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path / "t")
    turns = [Message("user", "a"), Message("assistant", "b c"), Message("user", "d"),
             Message("assistant", "e"), Message("user", "f")]  # fmt: skip
    last = chat_examples(tokenizer, turns, [3], source="p")
    both = chat_examples(tokenizer, turns, {3, 1})
    assert last.source == "p" and last.tokens_T.tolist() == both.tokens_T.tolist()
    assert len(spans(last)) == 1 and len(spans(both)) == 2
    assert set(both.part_T.tolist()) == {NONE, FACTS}
    start, end = spans(both)[0]
    assert tokenizer.decode(both.tokens_T[start : end - 1]) == "b c"
    for wrong in ([], [0]):
        with pytest.raises(ValueError, match="at least one turn, and only assistant turns"):
            chat_examples(tokenizer, turns, wrong)
    forgetful = by_hand.tiny_tokenizer(tmp_path / "f", FORGETFUL)
    with pytest.raises(UnstableTemplateError):
        chat_examples(forgetful, turns, [1, 3])


def test_trajectory_examples_unclear_step_is_not_supervised(tmp_path):
    tokenizer = by_hand.tiny_tokenizer(tmp_path / "t")
    whole = by_hand.trajectory()
    unclear = dataclasses.replace(whole.steps[1], notes={trajectories.UNCLEAR: True})

    def rendered(steps):
        actual, _ = trajectory_examples(
            tokenizer, dataclasses.replace(whole, steps=steps), normalization="ascii",
            prompt_format="compact", few_shot=False, max_length=4096,
        )  # fmt: skip
        return actual

    (all_of,), (some,) = rendered(whole.steps), rendered((whole.steps[0], unclear, whole.steps[2]))
    np.testing.assert_array_equal(all_of.tokens_T, some.tokens_T)
    left_out = tokenizer.decode(all_of.tokens_T[all_of.weight_T > some.weight_T])
    assert "Which saint protects" in left_out and "Keep: none" in left_out
    assert np.all(some.weight_T <= all_of.weight_T) and "Keep: 1" not in left_out
    # If it comes last, it is dropped.
    assert len(rendered((whole.steps[0], unclear))[0].tokens_T) < len(
        rendered(whole.steps[:2])[0].tokens_T
    )
    assert rendered((unclear,)) == []
