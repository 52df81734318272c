"""Generates the fixed workload of the generation benchmark.

    python experiments/benchmarks/workload.py    # writes generation_workload.jsonl in this folder

The 64 conversations resemble CIRAG's integration steps. Each has a question of the built-in dataset
and three steps. A step shows 31 to 37 candidate facts, which gives it a realistic length: 427 to
759 tokens of SmolLM2, median 522 (30 triples of the MuSiQue extractions have 465 to 711, median
535). A fixed reply (thought, kept facts, next query) follows, so that every system reads the same
tokens, independently of what it generates. All conversations share an instruction of 295 tokens.
Prompts of the three steps have medians of 860, 1,507 and 2,152 tokens. The same version of the
dataset gives the same file.
"""

import json
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.datasets import demo
from cirag_jax.io import standard_streams
from cirag_jax.types import Dataset, Question, Triple

FILE = pathlib.Path(__file__).with_name("generation_workload.jsonl")
NUM_CONVERSATIONS, NUM_STEPS, NUM_FACTS = 64, 3, 37

INSTRUCTION = """\
You collect facts, step by step, until a question with several hops can be answered.

At every step you see candidate facts as JSON triples [subject, relation, object]. They were \
retrieved for your last query; most of them do not matter. Decide which facts bring the question \
closer to its answer, and what to look for next.

Rules:
1. Use the given facts alone. Do not add what you know from elsewhere, and do not change a \
fact: copy its three parts as they are written.
2. Keep a fact only if the chain from the question to its answer needs it. When no fact helps, \
keep none and ask for the missing one in other words.
3. Facts that you kept at earlier steps stay kept; do not repeat them.
4. The next query names one missing fact, with the entities found so far written out, so that a \
search engine finds it without knowing the question.
5. When the kept facts answer the question, write <no question> instead of a query.

Answer in exactly three parts, each under its header.
[[## thought ##]]
two or three sentences: what the new facts tell, and whether the question can be answered now.
[[## fact_after_filter ##]]
{"fact": [[subject, relation, object], ...]}
[[## question ##]]
the next query, or <no question>."""


def _fact(triple: Triple) -> list[str]:
    return [triple.head, triple.relation, triple.tail]


def _candidates(
    data: Dataset, question: Question, step: int, rng: random.Random, all_triples: list[Triple]
) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the facts shown at a step, and the facts that the reply keeps."""
    supporting = question.supporting or ()
    passage = supporting[min(step, len(supporting) - 1)]
    kept = [_fact(t) for t in data.triples[passage]][:2]
    pool = [_fact(t) for p in question.context or () for t in data.triples.get(p, ())]
    rng.shuffle(pool)
    pool = kept + pool + [_fact(t) for t in rng.sample(all_triples, NUM_FACTS)]
    shown = list({tuple(fact): fact for fact in pool}.values())
    shown = shown[: rng.randint(NUM_FACTS - 6, NUM_FACTS)]
    rng.shuffle(shown)
    return shown, kept


def conversations() -> Iterator[dict[str, Any]]:
    """Yields ``id`` and ``messages`` of each conversation, with one user turn per step."""
    data = demo.build()
    rng = random.Random(0)
    all_triples = [t for row in data.triples.values() for t in row]
    for question in rng.sample(data.questions, NUM_CONVERSATIONS):
        messages = [{"role": "system", "content": INSTRUCTION}]
        for step in range(NUM_STEPS):
            shown, kept = _candidates(data, question, step, rng, all_triples)
            header = f"Question: {question.question}\n" if step == 0 else ""
            facts = json.dumps({"fact": shown}, ensure_ascii=False)
            messages.append(
                {"role": "user", "content": f"{header}[[## fact_before_filter ##]]\n{facts}"}
            )
            subject, relation, value = kept[-1]
            reply = (
                f"[[## thought ##]]\nThe facts say that {subject} {relation} {value}, which the "
                f"question builds on. What follows from {value} is still missing.\n"
                f"[[## fact_after_filter ##]]\n{json.dumps({'fact': kept}, ensure_ascii=False)}\n"
                f"[[## question ##]]\nWhat is known about {value}?"
            )
            messages.append({"role": "assistant", "content": reply})
        yield {"id": question.id, "messages": messages[:-1]}


def main() -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in conversations()]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} conversations in {FILE}", file=sys.stderr)


if __name__ == "__main__":
    with standard_streams():
        main()
