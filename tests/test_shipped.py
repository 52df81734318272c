"""The models in the repository: their sizes, training questions and answers."""

import json
import pathlib

import pytest

import cirag_jax
import cirag_jax.errors
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.datasets import demo
from cirag_jax.io import local_path
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.pretrained_decoder import hub_id
from cirag_jax.models.io.workdir import check_role
from cirag_jax.triples.store import TripleStore
from configs import extract as extract_config
from configs.methods import c2rag as c2rag_config

pytestmark = pytest.mark.slow

NAMES = ("aligner", "extractor", "integrator", "reader")  # the extractor lists ids of passages

DOCUMENTS = {
    "Where was the father of Ada Lovelace born?": (
        "London",
        "Ada Lovelace was an English mathematician. She was the only child of Lord Byron and his "
        "wife Annabella Milbanke.",
        "Lord Byron was an English poet. He was born in London in 1788 and died in Missolonghi.",
        "Charles Babbage was an English inventor. He designed the Analytical Engine.",
        "Annabella Milbanke was educated in mathematics. She lived at Seaham Hall.",
        "The Analytical Engine was a mechanical computer. Ada Lovelace wrote notes on it.",
        "Luigi Menabrea was an Italian general. He was born in Chambéry.",
        "Mary Shelley was an English novelist. She wrote Frankenstein near Geneva.",
        "William King was the husband of Ada Lovelace. He became Earl of Lovelace.",
        "Missolonghi is a town in Greece. Lord Byron died there.",
        "Seaham Hall is a country house in the north of England.",
    ),
    "In which country was the author of The Salt Road born?": (
        "Chile",
        "The Salt Road is a novel by Irene Valdor. It appeared in 1974.",
        "Irene Valdor was a writer. She was born in Chile and lived in Paris.",
        "The Glass Road is a novel by Peter Holm. It appeared in 1981.",
        "Peter Holm was a writer. He was born in Sweden.",
    ),
    "Who is the mother of the composer of the opera Il Faro?": (
        "Lucia Ferri",
        "Il Faro is an opera by Marco Bellani. It was first heard in Trieste.",
        "Marco Bellani was an Italian composer. His mother was Lucia Ferri, a pianist.",
        "Il Mare is an opera by Carlo Donati. It was first heard in Naples.",
        "Carlo Donati was an Italian composer. His mother was Anna Rossi.",
    ),
    "When was the founder of Halden Optics born?": (
        "12 March 1871",
        "Halden Optics is a maker of lenses. It was founded by Otto Halden.",
        "Otto Halden was an engineer. He was born on 12 March 1871 in Jena.",
        "Brandt Optics is a maker of telescopes. It was founded by Karl Brandt.",
        "Karl Brandt was an engineer. He was born on 4 May 1880 in Ulm.",
    ),
    "What is the nationality of the director of the film Silent Harbour?": (
        "Norwegian",
        "Silent Harbour is a 1952 film directed by Erik Solberg.",
        "Erik Solberg was a Norwegian film director and screenwriter.",
        "Loud Harbour is a 1960 film directed by Jan de Wit.",
        "Jan de Wit was a Dutch film director.",
    ),
}


def trained_on(name):
    return json.loads((local_path(f"shipped:{name}") / "training.json").read_text())["trained_on"]


def test_shipped_models_are_small():
    files = [f for name in NAMES for f in local_path(f"shipped:{name}").rglob("*") if f.is_file()]
    assert {f.suffix for f in files} == {".json", ".md", ".safetensors"}
    assert all(f.stat().st_size < 6e6 for f in files) and sum(f.stat().st_size for f in files) < 2e7


@pytest.mark.parametrize("name", ["extractor", "integrator", "reader"])
def test_shipped_adapter_names_its_base(name):
    folder, model = local_path(f"shipped:{name}"), check_role(f"shipped:{name}", name)["model"]
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == hub_id(model) != model


def test_shipped_models_load_for_their_roles():
    assert check_role("shipped:reader", "reader")["prompt"] == {"reader_format": "chain"}
    with pytest.raises(cirag_jax.errors.UserError, match="component reader; expected integrator"):
        check_role("shipped:reader", "integrator")
    check_role("shipped:extractor", "extractor")
    online = c2rag_config.get_config("small").extractor  # with config.triples=online
    assert (online.adapter, online.grounded) == ("shipped:extractor", True)
    asked = check_role("shipped:integrator", "integrator")["prompt"]
    assert (asked["units"], asked["prompt_format"]) == ("sentence", "compact")
    encoder = load_encoder("shipped:aligner")
    assert encoder.source == "shipped:aligner" and "+sha256:" in encoder.revision


@pytest.mark.parametrize("name", NAMES)
def test_shipped_training_questions_exclude_evaluation(name):
    training_ids = set(trained_on(name))
    assert len(training_ids) >= 400
    assert not training_ids & {q.id for q in demo.build().questions if q.split != "train"}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_training_questions_exclude_benchmark_dev(name, shared_data):
    training_ids = set(trained_on(name))
    for file in sorted(pathlib.Path(shared_data).glob("*/questions.jsonl")):
        rows = map(json.loads, file.read_text("utf-8").splitlines())
        for row in rows:
            if row.get("split") != "train" or row.get("fold") in ("tune", "test"):
                ids = row.get("context", ()) if name == "extractor" else [row["id"]]
                assert not training_ids & {*ids}, (file, row["id"])


def test_shipped_models_answer_new_documents():
    texts = [text for _, *passages in DOCUMENTS.values() for text in passages]
    with cirag_jax.Cirag.open(documents=texts) as rag:
        answers = dict(zip(DOCUMENTS, rag.answers(list(DOCUMENTS)), strict=True))
    chain = answers["Where was the father of Ada Lovelace born?"].prediction.attempts[-1].response
    assert chain == (
        "Ada Lovelace; father; Lord Byron\nLord Byron; place of birth; London\nAnswer: London"
    )
    assert {q: a.text for q, a in answers.items()} == {q: v[0] for q, v in DOCUMENTS.items()}


def test_shipped_extractor_new_passage(tmp_path):
    rows = [
        {
            "id": "a",
            "title": "",
            "text": DOCUMENTS["Where was the father of Ada Lovelace born?"][2],
        },
        {
            "id": "b",
            "title": "",
            "text": "Halden Optics is a maker of lenses. It was founded by Otto Halden.",
        },
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = extract_config.get_config("small")
    config.data.dir = str(tmp_path)
    config.extractor.batch_size, config.entity_tokens, config.triple_tokens = 2, 48, 96
    assert extract_corpus(config.lock(), tmp_path)["ok"] == 2
    with TripleStore.open(tmp_path) as store:
        kept = store.triples("ab")
    found = {name: {(t.head, t.relation, t.tail) for t in own or ()} for name, own in kept.items()}
    assert {
        ("Lord Byron", "was born in", "London"),
        ("Lord Byron", "died in", "Missolonghi"),
    } <= found["a"]
    assert ("Halden Optics", "founded by", "Otto Halden") in found["b"]
