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

from cirag_jax.io import standard_streams
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


# ----------------------------------------------------------------------------------------- DualRAG


def _dualrag_state(text: str) -> tuple[Triples, list[str], str]:
    """Follows the question of a turn through the facts in its outline."""
    knowledge, _, rest = text.partition("\n\nQuestion: ")
    return follow(rest.partition("\n")[0], facts_in(knowledge))


def reasoner(messages: Messages) -> str | None:
    """Reasons from the outline, and asks for retrieval while a fact is missing."""
    if '"need_retrieve"' not in messages[0]["content"]:
        return None
    used, left, entity = _dualrag_state(messages[-1]["content"])
    known = " ".join(f"The {relation} of {head} is {tail}." for head, relation, tail in used)
    thought = f"The {left[0]} of {entity} is missing." if left else f"So the answer is {entity}."
    return json.dumps({"thought": f"{known} {thought}".strip(), "need_retrieve": bool(left)})


def next_sentence(messages: Messages) -> str | None:
    """Writes the next sentence of the reasoning (DualRAG without its reasoner)."""
    if "next sentence" not in messages[0]["content"] or not _has_outline(messages):
        return None
    text = messages[-1]["content"]
    _, left, entity = _dualrag_state(text)
    if left and not _drawn(text, 0.2):  # Without the reasoner, it sometimes ends too early.
        return f"{entity} has a {left[0]}."
    return f"So the answer is: {entity}."


def _has_outline(messages: Messages) -> bool:
    return messages[-1]["content"].startswith("Knowledge:\n")


def identifier(messages: Messages) -> str | None:
    """Names the entity whose fact is missing, with a query."""
    if '"keywords"' not in messages[0]["content"]:
        return None
    _, left, entity = _dualrag_state(messages[-1]["content"])
    query = question_of(left[:1], entity)
    return json.dumps({"entities": [{"entity": entity, "keywords": [query]}]})


def summarizer(messages: Messages) -> str | None:
    """Repeats what the documents state about the entity; misses some of them."""
    text = messages[-1]["content"]
    if not text.startswith("Documents:\n") or "\nSearched: " not in text:
        return None
    documents, _, rest = text.partition("\n\nQuestion: ")
    entity = re.search(r"\nEntity: (.*)", rest)
    facts = [
        f"The {relation} of {head} is {tail}."
        for head, relation, tail in facts_in(documents)
        if (entity is None or head == entity[1]) and not _drawn(f"{head}, {relation}", 0.1)
    ]
    return " ".join(facts) or "None"


def outline_reading(messages: Messages) -> str | None:
    """Answers from the outline and the reasoning."""
    if not _has_outline(messages) or "Finish the reasoning" not in messages[0]["content"]:
        return None
    text = messages[-1]["content"]
    _, left, entity = _dualrag_state(text)
    if "#### Documents" in text and _drawn(text, 0.2):  # Long documents distract from the answer.
        left = ["?"]
    return "It is not known.\nAnswer: unknown" if left else f"So it is.\nAnswer: {entity}"


# ------------------------------------------------------------------------------------------- C2RAG


def planner(messages: Messages) -> str | None:
    """Turns a question into a chain of constraints; one plan in ten is not JSON."""
    if '{"constraints": ' not in messages[0]["content"]:
        return None
    question = messages[-1]["content"]
    chain = chain_of(question)
    if chain is None or _drawn(question, 0.1):
        return "I have no plan."
    relations, head = chain
    rows = []
    for number, relation in enumerate(relations):
        tail = f"?unknown{'abcdef'[number]}"
        wordings = [f"{relation} of", f"has {relation}"]
        rows.append({"head": head, "relation": relation, "tail": tail, "variants": wordings})
        head = tail
    return json.dumps({"constraints": rows})


def blocks_reading(messages: Messages) -> str | None:
    """Answers from the evidence blocks of constraints."""
    text = messages[-1]["content"]
    if not text.startswith("Question: ") or "head — relation — tail" not in messages[0]["content"]:
        return None
    used, left, entity = follow(text.partition("\n")[0], facts_in(text))
    return "I do not know" if left else entity


def filling(messages: Messages) -> str | None:
    """Reads the name of an unknown from passages."""
    text = messages[-1]["content"]
    if not text.startswith("Passages:\n") or "\n\nFact: " not in text:
        return None
    passages, _, fact = text.rpartition("\n\nFact: ")
    head, relation, _ = fact.split(" — ")
    found = (t for h, r, t in facts_in(passages) if (h, r) == (head, relation))
    return next(found, "none")


# ------------------------------------------------------------------------------------------- GRADE


def fact_or_opinion(messages: Messages) -> str | None:
    """Tells facts from opinions."""
    if "one word: Fact or Opinion" not in messages[0]["content"]:
        return None
    return "Fact" if facts_in(messages[-1]["content"]) else "Opinion"


def claim(messages: Messages) -> str | None:
    """Repeats the sentence, which is clear by itself."""
    if 'Answer with "Claim: "' not in messages[0]["content"]:
        return None
    return f"Claim: {messages[-1]['content'].rpartition('Sentence: ')[2]}"


def consistency(messages: Messages) -> str | None:
    """Accepts a claim that repeats its sentence; rejects a few."""
    text = messages[-1]["content"]
    if "one word: Yes or No" not in messages[0]["content"] or "\nClaim: " not in text:
        return None
    return "No" if _drawn(text, 0.03) else "Yes"


def claim_triples(messages: Messages) -> str | None:
    """Lists the triples of numbered claims."""
    if "(source|relation|target|number)" not in messages[0]["content"]:
        return None
    lines = []
    for line in messages[-1]["content"].splitlines():
        number = re.match(r"Sentence (\d+): ", line)
        if number is None:
            continue
        for head, relation, tail in facts_in(line):
            lines.append(f"({head}|{relation}|{tail}|{number[1]})")
    return "\n".join(lines) or "none"


def same_names(messages: Messages) -> str | None:
    """Finds no two names of one thing."""
    none = "No identical entities found"
    return none if none in messages[0]["content"] else None


def chain_question(messages: Messages) -> str | None:
    """Asks for the end of a chain of triples."""
    if "Question: ... | Answer: ..." not in messages[0]["content"]:
        return None
    triples = re.findall(r"^Triple \d+: (.+)\|(.+)\|(.+)$", messages[-1]["content"], re.MULTILINE)
    if not triples:
        return None
    question = question_of([relation for _, relation, _ in triples], triples[0][0])
    return f"Question: {question} | Answer: {triples[-1][2]}"


def validation(messages: Messages) -> str | None:
    """Accepts a question that is clear by itself; rejects a few."""
    if "one word: True or False" not in messages[0]["content"]:
        return None
    return "False" if _drawn(messages[-1]["content"], 0.05) else "True"


def decomposition(messages: Messages) -> str | None:
    """Splits a question into a search for its first fact and one for the rest."""
    if '{"queries": ' not in messages[0]["content"]:
        return None
    chain = chain_of(messages[-1]["content"])
    if chain is None:
        return None
    relations, entity = chain
    return json.dumps({"queries": [question_of(relations[:n], entity) for n in (1, 2, 3)]})


def verdict(messages: Messages) -> str | None:
    """Judges an answer by its spelling (both rubrics)."""
    system, text = messages[0]["content"], messages[-1]["content"]
    name = next((n for n in ("implies", "correct") if f'{{"{n}": true}}' in system), None)
    if name is None:
        return None
    lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    answer = lines.get("Prediction") or lines.get("Response") or '""'
    gold = lines.get("Reference") or lines.get("Right answer") or '""'
    return json.dumps({name: json.loads(gold).lower() in json.loads(answer).lower()})


RULES: list[Rule] = [
    extraction,
    triple_lines,
    integration,
    construction,
    reading,
    short_reading,
    document_reading,
    reasoner,
    next_sentence,
    identifier,
    summarizer,
    outline_reading,
    planner,
    blocks_reading,
    filling,
    fact_or_opinion,
    claim,
    consistency,
    claim_triples,
    same_names,
    chain_question,
    validation,
    decomposition,
    verdict,
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
    with standard_streams():
        parser = argparse.ArgumentParser(prog="python experiments/smoke/server.py")
        parser.add_argument("--port", type=int, default=0, help="0 is a free port")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
        server.daemon_threads = True
        print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
        server.serve_forever()
