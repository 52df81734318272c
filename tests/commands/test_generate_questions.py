"""Generation of questions: complete runs, resuming, bad input, with tiny models."""

import contextlib
import json
import pathlib
import re
import runpy
import sqlite3
import types

import pytest

from cirag_jax import cli, errors
from cirag_jax.commands import backends, identity, question_files
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.io import write_lines
from cirag_jax.runtime.records import JournalReader, read_records
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.types import Passage, Question
from tests import answering, tiny, tiny_decoder
from tests.grade.articles import Model, write_articles
from tests.grade.classifier import write_classifier

pytest.importorskip("sklearn")
pytest.importorskip("networkx")

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/generate_questions.py"))["main"]
_ANSWER = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]

FILES = ("questions.jsonl", "corpus.jsonl", "openie.jsonl", "paths.jsonl", "groups.jsonl",
         "review.jsonl", "sources.jsonl")  # fmt: skip

# Relations with rules: the maker, their birthplace, and its location.
CHAIN = (("Tide", "is a film by Ann", "director"), ("Ann", "comes from Old", "place of birth"),
         ("Old", "lies in West", "country"))  # fmt: skip


def test_contexts_question_with_few_matches_gets_first_passages():
    passages = {str(i): Passage(str(i), f"Title {i}", "Some text.") for i in range(5)}
    passages["4"] = Passage("4", "Title", "誰")
    database = types.SimpleNamespace(passages=passages)
    none = Question("q", "Who?", ("a",), supporting=("1",), hops=2)
    one = Question("r", "誰が？", ("a",), supporting=("1",), hops=2)
    found = question_files._with_contexts([none, one], database, 2)
    assert [question.context for question in found] == [("0", "1", "2"), ("0", "1", "4")]


def rules_folder(folder):
    """Writes passages and triples about five films."""
    folder.mkdir()
    passages, openie = [], []
    for name in ("Ula", "Orm", "Fenn", "Brum", "Dell"):
        for kind, verb, relation in CHAIN:
            head, tail = f"{kind} {name}", f"{verb.rpartition(' ')[2]} {name}"
            passages.append({"id": head, "title": head, "text": f"{kind} {name} {verb} {name}."})
            openie.append({"passage_id": head, "triples": [[head, relation, tail]]})
    for file, rows in (("corpus", passages), ("openie", openie)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(lines)
    return folder


@pytest.fixture
def model(monkeypatch):
    fake = Model()
    monkeypatch.setattr(backends, "open_backend", lambda config, spent: fake)
    monkeypatch.setattr(
        identity, "model_identity", lambda name: {"name": str(name)}
    )  # the weights do not exist
    return fake


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        "articles": write_articles(root / "articles"),
        "films": rules_folder(root / "films"),
        "classifier": write_classifier(root / "classifier"),
        "encoder": tiny.model_folder(root / "encoder"),
        "decoder": tiny_decoder.folder(root / "decoder", max_position_embeddings=4096),
    }


def arguments(folders, workdir, *more, preset="", documents="articles"):
    values = {
        "documents": folders[documents], "encoder.model": folders["encoder"], "in_flight": 3,
        "clusters.reduction": "pca", "clusters.most_components": 1,
    }  # fmt: skip
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    overrides += [f"--config.{override}" for override in more]
    config = "--config=configs/grade.py" + (preset and f":{preset}")
    return [config, *overrides, f"--workdir={workdir}"]


def execute(capsys, argv, status=0, main=_MAIN):
    """Runs the command; returns its result and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.run(main, "configs/grade.py", ["generate_questions.py", *argv], resumes=True)
    captured = capsys.readouterr()
    assert end.value.code == status, captured.err
    return (json.loads(captured.out) if status == 0 else {}), captured.err


def fails(capsys, argv):
    _, err = execute(capsys, argv, status=2)
    assert "Traceback" not in err
    return err.splitlines()[-1]


def same_bytes(one, other):
    return [name for name in FILES if (one / name).read_bytes() != (other / name).read_bytes()]


@pytest.fixture
def whole(model, folders, tmp_path, capsys):
    """The workdir and result of an uninterrupted run that uses a model in every step."""
    result, _ = execute(capsys, arguments(folders, tmp_path / "whole"))
    return tmp_path / "whole", result


# --------------------------------------------------------------------------------- complete runs


def test_result_counts_every_step_and_reason(whole, model):
    workdir, result = whole
    assert result["complete"] is True and result["failures"] == 0
    assert (result["documents"], result["sentences"], result["claims"]) == (5, 9, 6)
    assert result["dropped_sentences"] == {"opinion": 1, "inconsistent": 1, "empty": 1}
    assert (result["facts"], result["clusters"], result["groups"]) == (6, 1, {"always": 1})
    # Ule-Tarn-Osk-Fenn-Brum-Dunn, and Vell after Tarn.
    assert result["candidates"] == {"2": 5, "3": 3, "4": 2, "5": 1}
    # The article on Brum also names Tarn.
    assert result["passed_over"]["3"] == {"shortcut": 1}
    assert result["paths"] == {"2": 5, "3": 2, "4": 2, "5": 1}
    assert result["dropped_by_hops"] == {"2": {"no_question": 1}, "5": {"unclear": 1}}
    assert result["hops"] == {"2": 4, "3": 2, "4": 2} and result["questions"] == 8
    assert result["needs_link"]["2"] == {"exact": 25.0, "context": 0.0, "either": 25.0}
    assert result["needs_link"]["4"]["exact"] == 100.0
    roles = [role for role, _ in model.asked]
    assert result["calls"] == len(roles) == len(set(model.asked))
    assert result["tokens"]["validator"]["prompt_tokens"] == 5 * roles.count("validator")
    assert roles.count("asker") == 10 and roles.count("extractor") == 1


def test_wordings_equal_facts_are_worded_once(whole, model, folders, tmp_path, capsys):
    workdir, _ = whole
    num_requests = len(model.asked)
    hops = arguments(folders, tmp_path / "hops", "questions.kind=hops")
    result, err = execute(capsys, hops)
    # There are six facts, each worded once. Vell's fact has no wording, so no question ends there.
    assert (result["wordings"], result["wording_problems"]) == (6, {"no_phrase": 1})
    assert "wordings: at most 12 requests" in err
    assert [role for role, _ in model.asked[num_requests:]].count("asker") == 11
    assert result["passed_over"]["2"] == {"no_wording": 1}
    assert result["hops"] == {"2": 4, "3": 2, "4": 2}
    texts = {row["question"] for row in answering.lines(tmp_path / "hops" / "questions.jsonl")}
    assert "What is it that what Ule feeds governs?" in texts
    assert same_bytes(workdir, tmp_path / "hops") == ["questions.jsonl", "paths.jsonl"]
    # After a kill in any step, no request is repeated.
    execute(capsys, hops)
    assert [role for role, _ in model.asked[num_requests:]].count("asker") == 11


def test_output_folder_is_a_dataset(whole):
    workdir, _ = whole
    dataset = jsonl.read_dataset(workdir)
    rows = {row["question_id"]: row for row in answering.lines(workdir / "paths.jsonl")}
    assert len(dataset.questions) == 8 and len(dataset.corpus) == 5
    assert set(dataset.triples) == set(dataset.corpus)
    for question in dataset.questions:
        path = rows[question.id]
        assert question.hops == len(path["facts"]) == len(question.evidences or ())
        assert path["nodes"][-1] == question.answers[0]
        assert question.split == "test" and set(question.supporting or ()) <= set(question.context)
        stated = [
            sentences_of(dataset.corpus[p])[i] for p, i in question.supporting_sentences or ()
        ]
        assert stated == [fact["claim"] for fact in path["facts"]]
        assert [fact["chunk"] for fact in path["facts"]] == list(question.supporting or ())
        assert question.same_sentences is None  # every document is one chunk
    assert rows[None]["reason"]  # paths without a question are also listed
    sources = answering.lines(workdir / "sources.jsonl")
    assert {row["source"] for row in sources} == {"The Daily"}
    assert [c for row in sources for c in row["chunks"]] == list(dataset.corpus)
    (group,) = answering.lines(workdir / "review.jsonl")
    assert group["names"] == ["Osk", "Oskton"] and group["judgement"] is None
    assert group["claims"] == ["Tarn governs Osk.", "Oskton borders Fenn."]


def test_estimate_covers_remaining_requests(model, folders, tmp_path, capsys):
    def estimate(*more):
        _, err = execute(capsys, arguments(folders, tmp_path, *more))
        lines = re.findall(r"(\w+): at most (\d+) requests, about ([\d,]+) prompt tokens", err)
        return {step: (int(count), int(tokens.replace(",", ""))) for step, count, tokens in lines}

    first = estimate()
    # Nine sentences with three roles each; ten paths with two roles each.
    counts = {step: count for step, (count, _) in first.items()}
    assert counts == {"claims": 27, "triples": 1, "equivalence": 1, "questions": 20}
    assert all(tokens > 30 * count for count, tokens in first.values())
    assert estimate() == {}
    again = estimate("questions.validation=model")
    assert again.keys() == {"questions"} and again["questions"][0] >= 20


def test_classifier_filters_sentences_before_claims(whole, model, folders, tmp_path, capsys):
    """It takes the place of the prompt, and gives the same questions here."""

    def argv(*more):
        classifier = f"claims.classifier={folders['classifier']}"
        return arguments(folders, tmp_path / "c", classifier, *more)

    estimate, err = execute(capsys, argv("estimate_only=true"))
    assert (estimate["step"], estimate["requests"]) == ("claims", 16)  # eight facts, two roles
    assert "classifying 9 sentences" in err
    model.asked.clear()
    result, _ = execute(capsys, argv())
    assert (result["sentences"], result["claims"]) == (9, 6)
    assert result["dropped_sentences"] == {"opinion": 1, "inconsistent": 1, "empty": 1}
    roles = [role for role, _ in model.asked]
    assert "filter" not in roles and roles.count("claimer") == 8
    assert not same_bytes(whole[0], tmp_path / "c")
    _, err = execute(capsys, argv())
    assert "classifying" not in err and len(model.asked) == len(roles)
    message = fails(capsys, argv("claims.label=LABEL_0"))
    assert 'was started with classifier.label="LABEL_1", not "LABEL_0"' in message
    assert "was started with classifier" in fails(capsys, arguments(folders, tmp_path / "c"))


def test_classifier_bad_label_or_folder_is_refused(folders, tmp_path, capsys):
    rules = {"preset": "rules", "documents": "films"}
    classifier = f"claims.classifier={folders['classifier']}"
    argv = arguments(folders, tmp_path / "w", classifier, "claims.label=fact", **rules)
    assert "has 2 labels (LABEL_0, LABEL_1), but not 'fact'" in fails(capsys, argv)
    missing = f"claims.classifier={tmp_path / 'missing'}"
    argv = arguments(folders, tmp_path / "v", missing, **rules)
    assert "missing" in fails(capsys, argv)


def test_classifier_without_facts_is_refused(folders, tmp_path, capsys):
    classifier = f"claims.classifier={folders['classifier']}"
    rules = {"preset": "rules", "documents": "films"}
    argv = arguments(folders, tmp_path / "w", classifier, "claims.label=LABEL_0", **rules)
    assert "became a claim (15 opinion)" in fails(capsys, argv)


def test_estimate_only_stops_at_first_request(whole, model, folders, tmp_path, capsys):
    def files(workdir):
        return {path.name: path.read_bytes() for path in workdir.iterdir()}

    def estimated(workdir, *more):
        result, err = execute(capsys, arguments(folders, workdir, "estimate_only=true", *more))
        return result, err

    num_requests, before = len(model.asked), files(whole[0])
    result, err = estimated(tmp_path / "w")
    assert result == {"documents": 5, "step": "claims", "requests": 27, "complete": False,
                      "prompt_tokens": result["prompt_tokens"]}  # fmt: skip
    assert result["prompt_tokens"] > 30 * 27 and "claims: at most 27 requests, about " in err
    assert "later steps cannot be estimated" in err
    assert list(files(tmp_path / "w")) == [".lock"]
    by_rules = ("claims.filter=rules", "claims.kind=rules")
    assert estimated(tmp_path / "w", *by_rules)[0]["step"] == "triples"
    assert list(files(tmp_path / "w")) == [".lock"]
    # Requests with an answer in the workdir are not counted.
    assert estimated(whole[0], "questions.validation=model")[0]["step"] == "questions"
    result, err = estimated(whole[0], "context=0")  # this would change questions.jsonl
    assert (result["step"], result["requests"]) == (None, 0) and "no requests are left" in err
    argv = arguments(folders, whole[0], "estimate_only=true", "seed=1")
    assert f"{whole[0] / JOURNAL} was started with seed=0, not 1" in fails(capsys, argv)
    assert files(whole[0]) == before and len(model.asked) == num_requests


def test_estimate_damaged_journal_is_named(whole, folders, capsys):
    file = whole[0] / JOURNAL
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        changed = db.execute("UPDATE programs SET outcome = '{'")
        assert changed.rowcount
    message = fails(capsys, arguments(folders, whole[0], "estimate_only=true"))
    assert message.startswith(f"generate_questions.py: {file}: the result of '")
    assert " is damaged (" in message


def test_cache_two_runs_share_responses(model, folders, tmp_path, capsys):
    cache = f"cache={tmp_path / 'responses.sqlite'}"
    first, _ = execute(capsys, arguments(folders, tmp_path / "a", cache))
    num_requests = len(model.asked)
    second, _ = execute(capsys, arguments(folders, tmp_path / "b", cache))
    assert len(model.asked) == num_requests and same_bytes(tmp_path / "a", tmp_path / "b") == []
    assert second["questions"] == first["questions"]
    # Responses of another model are not shared.
    more = (cache, "llm.dtype=bfloat16")
    execute(capsys, arguments(folders, tmp_path / "c", *more))
    assert len(model.asked) == 2 * num_requests


# ------------------------------------------------------------------------------ judged by a person


def test_review_judgements_survive_rerun(whole, folders, capsys):
    workdir, first = whole
    file = workdir / "review.jsonl"
    assert "review" not in first
    write_lines(file, [{**row, "judgement": False} for row in answering.lines(file)])
    judged = file.read_bytes()
    result, err = execute(capsys, arguments(folders, workdir))
    assert result["review"] == {"always": {"judged": 1, "right": 0.0}}
    assert file.read_bytes() == judged and "0.0 % of 1 always groups are right" in err
    # A group that is no longer sampled is not counted, but is kept.
    result, err = execute(capsys, arguments(folders, workdir, "review=0"))
    assert "review" not in result and file.read_bytes() == judged
    assert "1 judged groups, no longer in the sample, are kept at the end" in err
    result, _ = execute(capsys, arguments(folders, workdir))
    assert result["review"]["always"]["judged"] == 1 and file.read_bytes() == judged


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"judgement": "yes"}, ":2: field 'judgement' must be"),
        ({"judgment": True}, ":2: field 'judgment' is unknown; did you mean 'judgement'"),
        ({"kind": "exact"}, ":2: field 'kind' cannot be used: invalid enum value 'exact'"),
        ({"names": "Osk"}, ":2: field 'names' must be a list, not a string"),
        (None, ":2: invalid or truncated JSON"),
    ],
)
def test_review_malformed_file_is_refused_and_kept(line, message, model, folders, tmp_path, capsys):
    good = {"names": ["Osk"], "kind": "always", "claims": [], "judgement": True}
    text = "{" if line is None else json.dumps({**good, **line})
    (tmp_path / "review.jsonl").write_text(f"{json.dumps(good)}\n{text}\n")
    before = (tmp_path / "review.jsonl").read_bytes()
    assert f"review.jsonl{message}" in fails(capsys, arguments(folders, tmp_path))
    assert (tmp_path / "review.jsonl").read_bytes() == before and model.asked == []


def test_review_equal_names_are_matched_by_claims():
    def row(claims, judgement=None, kind="context", names=("A", "B")):
        return question_files.Reviewed(names, kind, (claims,), judgement)

    before = [row("x", False), row("y", True), row("z"), row("w", True, "always")]
    sample = [
        row("y"),
        row("new", names=("B", "A")),
        row("x", names=("C",)),
        row("z", kind="always"),
    ]
    rest = question_files._carry_over(before, sample)
    assert [row.judgement for row in sample] == [True, False, None, True] and rest == []
    assert question_files._review_counts(sample) == {
        "review": {"always": {"judged": 1, "right": 1.0}, "context": {"judged": 2, "right": 0.5}}
    }


def test_needs_link_counts_question_with_both_kinds_once():
    def row(links, name="q"):
        return {"question_id": name, "hops": 3, "links": links}

    rows = [row(["exact", "context"]), row(["context", "stated"]), row(["stated", "stated"]),
            row(["exact", "exact"]), row(["context", "context"], name=None)]  # fmt: skip
    wanted = {"exact": 50.0, "context": 25.0, "either": 75.0}
    assert question_files._needs_link(rows) == {"3": wanted}


def test_questions_duplicates_are_dropped(model, folders, tmp_path, capsys):
    model.asker = lambda shown: "Question: What is it that Ule feeds? | Answer: Dunn"
    more = ("questions.validation=off", "paths.hops=(4,5)")
    result, _ = execute(capsys, arguments(folders, tmp_path, *more))
    assert result["questions"] == 1 and result["dropped_questions"] == {"asked_twice": 2}


def test_evidence_sentence_in_two_chunks_counts_in_both(model, folders, tmp_path, capsys):
    facts = ("Ule feeds Tarn.", "Tarn governs Osk.")
    texts = [f"It says nothing. {fact} It says nothing." for fact in facts]
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "documents.jsonl").write_text(
        "".join(json.dumps({"title": text.split()[3], "text": text}) + "\n" for text in texts)
    )
    sizes = ("chunks.least=3", "chunks.most=6", "chunks.overlap=3")
    execute(capsys, arguments({**folders, "articles": documents}, tmp_path / "w", *sizes))
    dataset = jsonl.read_dataset(tmp_path / "w")
    (question,) = dataset.questions
    same, gold = question.same_sentences or (), question.supporting or ()
    stated = [[sentences_of(dataset.corpus[p])[i] for p, i in places] for places in same]
    assert stated == [[fact, fact] for fact in facts]
    others = [p for places in same for p, _ in places if p not in gold]
    assert recall_at(others, gold, 2) == 0.0
    assert recall_at(others, gold, 2, passage_substitutes(question)) == 1.0


def test_chunks_other_size_sends_no_requests(whole, model, folders, capsys):
    workdir, first = whole
    before = len(model.asked)
    sizes = ("chunks.least=1", "chunks.most=3", "chunks.overlap=0")
    result, _ = execute(capsys, arguments(folders, workdir, *sizes))
    assert len(model.asked) == before and result["questions"] == first["questions"]
    assert result["chunks"] == 9 > first["chunks"]
    dataset = jsonl.read_dataset(workdir)
    assert {p for q in dataset.questions for p in q.supporting or ()} <= set(dataset.corpus)


def test_settings_hard_clusters_and_no_equivalence_change_counts(
    whole, model, folders, tmp_path, capsys
):
    hard, _ = execute(capsys, arguments(folders, tmp_path / "h", "clusters.soft=false"))
    assert hard["questions"] == whole[1]["questions"] and hard["claims_in_several_clusters"] == 0
    off, err = execute(capsys, arguments(folders, tmp_path / "o", "equivalence.kind=off"))
    assert off["candidates"] == {"2": 4, "3": 1, "4": 0, "5": 0} and off["clusters"] == 0
    assert "no questions of 4 hops: 0 paths" in err and off["hops"].get("4") is None


# ----------------------------------------------------------------------------- kills and faults


def test_resume_after_kill_at_any_write_gives_same_bytes(
    whole, model, folders, tmp_path, capsys, monkeypatch
):
    workdir, _ = whole
    num_requests = len(model.asked)
    count, killed = 0, set()
    real = {name: getattr(Journal, name) for name in ("record", "close_program")}

    def kill_in(name):
        def write(self, key, *arguments):
            nonlocal count
            count += 1
            place = name, getattr(key, "program", key).partition("-")[0]
            if place not in killed or count % 20 == 0:
                killed.add(place)
                raise KeyboardInterrupt
            real[name](self, key, *arguments)

        return write

    for name in real:
        monkeypatch.setattr(Journal, name, kill_in(name))
    for _ in range(60):
        with pytest.raises(SystemExit) as end:
            cli.run(_MAIN, "", ["generate_questions.py", *arguments(folders, tmp_path / "w")])
        capsys.readouterr()
        if end.value.code == 0:
            break
        assert end.value.code == 130 and not (tmp_path / "w" / "questions.jsonl").exists()
    assert end.value.code == 0
    asking = ("claim", "triples", "same", "question")
    assert killed == {(name, step) for name in real for step in asking} | {
        ("close_program", "clusters")
    }
    assert same_bytes(workdir, tmp_path / "w") == []
    # A kill loses the unrecorded response and those of its batch.
    assert len(set(model.asked)) == num_requests


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The workdir of an uninterrupted run that uses rules in every step."""
    return tmp_path_factory.mktemp("rules")


@pytest.mark.parametrize("step", ["claim", "clusters", "same", "question"])
def test_resume_after_signal_in_step(step, uninterrupted, folders, tmp_path, command):
    argv = arguments(folders, tmp_path / "w", preset="rules", documents="films")
    if not (uninterrupted / "result.json").exists():
        first = command("generate_questions.py", *argv[:-1], f"--workdir={uninterrupted}")
        assert first.returncode == 0, first.stderr
    records = read_records(uninterrupted / JOURNAL)
    steps = [record.id.partition("-")[0] for record in records]
    # Programs that use only rules send no requests; each writes only its end.
    ends = {"claim": 3, "clusters": steps.count("claim") + 1, "question": len(steps) - 1}
    ends["same"] = ends["clusters"] + 1
    stopped = command(
        "generate_questions.py", *argv, hooks=[["signal_at_write", ends[step], "before"]]
    )
    assert stopped.returncode == -9 and not (tmp_path / "w" / "questions.jsonl").exists()
    resumed = command("generate_questions.py", *argv)
    assert resumed.returncode == 0, resumed.stderr
    assert same_bytes(uninterrupted, tmp_path / "w") == []


def test_stop_by_budget_or_deadline_is_clean(whole, model, folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path / "w")
    result, err = execute(capsys, [*argv, "--config.stop_after_minutes=1e-9"])
    assert result["complete"] is False and "run the same command to resume" in err
    for budget in (9, 12, 10):
        model.left = budget
        result, _ = execute(capsys, argv)
        assert result["complete"] is False
    model.left = 10**6
    result, _ = execute(capsys, argv)
    assert result["complete"] is True and same_bytes(whole[0], tmp_path / "w") == []


def test_failed_requests_are_counted_and_retried(whole, model, folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path / "w")
    model.broken = "validator"
    message = fails(capsys, argv)
    assert "none of the 10 paths became a question (1 no_question, 9 request_failed)" in message
    model.broken = ""
    result, _ = execute(capsys, argv)
    assert result["failures"] == 0 and same_bytes(whole[0], tmp_path / "w") == []


# --------------------------------------------------------------------------------- tiny decoder


@pytest.mark.parametrize(
    ("more", "message", "role"),
    [
        ((), r"none of the 9 sentences of .* became a claim \(9 no_verdict\)", "filter"),
        (("claims.filter=off",), r"became a claim \(9 cut\)", "claimer"),
        (
            ("claims.filter=rules", "claims.kind=rules"),
            r"none of the 8 claims gave a triple \(2 no_lines, 2 truncated\)",
            "extractor",
        ),
    ],
)
def test_random_decoder_ends_with_one_sentence(more, message, role, folders, tmp_path, capsys):
    limits = ("claims.max_tokens=6", "triples.max_tokens=6")
    decoder = (f"llm.model={folders['decoder']}", "llm.batch_size=4", "llm.prefix_tokens=0")
    argv = arguments(folders, tmp_path, *limits, *decoder, *more, preset="small")
    _, err = execute(capsys, argv, status=2)
    assert re.search(message, err.splitlines()[-1])
    with JournalReader(tmp_path / JOURNAL) as book:
        totals = book.totals()
    assert list(totals.usage) == [role]


def test_random_decoder_end_to_end(folders, tmp_path, capsys):
    """A random decoder writes no usable question, and rules write 15 in the same workdir."""
    decoder = (
        *(f"llm.model={folders['decoder']}", "llm.batch_size=4", "llm.prefix_tokens=0"),
        *("equivalence.kind=model", "equivalence.max_tokens=6", "questions.max_tokens=6"),
    )
    argv = arguments(folders, tmp_path / "g", *decoder, preset="rules", documents="films")
    for more, why in (("kind=model", "15 cut"), ("validation=both", "15 no_verdict")):
        _, err = execute(capsys, [*argv, f"--config.questions.{more}"], status=2)
        assert f"none of the 15 paths became a question ({why})" in err
    result, _ = execute(capsys, argv)
    assert result["hops"] == {"2": 10, "3": 5} and result["equivalence_problems"]["truncated"] > 0
    assert set(result["tokens"]) == {"asker", "matcher", "validator"}
    generated = {**folders, "data": tmp_path / "g"}
    answers = answering.arguments(generated, tmp_path / "a", method="direct")
    answers = [argument for argument in answers if "data.split" not in argument]
    answered, _ = execute(capsys, [*answers, "--config.data.limit=2"], main=_ANSWER)
    assert answered["num_questions"] == 2 and "f1" in answered


# ---------------------------------------------------------------------------------------- bad input


def test_documents_without_facts_are_refused(model, folders, tmp_path, capsys):
    (tmp_path / "documents.jsonl").write_text('{"text": "Nobody likes it! It says nothing."}\n')
    argv = arguments({**folders, "articles": tmp_path}, tmp_path / "w")
    message = fails(capsys, argv)
    assert message.endswith("became a claim (1 empty, 1 opinion).")


def test_chunks_duplicate_ids_are_refused_before_requests(model, folders, tmp_path, capsys):
    rows = [{"id": "a", "text": "Ule feeds Tarn. Tarn governs Osk."},
            {"id": "a@1", "text": "Osk borders Fenn."}]  # fmt: skip
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("chunks.least=1", "chunks.most=3", "chunks.overlap=0")
    argv = arguments({**folders, "articles": tmp_path}, tmp_path / "w", *sizes)
    assert "the documents 'a' and 'a@1' both have a chunk 'a@1'; give one" in fails(capsys, argv)
    assert model.asked == []


def test_paths_cut_sources_are_counted(whole, folders, capsys):
    workdir, first = whole
    assert first["cut_sources"] == 0
    result, err = execute(capsys, arguments(folders, workdir, "paths.most_per_source=4"))
    assert result["cut_sources"] == 2 and result["candidates"] == {"2": 5, "3": 3, "4": 0, "5": 0}
    assert err.count("WARNING: 2 nodes start more than 4 paths each") == 1


def test_paths_none_found_is_one_sentence(model, folders, tmp_path, capsys):
    message = fails(capsys, arguments(folders, tmp_path, "paths.hops=(7,)"))
    assert "6 facts of 6 claims have no usable path of 7 hops" in message


def test_groups_merging_everything_is_counted(model, folders, tmp_path, capsys):
    model.matcher = lambda shown: '[Ule|Tarn|Osk|Oskton|Fenn|Brum|Dunn|Vell|"always"]'
    more = ("equivalence.most_names=4",)
    result, _ = execute(capsys, arguments(folders, tmp_path, *more))
    assert result["group_problems"] == {"merges_too_much": 1} and result["questions"] == 4


def test_documents_with_equal_titles_are_dropped(model, folders, tmp_path, capsys):
    lines = (folders["articles"] / "documents.jsonl").read_text().splitlines()
    other = json.dumps({"title": "Ule", "text": "Ule owns Dell."})
    (tmp_path / "documents.jsonl").write_text("\n".join([*lines, lines[0], other]))
    argv = arguments({**folders, "articles": tmp_path}, tmp_path / "w")
    result, err = execute(capsys, argv)
    assert result["dropped_documents"] == {"repeated": 1, "same_title": 1}
    assert result["documents"] == 6 and "6 documents (1 repeated, 1 same_title)" in err


def test_rules_without_triples_are_refused(folders, tmp_path, capsys):
    message = fails(capsys, arguments(folders, tmp_path, preset="rules"))
    assert message.endswith("has no openie.jsonl; use --config.triples.kind=model to extract "
                            "triples with a language model.")  # fmt: skip


def test_resume_other_model_settings_are_refused(whole, folders, capsys):
    argv = arguments(folders, whole[0], "llm.dtype=bfloat16")
    assert 'was started with llm.dtype="float32", not "bfloat16"' in fails(capsys, argv)


def test_resume_rules_other_encoder_is_refused(folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path, preset="rules", documents="films")
    execute(capsys, argv)
    message = fails(capsys, [*argv, "--config.encoder.passage_max_length=7"])
    assert "was started with encoder.passage_max_length=" in message and "not 7" in message


@pytest.mark.parametrize("field", ["chunks.least=0", "paths.kind=long", "review=-1", "in_flight=0"])
def test_settings_bad_values_are_refused(field, folders, tmp_path, capsys):
    assert f"config.{field.partition('=')[0]}" in fails(capsys, arguments(folders, tmp_path, field))


def test_missing_library_is_named(whole, folders, tmp_path, capsys, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(errors.importlib, "import_module", missing)
    message = fails(capsys, arguments(folders, tmp_path / "w"))
    assert message.endswith("is not installed; run: pip install -r requirements-grade.txt")
