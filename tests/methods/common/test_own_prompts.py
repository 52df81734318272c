"""Prompt files: what they replace, what is refused, and that parsing follows their field names."""

import dataclasses
import pathlib
import re
import tomllib
from typing import Any

import pytest

from cirag_jax.commands import task
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Message
from cirag_jax.methods.c2rag import prompts as c2rag_prompts
from cirag_jax.methods.cirag import prompts as cirag_prompts
from cirag_jax.methods.cirag.method import cirag
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common import dialects, extraction_prompts, own_prompts, reading_prompts
from cirag_jax.methods.common.own_prompts import OwnPrompt, Prompt
from cirag_jax.methods.dualrag import prompts as dualrag_prompts
from cirag_jax.methods.kirag import prompts as kirag_prompts
from cirag_jax.methods.registry import find_method, method_names
from cirag_jax.runtime.requests import Generate, Generated, RequestError
from cirag_jax.types import Passage, Question, Triple
from tests.methods import ada

CONFIGS = [
    "cirag.py", "cirag.py:paper", "cirag.py:medium", "cirag.py:small", "cirag.py:llm",
    "kirag.py", "kirag.py:small", "kirag.py:code", "dualrag.py", "dualrag.py:small",
    "c2rag.py", "c2rag.py:code", "native_rag.py", "native_rag.py:small", "ircot.py",
    "ircot.py:small", "genground.py", "genground.py:small", "iter_retgen.py", "oracle.py",
    "beam_retrieval.py", "direct.py", "multi_step.py", "decomposition.py", "search_r1.py",
    "hipporag2.py", "trace.py", "vector_prf.py",
]  # fmt: skip
CONFIGS += [f"{name}.py" for name in method_names() if f"{name}.py" not in CONFIGS]


def render_of(name):
    config = load_config(f"configs/methods/{name}", [])
    return task._render(config, task.method_settings(config))


@pytest.fixture
def read(tmp_path):
    def read(text, name="cirag.py"):
        file = tmp_path / "prompts.toml"
        file.write_text(text)
        return own_prompts.read(file, render_of(name), name)

    return read


@pytest.mark.parametrize("name", CONFIGS)
def test_export_read_again_gives_the_same_conversations(name, read):
    render = render_of(name)
    text = own_prompts.export(render)
    ours = own_prompts.rendered(render)
    assert list(ours) == [name for name in read(text, name)]
    seen: dict[str, tuple[Message, ...]] = {}
    original = Prompt.conversation

    def keep(self, *arguments, **fields):
        seen[self.name] = original(self, *arguments, **fields)
        return seen[self.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompt, "conversation", keep)
        render()
        expected = {key: [(m.role, m.text) for m in turns] for key, turns in seen.items()}
        with own_prompts.active(read(text, name)):
            render()
    assert {key: [(m.role, m.text) for m in turns] for key, turns in seen.items()} == expected


def test_every_method_declares_its_prompts():
    for name in CONFIGS:
        config = load_config(f"configs/methods/{name}", [])
        needs = task.method_settings(config).needs
        declared = {prompt.partition(".")[0] for prompt in own_prompts.rendered(render_of(name))}
        assert {*needs.roles} <= declared, name


def renamed(prompt, name=None):
    """Returns an own prompt with other names of all fields."""
    fields = {key: f"{key.upper()}~" for key in prompt.fields}
    fields |= {key: f"my_{key}" for key in prompt.keys}
    return {name or prompt.name: OwnPrompt("Mine.", (("u", "a"),), fields)}


def all_renamed(render):
    prompts = own_prompts.rendered(render)
    return {key: own for name in prompts for key, own in renamed(prompts[name].prompt).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompt_format": "paper"},
        {"prompt_format": "paper", "few_shot": True},
        {"prefilled_headers": True},
        {"reader_format": "chain", "force_answer": True},
    ],
    ids=str,
)
def test_cirag_other_field_names_same_prediction(settings):
    config = CiragConfig(**settings)
    own = all_renamed(lambda: find_method("cirag").render(config))
    question = Question("q", ada.QUESTION, ())
    responses = {"integrator": [ada.CONTINUE, ada.FINAL], "reader": [ada.REFUSAL, ada.ANSWER]}
    if config.prefilled_headers:
        responses["integrator"] = ["T.", '["ada moen", "born in", "lund"]', ada.NEXT]
        responses["integrator"] += ["T.", "", "<no question>"]

    def run(prompts):
        def translated(role, text):
            names = [name for name in prompts if name.partition(".")[0] == role]
            rendered = own_prompts.rendered(lambda: find_method("cirag").render(config))
            with own_prompts.active(prompts):
                return rendered[names[0]].prompt.write(text) if names else text

        script = {r: [translated(r, text) for text in texts] for r, texts in responses.items()}
        fakes = ada.fake(**script)
        result = fakes.drive(own_prompts.run_with(prompts, cirag(question, config)))
        return result, [r for r in fakes.requests if isinstance(r, Generate)]

    ours, theirs = run({}), run(own)
    assert theirs[0].answer == ours[0].answer == "Skane"
    assert theirs[0].parse_errors == ours[0].parse_errors
    assert [s.kept for s in theirs[0].steps] == [s.kept for s in ours[0].steps]
    assert [s.next_query for s in theirs[0].steps] == [s.next_query for s in ours[0].steps]
    for request in theirs[1]:
        head, user, assistant, *turns = request.messages
        assert head.content.startswith("Mine.") and (user.text, assistant.text) == ("u", "a")
        text = "\n".join(turn.text for turn in turns) + "".join(request.stop)
        assert not any(mark in text for mark in ("[[##", "Query:", "Triples:", "<no question>"))
    integrations = [r for r in theirs[1] if r.role == "integrator"]
    first = integrations[0].messages[3].text
    assert first.startswith("QUERY~\n") and "CANDIDATES~\n" in first
    assert "QUESTION~" in integrations[-1].messages[
        -2 if config.prefilled_headers else -1
    ].text or (config.prompt_format != "paper")


def test_run_with_errors_reach_the_program_and_the_caller():
    def program():
        try:
            yield Generate((Message("user", "?"),), "reader")
        except RequestError:
            answer = yield Generate((Message("user", "!"),), "reader")
            return answer.text

    own = {"reader": OwnPrompt("S", (), {})}
    wrapped: Any = own_prompts.run_with(own, program())
    next(wrapped)
    assert wrapped.throw(RequestError("no")).messages[0].text == "!"
    with pytest.raises(StopIteration) as end:
        wrapped.send(Generated("yes", "stop"))
    assert end.value.value == "yes"
    wrapped = own_prompts.run_with(own, program())
    next(wrapped)
    with pytest.raises(ValueError, match="bug"):
        wrapped.throw(ValueError("bug"))


def test_run_with_requests_only_the_program_is_renamed():
    prompt = Prompt("reader", labels={"question": "Question:"})
    own = {"reader": OwnPrompt("Mine.", (), {"question": "Q:"})}

    def program():
        yield Generate(prompt.conversation("Ours.", (), Message("user", "Question: x")))

    request: Any = next(own_prompts.run_with(own, program()))
    assert [m.text for m in request.messages] == ["Mine.", "Q: x"]
    outside = prompt.conversation("Ours.", (), Message("user", "Question: x"))
    assert [m.text for m in outside] == ["Ours.", "Question: x"]


def test_conversation_evidence_with_a_label_is_kept():
    prompt = Prompt("reader", labels={"question": "Question:"})
    turn = Message("user", "Question: a Question: b\n", "Question: evidence", "\nQuestion: c")
    with own_prompts.active({"reader": OwnPrompt("S", (), {"question": "Q:"})}):
        text = prompt.conversation("", (), turn)[1].text
    assert text == "Q: a Question: b\nQuestion: evidence\nQ: c"


def test_read_exchanged_names_are_both_translated():
    prompt = Prompt("x", written={"a": "Yes:", "b": "No:"}, keys=("head", "tail"))
    fields = {"a": "No:", "b": "Yes:", "head": "tail", "tail": "head"}
    with own_prompts.active({"x": OwnPrompt("S", (), fields)}):
        assert (
            prompt.read('no: 1 YES: 2 {"head": 1, "tail": 2}')
            == 'Yes: 1 No: 2 {"tail": 1, "head": 2}'
        )
        assert prompt.write("Yes: 1 No: 2") == "No: 1 Yes: 2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Result: Unknown", "Answer: Unanswerable"),
        ("So.\n**Result**: *unknown*. Nobody says.", "So.\n**Answer: *Unanswerable*. Nobody says."),
        ("End (unknown)", "Stop (Unanswerable)"),
        ("Unknown", "Unanswerable"),
        ("Result: Tomb of the Unknown Soldier", "Answer: Tomb of the Unknown Soldier"),
        ("Result: Unknown Pleasures", "Answer: Unknown Pleasures"),
        ("Result: The Great Unknown", "Answer: The Great Unknown"),
        ("The end: weekend result: 1", "The Stop: weekend Answer: 1"),
        ("Backend none [NONE] nonempty", "Backend none <none> nonempty"),
    ],
)
def test_read_names_in_longer_words_and_phrases_are_kept(text, expected):
    prompt = Prompt(
        "x",
        written={"answer": "Answer:", "end": "Stop"},
        marks={"refusal": "Unanswerable", "none": "<none>"},
    )
    fields = {"answer": "Result:", "end": "End", "refusal": "Unknown", "none": "[none]"}
    with own_prompts.active({"x": OwnPrompt("S", (), fields)}):
        assert prompt.read(text) == expected


# ------------------------------------------------------------------ parsers with other field names


def test_dualrag_other_field_names_schema_and_parsers_follow():
    reasoner, identifier = dualrag_prompts.REASONER, dualrag_prompts.IDENTIFIER
    with own_prompts.active({**renamed(reasoner), **renamed(identifier)}):
        schema = dualrag_prompts.thought_schema(0)
        assert (
            schema["required"] == list(schema["properties"]) == ["my_thought", "my_need_retrieve"]
        )
        thought = dualrag_prompts.parse_thought('{"my_thought": "So.", "my_need_retrieve": true}')
        assert (thought.text, thought.need_retrieve) == ("So.", True)
        schema = dualrag_prompts.entities_schema(2, 2)
        item = schema["properties"]["my_entities"]["items"]
        assert item["required"] == ["my_entity", "my_keywords"]
        text = '{"my_entities": [{"my_entity": "Ada", "my_keywords": ["Who?"]}]}'
        assert dualrag_prompts.parse_entities(text, 2, 2)[0] == (("Ada", ("Who?",)),)
        turns = dualrag_prompts.entity_messages("K", "q", ["t"], ["n"])
    assert turns[-1].text == "KNOWLEDGE~\nK\n\nQUESTION~ q\nREASONING~ t\nNAMES~ n"


def test_c2rag_other_field_names_schema_and_parsers_follow():
    limits = {"num_variants": 2, "max_constraints": 4}
    prompts = {**renamed(c2rag_prompts.PLANNER)}
    prompts["planner.fill"] = OwnPrompt("Find {variable}!", (), {"passages": "P:", "fact": "F:"})
    with own_prompts.active(prompts):
        schema = c2rag_prompts.plan_schema("Who wrote Emma?", **limits)
        row = schema["properties"]["my_constraints"]["items"]["anyOf"][0]
        assert set(row["properties"]) == {"my_head", "my_relation", "my_tail", "my_variants"}
        text = '{"my_constraints": [{"my_head": "Emma", "my_relation": "by", "my_tail": "?x"}]}'
        plan = c2rag_prompts.parse_plan(text, "Who wrote Emma?", **limits)
        assert plan.constraints[0][:3] == ("Emma", "by", "?x") and not plan.parse_errors
        system, turn = c2rag_prompts.fill_messages(plan.constraints[0], "?x", ["t"])
    assert (system.text, turn.text) == ("Find ?x!", "P:\nt\n\nF: Emma — by — ?x")


def test_kirag_own_examples_replace_demonstrations_and_stops_follow():
    demonstration = (Message("user", "Question: d"), Message("assistant", "Thought: <x; y; z>"))
    arguments = ("q?", ["<a; b; c>"], ["<d; e; f>"], "triple")
    own = renamed(kirag_prompts.CONSTRUCTOR)
    with own_prompts.active(own):
        turns = kirag_prompts.constructor_messages(*arguments, demonstrations=[demonstration])
        stops = kirag_prompts.CONSTRUCTOR.stops(kirag_prompts.STOP)
        text = "<a; b; c>. ANSWER~: Norway."
        completion = kirag_prompts.parse_completion(text, ["<a; b; c>"], (), "triple")
    assert [turn.text for turn in turns[1:]] == [
        "u", "a", "CONTEXT~\n<a; b; c>\n\nQUESTION~ q?", "THOUGHT~ <d; e; f>",
    ]  # fmt: skip
    assert stops == ("\nQUESTION~", "\nCONTEXT~")
    assert (completion.candidate, completion.answer) == (0, "Norway")
    bare = {"constructor": dataclasses.replace(own["constructor"], examples=())}
    with own_prompts.active(bare):
        turns = kirag_prompts.constructor_messages(*arguments, demonstrations=[demonstration])
    assert [turn.text for turn in turns[1:3]] == ["QUESTION~ d", "THOUGHT~ <x; y; z>"]


def test_extraction_other_field_names_change_the_hash_and_parse():
    passage = Passage("p", "Ule", "Ule flows.")
    before = extraction_prompts.prompt_hash(), dialects.prompt_hash("kirag")
    prompts = {
        **renamed(extraction_prompts.ENTITIES),
        **renamed(extraction_prompts.TRIPLES),
        **renamed(dialects.PROMPT),
    }
    with own_prompts.active(prompts):
        after = extraction_prompts.prompt_hash(), dialects.prompt_hash("kirag")
        turns = extraction_prompts.triple_messages(passage, ("Ule",))
        assert extraction_prompts.parse_entities('{"my_named_entities": ["Ule"]}', "stop") == (
            ("Ule",),
            None,
        )
        parsed, _ = extraction_prompts.parse_triples('{"my_triples": [["a", "b", "c"]]}', "stop")
    assert parsed == (("a", "b", "c"),) and set(before).isdisjoint(after)
    expected = 'TITLE~ Ule\nTEXT~ Ule flows.\nENTITIES~ {"my_named_entities": ["Ule"]}'
    assert turns[-1].text == expected


# ----------------------------------------------------------------------------------- refused files

FIELDS = """
[integrator.fields]
query = "Q:"
candidates = "C:"
history = "H:"
thought = "T:"
facts = "F:"
question = "N:"
end = "none"
"""
GOOD = f'[integrator]\nsystem = "S"\n{FIELDS}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[integrator", "is not valid TOML"),
        ("", "has no prompts; the prompts of cirag.py are integrator, reader.triple"),
        ("integrator = 1", r"integrator must be a table \[integrator\], not a value of type int"),
        ("[planner]\nsystem = 'S'", r"\[planner\] is not a prompt of cirag.py; its prompts are"),
        ("[reader]\nsystem = 'S'", "field reader.system is unknown; cirag.py has .reader.triple"),
        ("[reader.outline]\nsystem = 'S'", "field reader.outline is unknown; cirag.py has"),
        ("[reader]\ntriple = 'S'", "reader.triple must be a table .reader.triple., not a string"),
        ("[integrator]\nsytem = 'S'", "field integrator.sytem is unknown; a prompt has system"),
        (FIELDS, "field integrator.system is missing; a prompt needs system and fields"),
        ("[integrator]\nsystem = 'S'", "field integrator.fields is missing"),
        (GOOD.replace('"S"', "3"), "field integrator.system must be a string, not a value of type"),
        (GOOD.replace('"S"', '" "'), "field integrator.system is empty"),
        (GOOD.replace("history", "hist"), "field integrator.fields.hist is unknown; the fields"),
        (GOOD.replace('history = "H:"\n', ""), "field integrator.fields.history is missing"),
        (GOOD.replace('"T:"', "[1]"), "fields.thought must be a string, not a list"),
        (GOOD.replace('"T:"', '""'), "fields.thought is empty, but responses are parsed"),
        (GOOD.replace('"T:"', '"F:"'), "integrator.fields has 'F:' twice"),
        ("[integrator]\nsystem = 'S'\nfields = 1", "field integrator.fields must be a table, not"),
        (GOOD.replace('"S"', '"S"\nexamples = 1'), "field integrator.examples must be a list"),
        (GOOD.replace('"S"', '"S"\nexamples = [1]'), r"examples\[0\] must be a table"),
        (GOOD + "[[integrator.examples]]\nuser = 'u'", r"examples\[0\].assistant is missing"),
        (GOOD + "[[integrator.examples]]\nsystem = 'u'", r"examples\[0\].system is unknown"),
        (GOOD + "[[integrator.examples]]\nuser = 1\nassistant = 'a'", "user must be a string"),
    ],
)  # fmt: skip
def test_read_bad_file_is_refused_by_file_and_key(read, text, message):
    with pytest.raises(UserError, match=message) as error:
        read(text)
    assert "prompts.toml" in str(error.value) and "\n" not in str(error.value)


def test_read_placeholder_missing_is_refused(read):
    with pytest.raises(UserError, match=r"planner.fill.system must contain \{variable\}"):
        read('[planner.fill]\nsystem="S"\nfields={passages="P", fact="F"}', "c2rag.py")


def test_read_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file.*export_prompts"):
        own_prompts.read(tmp_path / "no.toml", render_of("cirag.py"), "cirag")
    (tmp_path / "latin.toml").write_bytes(b"[integrator]\nsystem = '\xe9'")
    with pytest.raises(UserError, match="latin.toml is not valid UTF-8"):
        own_prompts.read(tmp_path / "latin.toml", render_of("cirag.py"), "cirag")


def test_read_empty_label_and_no_examples_are_accepted(read):
    own = read(GOOD.replace('"H:"', '""'))["integrator"]
    assert own.fields["history"] == "" and own.examples == ()


@pytest.mark.parametrize(
    "text",
    ["plain", 'quote "', "back\\slash\nn", 'a\n"""\nb', 'ends\n"', "\ttab\n\x7f\x01", "é\n⟨"],
)
def test_toml_any_text_is_read_again(text):
    assert tomllib.loads(f"a = {own_prompts._toml(text)}") == {"a": text}


def test_docs_example_is_accepted_and_its_reply_parsed(read):
    page = (pathlib.Path(__file__).resolve().parents[3] / "docs/prompts.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    own = read(example, "cirag.py:paper")
    (_, reply) = own["integrator"].examples[0]
    with own_prompts.active(own):
        fact = Triple("Lindvik Museum", "located in", "Bergen")
        decision = cirag_prompts.parse_decision(reply, [fact])
        text = reading_prompts.PROMPTS["triple"].read("So.\nResult: Unknown")
    assert decision.kept == (fact,) and decision.next_query is None and not decision.parse_errors
    assert reading_prompts.parse_answer(text) == ("", False, None)
    with own_prompts.active(own):
        phrase = reading_prompts.PROMPTS["triple"].read("Result: Unknown Pleasures")
        question = cirag_prompts.parse_decision("### Next\nWhat has he done?", [fact]).next_query
    assert reading_prompts.parse_answer(phrase) == ("Unknown Pleasures", True, None)
    assert question == "What has he done?"
