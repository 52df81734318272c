"""Answers questions over a list of texts, and prints the evidence.

python examples/own_documents.py
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import Answer, Cirag

DOCUMENTS = [  # A heading gives a document its title.
    "# Grey Harbour\nGrey Harbour is a 1987 film. It was directed by Marta Lindqvist.",
    "# Marta Lindqvist\nMarta Lindqvist is a film director. She was born in Kalmar.",
    "# Kalmar\nKalmar is a town on the Baltic Sea.",
    "# Winter Ferry\nWinter Ferry is a 1991 film. It was directed by Jonas Ek.",
]
QUESTION = "Where was the director of Grey Harbour born?"


def main() -> Answer:
    """Answers one question with CIRAG over the documents."""
    with Cirag.open(documents=DOCUMENTS) as rag:
        answer = rag.answer(QUESTION)
    print(QUESTION)
    print(f"  {len(answer.steps)} searches")
    for line in answer.evidence:
        print(f"  evidence: {line}")
    print(f"  answer: {answer.text}")
    return answer


if __name__ == "__main__":
    main()
