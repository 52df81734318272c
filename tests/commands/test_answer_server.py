"""launch/answer.py with a server that dies and is replaced, and with a limited budget."""

import json
import pathlib
import re
import runpy
import threading

import pytest

from cirag_jax import cli
from cirag_jax.runtime.records import read_records
from tests import tiny
from tests.answering import VOLATILE, lines
from tests.commands import model_server

pytestmark = pytest.mark.slow
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]


def respond(text: str, wants_triples: bool) -> tuple[str, str] | int:
    """Responds for all roles.

    The integrator keeps the first two facts and asks one more query. The reader answers with the
    tail of the first fact. The extractor splits each sentence into its first word, its middle and
    its last word.
    """
    if "[[## fact_before_filter ##]]" in text:
        facts = json.loads(text.partition("[[## fact_before_filter ##]]")[2].split("\n\n")[0])
        kept = {"fact": facts["fact"][:2]}
        asks = "[[## Original Query ##]]" in text and kept["fact"]
        question = f"What of {kept['fact'][0][2]}?" if asks else "<no question>"
        decision = f"[[## fact_after_filter ##]]\n{json.dumps(kept)}\n\n[[## question ##]]\n"
        return f"[[## thought ##]]\nThese.\n\n{decision}{question}", "stop"
    if "\n\nQuery: " in text:
        found = re.search(r"'([^']+)'\)", text.partition(":\n")[2])
        return f"Thought: so.\nAnswer: {found[1] if found else 'Unanswerable'}", "stop"
    if wants_triples:
        body = text.partition("Text: ")[2].partition("\n")[0]
        found = re.findall(r"(\w+) ([^.]+) (\w+)\.", body)
        return json.dumps({"triples": found}), "stop"
    return json.dumps({"named_entities": []}), "stop"


class DyingServer:
    """Responds to ``count`` requests, then shuts the server down, so that connections break."""

    def __init__(self, count: int):
        self.left, self.lock = count, threading.Lock()
        self.server: model_server.ModelServer | None = None

    def __call__(self, text: str, wants_triples: bool) -> tuple[str, str] | int:
        with self.lock:
            self.left -= 1
            if self.left >= 0:
                return respond(text, wants_triples)
            if self.left == -1 and self.server is not None:
                self.server.shutdown()
                self.server.server_close()
            raise ConnectionAbortedError


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return tiny.model_folder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def answer(encoder, tmp_path, capsys, monkeypatch):
    """Runs the command with a server; returns the result and the rows of predictions."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def answer(server, workdir, **overrides):
        values = {"encoder.model": encoder, "data.limit": 3, "cirag.num_passages": 3}
        for role in ("integrator", "reader", "extractor"):
            values |= {
                f"{role}.backend": "openai", f"{role}.base_url": server.url, f"{role}.model": "m",
                f"{role}.max_retries": 0, f"{role}.max_concurrency": 1,
            }  # fmt: skip
        arguments = [f"--config.{key}={value}" for key, value in (values | overrides).items()]
        argv = ["answer.py", *arguments, f"--workdir={tmp_path / workdir}"]
        with pytest.raises(SystemExit) as end:
            cli.run(_MAIN, str(_ROOT / "configs/methods/cirag.py"), argv)
        captured = capsys.readouterr()
        assert end.value.code == 0, captured.err
        result = {k: v for k, v in json.loads(captured.out).items() if k not in VOLATILE}
        return result, lines(tmp_path / workdir / "predictions.jsonl")

    return answer


def texts(server):
    return [text for _, text in server.asked]


def test_answer_dead_server_run_resumes_without_repeats(answer):
    with model_server.model_server(respond) as server:
        whole, rows = answer(server, "whole")
        asked = texts(server)
        assert answer(server, "whole") == (whole, rows) and texts(server) == asked
    assert (whole["answered"], whole["failures"], whole["complete"]) == (3, 0, True)
    assert (
        whole["steps"] == 2
        and whole["granularities"]["triple"] == 3
        and whole["parse_errors"] == {}
    )
    assert whole["calls"]["generate"] == len(asked) == len(set(asked)) == 9
    assert whole["generated_tokens"] == 7 * 9 and whole["cached_tokens"] == 2 * 9
    assert all(row["answer"] and row["triples"] and row["error"] is None for row in rows)

    responder = DyingServer(5)
    with model_server.model_server(responder) as server:
        responder.server = server
        result, failed_rows = answer(server, "cut")
        first = texts(server)
    # The server responds to three first decisions and two second ones.
    assert result["failures"] == 3 and result["answered"] == 0
    assert sum(result["errors"].values()) == 3
    assert all("the connection failed" in error for error in result["errors"])
    assert all("the connection failed" in row["error"] for row in failed_rows)

    with model_server.model_server(respond) as server:  # at another address
        result, resumed_rows = answer(server, "cut")
        second = texts(server)
    assert (result, resumed_rows) == (whole, rows)
    assert first[:5] == asked[:5] and sorted(first[:5] + second) == sorted(asked)


def test_answer_online_extraction_stops_at_budget_and_resumes(answer, tmp_path):
    online = {"triples": "online", "cirag.max_steps": 1}
    with model_server.model_server(respond) as server:
        whole, rows = answer(server, "whole", **online)
        asked = texts(server)
    extraction = whole["extraction"]
    assert extraction["failures"] == 0
    extracting = [text for text in asked if text.startswith("Title: ")]
    assert len(extracting) == len(set(extracting)) == 2 * extraction["passages"]
    # The tokens of extraction are not included in the questions' tokens.
    assert extraction["generated_tokens"] == 7 * len(extracting)
    assert whole["generated_tokens"] == 7 * (len(asked) - len(extracting))
    calls = {"retrieve": 3, "extract": 3, "rank": 3, "generate": 6}
    assert {kind: n for kind, n in whole["calls"].items() if n} == calls
    assert whole["granularities"]["triple"] == 3 and all(row["triples"] for row in rows)
    found = {tuple(triple[:3]) for row in rows for triple in row["triples"]}
    records = list(read_records(tmp_path / "whole" / "extractions.sqlite"))
    assert found <= {tuple(t[:3]) for r in records for t in r.outcome["triples"]}

    with model_server.model_server(respond) as server:
        used = extraction["prompt_tokens"] + extraction["generated_tokens"]
        # A request reserves about 540 tokens and uses about 40, so extraction stops halfway.
        budget = {"extractor.budget_tokens": 600 + used // 2}
        stopped, stopped_rows = answer(server, "cut", **online, **budget)
        first = texts(server)
        assert not stopped["complete"] and (stopped["answered"], stopped["failures"]) == (0, 0)
        assert {row["error"] for row in stopped_rows} == {"not answered yet"}
        assert 0 < len(first) < len(extracting)
        assert stopped["extraction"]["failures"] == 0
        assert stopped["extraction"]["generated_tokens"] == 7 * len(first)
        # The budget covers all runs in the workdir, so no more passages are extracted.
        again, _ = answer(server, "cut", **online, **budget)
        assert not again["complete"] and again["extraction"] == stopped["extraction"]
        assert not any(text.startswith("Title: ") for text in texts(server)[len(first) :])
        result, resumed_rows = answer(server, "cut", **online)
    assert (result, resumed_rows) == (whole, rows)
    assert sorted(texts(server)) == sorted(asked)


def test_answer_budget_covers_all_runs_and_roles_of_a_model(answer):
    # A request uses about 100 tokens, and reserves ten times as many.
    budget = {f"{role}.budget_tokens": 1500 for role in ("integrator", "reader")}
    budget |= {f"{role}.max_tokens": 200 for role in ("integrator", "reader")}
    with model_server.model_server(respond) as server:
        stopped, _ = answer(server, "w", **budget)
        first = texts(server)
        assert 0 < len(first) < 9 and not stopped["complete"] and stopped["failures"] == 0
        again, _ = answer(server, "w", **budget)
        assert again == stopped and texts(server) == first
        more = {name: 10 * value if "budget" in name else value for name, value in budget.items()}
        whole, _ = answer(server, "w", **more)
    assert whole["complete"] and whole["answered"] == 3 and len(texts(server)) == 9
