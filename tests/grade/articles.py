"""Articles that contain a chain of facts, and a fake model that writes questions by rules."""

import json
import re

from cirag_jax.llm.types import Generated, Usage, failed

# A chain of facts over articles; "Osk" and "Oskton" are one town.
ARTICLES = (
    ("Ule", "Ule feeds Tarn. Nobody likes Ule!"),
    ("Tarn", "Tarn governs Osk. Tarn is garbled."),
    ("Oskton", "Oskton borders Fenn. It says nothing."),
    ("Fenn", "Fenn joins Brum."),
    ("Brum", "Brum cuts Dunn. Tarn owns Vell."),
)


def write_articles(folder):
    """Writes the articles into a folder of documents."""
    folder.mkdir()
    rows = [{"title": t, "text": x, "source": "The Daily"} for t, x in ARTICLES]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Model:
    """A backend that answers each prompt by rules, using only its last message."""

    usage = Usage()

    def __init__(self):
        self.left, self.asked, self.broken = 10**6, [], ""

    @property
    def budget_exhausted(self):
        return self.left <= 0

    def generate(self, requests, progress, done):
        del progress
        for index, request in enumerate(requests):
            if self.left <= 0:
                done(index, failed("the budget is exhausted"))
                continue
            self.left -= 1
            shown = request.messages[-1].text
            self.asked.append((request.role, shown))
            if request.role == self.broken:
                done(index, failed("the server is away"))
                continue
            text = getattr(self, request.role)(shown)
            done(index, Generated(text, "stop", Usage(prompt_tokens=5, generated_tokens=2)))

    def close(self):
        pass

    def filter(self, shown):
        return "Opinion" if shown.endswith("!") else "Fact"

    def claimer(self, shown):
        sentence = shown.rpartition("Sentence: ")[2]
        return "Claim: none" if "nothing" in sentence else f"Claim: {sentence}"

    def checker(self, shown):
        return "No" if "garbled" in shown else "Yes"

    def extractor(self, shown):
        found = re.findall(r"Sentence (\d+): (\w+) (\w+) (\w+)\.", shown)
        return "\n".join(f"({head}|{verb}|{tail}|{n})" for n, head, verb, tail in found)

    def matcher(self, shown):
        both = "Osk " in shown.replace("|", " ") and "Oskton" in shown
        return '[Osk|Oskton|"always"]' if both else "No identical entities found"

    def asker(self, shown):
        if shown.startswith("Fact: "):
            head, verb, tail = shown.partition("(")[2].partition(")")[0].split("|")
            if tail == "Vell":
                return "I would rather not."
            return f"Phrase: what {head} {verb} | Question: What is it that {head} {verb}?"
        if shown.startswith("Claim: "):
            return shown.partition(".\n")[0].rpartition(" ")[2]
        # An attack on a journal may have emptied a part.
        triples = re.findall(r"Triple \d+: (\w*)\|(\w*)\|(\w*)", shown)
        if triples[-1][2] == "Vell":
            return "I would rather not."
        verbs = " what it ".join(verb for _, verb, _ in triples)
        return f"Question: What is it that {triples[0][0]} {verbs}? | Answer: {triples[-1][2]}"

    def validator(self, shown):
        return "False" if "cuts" in shown and "feeds" in shown else "True"
