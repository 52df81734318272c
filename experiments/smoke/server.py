"""An OpenAI-compatible server that answers the prompts of the papers' systems by rules.

    python experiments/smoke/server.py [--port=0]

Prints its URL. It serves experiments/smoke/files.py's world to ``--scale=smoke``: every reply
depends only on the prompt. Two kinds of mistakes are built in, so that every stage can lose
something: the extractor misses some facts, and the teacher writes some replies that do not parse.

A *rule* is a function from the messages of a request to a reply, or to None for a prompt of another
role. `RULES` lists them. A prompt without a rule gets status 400. To serve another method, add a
rule.
"""

import argparse
import ast
import http.server
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.smoke.files import FACT, chain_of, question_of

Messages = Sequence[Mapping[str, str]]
Rule = Callable[[Messages], str | None]
Triples = list[tuple[str, str, str]]


def _drawn(text: str, share: float) -> bool:
    """Draws a share of all texts; the same text is always drawn or never."""
    return zlib.crc32(text.encode()) % 1000 < 1000 * share


def facts_in(text: str) -> Triples:
    """Returns the facts that a text states, as (head, relation, tail)."""
    return [(head, relation, tail) for relation, head, tail in FACT.findall(text)]


def follow(question: str, triples: Iterable[tuple[str, ...]]) -> tuple[Triples, list[str], str]:
    """Looks up a question's relations in triples, as far as they go.

    Returns:
      The triples that were used, the relations that are left, and the last entity.
    """
    tails: dict[tuple[str, str], tuple[str, str, str]] = {}
    for head, relation, tail in triples:
        tails.setdefault((head.lower(), relation.lower()), (head, relation, tail))
    chain = chain_of(question)
    if chain is None:
        return [], ["?"], ""
    relations, entity = chain
    used = []
    while relations and (triple := tails.get((entity.lower(), relations[0]))):
        used.append(triple)
        relations, entity = relations[1:], triple[2]
    return used, relations, entity


# ------------------------------------------------------------------------------------------- rules


def extraction(messages: Messages) -> str | None:
    """Lists the entities or the triples of a passage (dialect ``openie``)."""
    last = messages[-1]["content"]
    if not last.startswith("Title: ") or "JSON" not in messages[0]["content"]:
        return None
    facts = [fact for fact in facts_in(last) if not _drawn(" ".join(fact), 0.06)]
    if "\nNamed entities: " in last:
        return json.dumps({"triples": facts})
    names = dict.fromkeys(name for head, _, tail in facts for name in (head, tail))
    return json.dumps({"named_entities": list(names)})


def triple_lines(messages: Messages) -> str | None:
    """Lists the triples of a passage, one per line (dialects ``kirag`` and ``trace``)."""
    last = messages[-1]["content"]
    if not last.startswith("Title: ") or "<head; relation; tail>" not in messages[0]["content"]:
        return None
    facts = [fact for fact in facts_in(last) if not _drawn(" ".join(fact), 0.06)]
    return "\n".join(f"<{'; '.join(fact)}>" for fact in facts)


_QUERY = "[[## Original Query ##]]\n"
_FACTS = re.compile(r'\{"fact": \[.*\]\}')


def integration(messages: Messages) -> str | None:
    """Decides on the candidates of a round of CIRAG (format ``multi_turn``)."""
    if len(messages) < 2 or _QUERY not in messages[1]["content"]:
        return None
    question = messages[1]["content"].partition(_QUERY)[2].partition("\n")[0]
    if _drawn(question, 0.1):
        return "I would rather not decide."
    kept: Triples = []
    for message in messages:
        if message["role"] == "assistant":
            kept += _listed(message["content"])
    candidates = _listed(messages[-1]["content"])
    used, left, entity = follow(question, [*kept, *candidates])
    new = [list(triple) for triple in used if triple not in kept]
    found = "; ".join(f"the {relation} of {head} is {tail}" for head, relation, tail in new)
    return (
        f"[[## thought ##]]\n{found or 'No fact helps'}.\n\n"
        f"[[## fact_after_filter ##]]\n{json.dumps({'fact': new})}\n\n"
        f"[[## question ##]]\n{question_of(left, entity) if left else '<no question>'}"
    )


def _listed(text: str) -> Triples:
    match = _FACTS.search(text)
    return [tuple(fact) for fact in json.loads(match[0])["fact"]] if match else []


_CHAIN = re.compile(r"^Context:\n(.*)\n\nQuestion: (.*)\nThought:(.*)$", re.DOTALL)
_TRIPLE = re.compile(r"<([^;<>]*); ([^;<>]*); ([^;<>]*)>")


def construction(messages: Messages) -> str | None:
    """Completes a chain of triples (KiRAG's constructor)."""
    match = _CHAIN.match(messages[-1]["content"])
    if match is None:
        return None
    chain = _TRIPLE.findall(match[3])
    used, left, entity = follow(match[2], [*chain, *_TRIPLE.findall(match[1])])
    steps = ", ".join(f"<{'; '.join(fact)}>" for fact in used if fact not in chain)
    return steps if left else f"{steps}. So the answer is: {entity}.".lstrip(". ")


_READING = re.compile(r"^(Triples|Sentences|Passages):\n(.*)\n\nQuery: (.*)$", re.DOTALL)


def reading(messages: Messages) -> str | None:
    """Answers from triples or sentences, or from the first two of the passages."""
    match = _READING.match(messages[-1]["content"])
    if match is None:
        return None
    lines = match[2].splitlines()
    if match[1] == "Triples":
        triples = [ast.literal_eval(line) for line in lines]
    else:
        if match[1] == "Passages":
            lines = lines[:4]  # a title and a text for each
        triples = facts_in("\n".join(lines))
    used, left, entity = follow(match[3], triples)
    facts = "; ".join(f"{head}, {relation}: {tail}" for head, relation, tail in used)
    return f"Thought: {facts or 'nothing'}.\nAnswer: {'Unanswerable' if left else entity}"


def short_reading(messages: Messages) -> str | None:
    """Answers from documents in one line (FlashRAG's prompt, of NativeRAG and other baselines)."""
    text, question = messages[0]["content"], messages[-1]["content"]
    if "Doc 1 (Title: " not in text or not question.startswith("Question: "):
        return None
    used, left, entity = follow(question, facts_in(text))
    return "I do not know" if left else entity


_DOCUMENTS = re.compile(r"^Context:\n(.*)\n\nQuestion: (.*)\nThe answer is:$", re.DOTALL)


def document_reading(messages: Messages) -> str | None:
    """Answers from passages in one line (KiRAG's reader)."""
    match = _DOCUMENTS.match(messages[-1]["content"])
    if match is None:
        return None
    used, left, entity = follow(match[2], facts_in(match[1]))
    return "I do not know" if left else entity


RULES: list[Rule] = [
    extraction,
    triple_lines,
    integration,
    construction,
    reading,
    short_reading,
    document_reading,
]

# ------------------------------------------------------------------------------------------ server


def reply(messages: Messages) -> str | None:
    """Returns the reply of the first rule that knows the prompt."""
    return next((text for rule in RULES if (text := rule(messages)) is not None), None)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests for chat completions and for the list of models."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answers a request for a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = reply(body["messages"])
        if text is None:
            start = body["messages"][0]["content"][:80]
            error = {"message": f"no rule for the prompt {start!r}", "code": None}
            return self._send(400, {"error": error})
        prompt = sum(len(message["content"]) for message in body["messages"]) // 4
        usage = {"prompt_tokens": prompt, "completion_tokens": len(text) // 4}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        usage["total_tokens"] = sum(usage.values())
        return self._send(200, {**answer, "choices": [choice], "usage": usage})

    def do_GET(self) -> None:
        """Lists the only model."""
        models = [{"id": "smoke", "object": "model", "created": 1, "owned_by": "rules"}]
        self._send(200, {"object": "list", "data": models})

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args) -> None:
        """Logs nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python experiments/smoke/server.py")
    parser.add_argument("--port", type=int, default=0, help="0 is a free port")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()
