import concurrent.futures
import json
import shutil

import jax
import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.export import export_sentence_transformers
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval import encoders
from cirag_jax.retrieval.encode import encode
from cirag_jax.retrieval.encoders import FlaxEncoder, MemoizingEncoder, open_encoder_for
from configs import retrievers
from tests import tiny

_TEXTS = ["baldia worked as potter.", "who is the patron of corum?", "saint", "saint"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The model in the format of sentence-transformers."""
    pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("exported") / "model"
    return export_sentence_transformers(load_encoder(str(model)), folder)


def _config(model, **changes):
    config = retrievers.encoder()
    config.model = str(model)
    config.update(changes)
    return config.lock()


def test_flax_encoder_uses_prefix_and_limit_of_each_role(model):
    encoder = open_encoder_for(
        _config(model, instructions={"query": "the "}, query_max_length=6, passage_max_length=9)
    )
    plain = load_encoder(str(model))
    for kind, prefix, limit in (("query", "the ", 6), ("passage", "", 9)):
        expected = encode(plain, None, [prefix + text for text in _TEXTS], max_length=limit)
        np.testing.assert_allclose(encoder.encode(_TEXTS, kind), expected, atol=1e-6)
    assert encoder.identity["query_prefix"] == "the "
    assert encoder.identity["passage_max_length"] == 9
    json.dumps(encoder.identity)


def test_flax_encoder_rounds_weights_once(model, monkeypatch):
    plain = load_encoder(str(model), dtype="bfloat16")
    expected = encode(plain, None, _TEXTS)  # Every batch rounds.
    given = set()
    apply = encode_lib._apply

    def watched(graphdef, passage, state, *rest):
        given.update(str(x.dtype) for x in jax.tree.leaves(state["layers"][0]["up_kernel"]))
        return apply(graphdef, passage, state, *rest)

    monkeypatch.setattr(encode_lib, "_apply", watched)
    np.testing.assert_array_equal(FlaxEncoder(plain).encode(_TEXTS), expected)
    assert given == {"bfloat16"}


def test_sentence_transformers_encoder_gives_the_same_vectors(model, tmp_path):
    pytest.importorskip("sentence_transformers")
    folder = export_sentence_transformers(load_encoder(str(model)), tmp_path / "exported")
    ours = open_encoder_for(_config(folder, instructions={"query": "the patron of "}))
    theirs = open_encoder_for(
        _config(folder, backend="sentence_transformers", instructions={"query": "the patron of "})
    )
    done = []
    for kind in ("query", "passage"):
        found = theirs.encode(_TEXTS, kind, done.append)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, ours.encode(_TEXTS, kind), atol=2e-6)
    assert sum(done) == 2 * len(set(_TEXTS))
    assert theirs.dim == ours.dim == 32
    assert theirs.encode([]).shape == (0, 32)
    json.dumps(theirs.identity)


def test_sentence_transformers_encoder_two_threads_keep_their_own_limits(model, tmp_path):
    pytest.importorskip("sentence_transformers")
    folder = export_sentence_transformers(load_encoder(str(model)), tmp_path / "exported")
    limits = {"query_max_length": 4, "passage_max_length": 30}
    encoder = open_encoder_for(_config(folder, backend="sentence_transformers", **limits))

    def count_wrong(kind):
        expected = encoder.encode(["saint potter " * 9], kind)
        vectors = (encoder.encode(["saint potter " * 9], kind) for _ in range(100))
        return sum(not np.allclose(vector, expected, atol=1e-3) for vector in vectors)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(count_wrong, ("query", "passage"))) == [0, 0]


def test_open_encoder_remote_code_needs_permission(tmp_path):
    """Loading a model folder with Python code, such as NV-Embed-v2, would run that code."""
    pytest.importorskip("sentence_transformers")
    marker = tmp_path / "it ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "somebodys",
                "auto_map": {"AutoConfig": "code.TheConfig", "AutoModel": "code.TheModel"},
            }
        )
    )
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w').write('yes')\n")
    with pytest.raises(UserError, match=r"--config\.encoder\.trust_remote_code=true"):
        open_encoder_for(_config(folder, backend="sentence_transformers"))
    assert not marker.exists()


def test_open_encoder_equal_steps_of_two_runs_differ_in_identity(model, tmp_path):
    base = load_encoder(str(model))
    meta = {
        "model": str(model), "pooling": "mean", "query_prefix": "", "passage_prefix": "",
        "component": "aligner",
    }  # fmt: skip
    identities = []
    for name, factor in (("a", 1.0), ("b", 1.5)):
        state = jax.tree.map(lambda x, factor=factor: x * factor, base.state)
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            checkpoints.save(3, {"params": state}, {}, meta)
        identities.append(open_encoder_for(_config(tmp_path / name)).identity["revision"])
    assert identities[0] != identities[1]


@pytest.mark.parametrize(("metric", "best"), [("dev/recall@5", 2), ("dev/mrr", 3), ("dev/loss", 1)])
def test_open_encoder_best_checkpoint_follows_its_metric(model, tmp_path, metric, best):
    base = load_encoder(str(model))
    meta = {
        "model": str(model), "pooling": "mean", "query_prefix": "", "passage_prefix": "",
        "component": "aligner", "run": {"best_metric": metric},
    }  # fmt: skip
    figures = {1: (0.1, 0.5, 0.2), 2: (0.9, 0.6, 0.7), 3: (0.2, 0.7, 0.6)}
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        for step, values in figures.items():
            named = dict(zip(("dev/recall@5", "dev/mrr", "dev/loss"), values, strict=True))
            checkpoints.save(step, {"params": base.state}, {}, meta)
            checkpoints.add_metrics(step, named)
    assert open_encoder(str(tmp_path))[1]["step"] == best


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "pickle"}, "config.encoder.backend='pickle' is not one of"),
        ({"query_max_length": 0}, "config.encoder.query_max_length=0"),
        ({"backend": "sentence_transformers", "dtype": "float8"}, "config.encoder.dtype"),
    ],
)
def test_open_encoder_unusable_model_is_reported(model, changes, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        open_encoder_for(_config(model, **changes))


class _Noting:
    """An encoder that records the texts that it encodes."""

    def __init__(self, encoder):
        self._encoder = encoder
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated
        self.asked = []

    def encode(self, texts, kind="passage", progress=None):
        self.asked.append((kind, list(texts)))
        return self._encoder.encode(texts, kind, progress)


def test_memoizing_encoder_embeds_each_text_once_per_role(model):
    plain = open_encoder_for(_config(model, instructions={"query": "the "}))
    noting = _Noting(plain)
    encoder = MemoizingEncoder(noting)
    for kind in ("passage", "query"):
        for texts in (["a", "b", "a"], ["c", "b"], ["a"], []):
            found = encoder.encode(texts, kind)
            assert found.shape == (len(texts), 32) and found.dtype == np.float32
            np.testing.assert_allclose(found, plain.encode(texts, kind), atol=1e-6)
    assert noting.asked == [(k, t) for k in ("passage", "query") for t in (["a", "b"], ["c"])]
    assert (encoder.requested, encoder.embedded) == (12, 6)
    encoder.forget()
    encoder.encode(["a"])
    assert noting.asked[-1] == ("passage", ["a"]) and encoder.embedded == 7
    assert (encoder.dim, encoder.identity) == (plain.dim, plain.identity)


def test_memoizing_encoder_size_is_bounded(model, monkeypatch):
    monkeypatch.setattr(encoders, "_MAX_TEXTS", 3)
    plain = open_encoder_for(_config(model))
    noting = _Noting(plain)
    encoder = MemoizingEncoder(noting)
    for texts in (["a", "b"], ["b", "c"], ["c", "d"], list("abcdefgh"), ["d"]):
        np.testing.assert_allclose(encoder.encode(texts), plain.encode(texts), atol=1e-6)
    # A full cache is cleared. A list larger than the cache does not change it.
    assert [t for _, t in noting.asked] == [["a", "b"], ["c"], ["c", "d"], list("abcdefgh")]


def _with_prompts(model, folder, **fields):
    """Copies a model, and writes its config_sentence_transformers.json."""
    shutil.copytree(model, folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(fields))
    return folder


def test_encoder_each_role_has_its_instruction(model):
    texts = {"query": "the ", "passage": "patron of ", "triple": "saint "}
    encoder, plain = open_encoder_for(_config(model, instructions=texts)), load_encoder(str(model))
    for role, text in texts.items():
        expected = encode(plain, None, [text + given for given in _TEXTS])
        np.testing.assert_array_equal(encoder.encode(_TEXTS, role), expected)
    # Without an own instruction, triples have that of passages.
    encoder = open_encoder_for(_config(model, instructions={"passage": "patron of "}))
    np.testing.assert_array_equal(
        encoder.encode(_TEXTS, "triple"), encoder.encode(_TEXTS, "passage")
    )


@pytest.mark.parametrize("backend", ["flax", "sentence_transformers"])
@pytest.mark.parametrize(
    ("prompts", "default", "instructions", "expected"),
    [
        ({"query": "q: ", "document": "d: "}, None, {}, ("q: ", "d: ", "d: ")),
        ({"query": "q: ", "triple": "t: "}, None, {}, ("q: ", "", "t: ")),
        ({"query": "q: ", "STS": "s: "}, "STS", {}, ("q: ", "", "")),
        ({"STS": "s: "}, "STS", {}, ("s: ", "s: ", "s: ")),
        ({"STS": "s: ", "query": None}, None, {"query": "prompt:STS"}, ("s: ", "", "")),
        ({"query": "q: "}, None, {"query": "", "triple": "prompt:query"}, ("", "", "q: ")),
    ],
)
def test_encoder_instructions_follow_the_models_prompts(
    exported, tmp_path, backend, prompts, default, instructions, expected
):
    folder = _with_prompts(
        exported, tmp_path / "named", prompts=prompts, default_prompt_name=default
    )
    (folder / "cirag_jax.json").unlink()
    encoder = open_encoder_for(_config(folder, backend=backend, instructions=instructions))
    identity = encoder.identity
    query, passage, triple = (identity[f"{r}_prefix"] for r in ("query", "passage", "triple"))
    assert (query, passage, passage if triple is None else triple) == expected


@pytest.mark.parametrize("backend", ["flax", "sentence_transformers"])
def test_encoder_unknown_prompt_is_refused_by_name(exported, tmp_path, backend):
    folder = _with_prompts(exported, tmp_path / "named", prompts={"STS": "s: ", "query": "q: "})
    config = _config(folder, backend=backend, instructions={"query": "prompt:Clustering"})
    with pytest.raises(UserError, match=r"prompt:Clustering.*its prompts: STS, (document, )?query"):
        open_encoder_for(config)


@pytest.mark.parametrize("backend", ["flax", "sentence_transformers"])
def test_encoder_dimensions_are_cut_and_normalized(exported, tmp_path, backend):
    full = open_encoder_for(_config(exported, backend=backend)).encode(_TEXTS)
    expected = full[:, :9] / np.linalg.norm(full[:, :9], axis=1, keepdims=True)
    encoder = open_encoder_for(_config(exported, backend=backend, dimensions=9))
    assert encoder.dim == encoder.identity["dimension"] == 9
    np.testing.assert_allclose(encoder.encode(_TEXTS), expected, atol=2e-6)
    folder = _with_prompts(exported, tmp_path / "cut", truncate_dim=9)
    assert open_encoder_for(_config(folder, backend=backend)).dim == 9
    np.testing.assert_allclose(
        open_encoder_for(_config(folder, backend=backend)).encode(_TEXTS), expected, atol=2e-6
    )
    assert open_encoder_for(_config(folder, backend=backend, dimensions=12)).dim == 12
    for wrong in (33, 99):
        with pytest.raises(UserError, match=f"dimensions={wrong} must lie between 1 and 32"):
            open_encoder_for(_config(folder, backend=backend, dimensions=wrong))


def test_export_keeps_instructions_and_dimensions(model, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    given = {"query": "the ", "passage": "patron of ", "triple": "saint "}
    ours = load_encoder(str(model), instructions=given, dimensions=7)
    folder = export_sentence_transformers(ours, tmp_path / "exported")
    theirs = sentence_transformers.SentenceTransformer(str(folder))
    again = load_encoder(str(folder))
    assert (again.dim, [again.prefix(role) for role in given]) == (7, list(given.values()))
    for role, name in (("query", "query"), ("passage", "document"), ("triple", "triple")):
        vectors = theirs.encode(_TEXTS, prompt_name=name, normalize_embeddings=True)
        np.testing.assert_allclose(encode(ours, None, _TEXTS, kind=role), vectors, atol=1e-5)


@pytest.mark.parametrize("backend", ["flax", "sentence_transformers"])
def test_encoder_limit_is_the_models_own_and_cut_texts_are_counted(exported, tmp_path, backend):
    folder = _with_prompts(exported, tmp_path / "short")
    limits = {"max_seq_length": 8, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    texts = ["saint " * 6, "saint " * 7, "saint " * 50, "saint " * 50]
    encoder = open_encoder_for(_config(folder, backend=backend))
    assert encoder.identity["query_max_length"] == encoder.identity["passage_max_length"] == 8
    vectors = encoder.encode(texts)
    np.testing.assert_allclose(vectors[1], vectors[0], atol=2e-6)
    assert encoder.truncated == {"passage": 2}  # Equal texts count once.
    encoder.encode(["saint"], "query")
    assert encoder.truncated["query"] == 0
    if backend == "flax":  # A longer limit is allowed if the model has the positions.
        longer = open_encoder_for(_config(folder, passage_max_length=60))
        assert np.abs(longer.encode(texts)[2] - longer.encode(texts)[0]).max() > 1e-5
        assert longer.truncated["passage"] == 0


def test_cached_encoder_keeps_the_number_of_cut_texts(model, tmp_path):
    for _ in range(2):
        plain = open_encoder_for(_config(model, passage_max_length=5))
        encoder = encoders.CachedEncoder(MemoizingEncoder(plain), tmp_path)
        encoder.encode(["saint " * 9, "saint " * 8, "a"])
        assert encoder.truncated == {"passage": 2}
        encoder.encode(["saint " * 7])  # the file has this list's number alone
        assert encoder.truncated == {"passage": 3}
    for file in tmp_path.glob("*.json"):
        file.unlink()
    plain = open_encoder_for(_config(model, passage_max_length=5))
    encoders.CachedEncoder(plain, tmp_path).encode(["saint " * 9, "saint " * 8, "a"])
    assert plain.truncated["passage"] == 0  # The vectors came from the cache.


def test_texts_of_a_cached_list_are_not_embedded_again(model, tmp_path):
    plain = open_encoder_for(_config(model))
    encoders.CachedEncoder(plain, tmp_path).encode(_TEXTS)
    memo = MemoizingEncoder(plain)
    encoders.CachedEncoder(memo, tmp_path).encode(_TEXTS)
    np.testing.assert_array_equal(memo.encode(_TEXTS[1:]), plain.encode(_TEXTS)[1:])
    assert memo.embedded == 0


def test_cached_encoder_keeps_roles_apart(model, tmp_path):
    plain = open_encoder_for(_config(model, instructions={"triple": "saint "}))
    for _ in range(2):
        encoder = encoders.CachedEncoder(plain, tmp_path)
        for role in ("passage", "triple"):
            np.testing.assert_array_equal(encoder.encode(_TEXTS, role), plain.encode(_TEXTS, role))


def test_report_truncated_counts_since_the_start_and_warns_once(model, capsys):
    encoder = open_encoder_for(_config(model, passage_max_length=5))
    encoder.encode(["saint " * 9])
    before = encoders.count_truncated(encoder)
    assert encoders.report_truncated(encoder, before=before) == dict.fromkeys(before, 0)
    assert capsys.readouterr().err == ""
    encoder.encode(["saint " * 7, "saint " * 8], "triple")
    assert encoders.report_truncated(encoder, before=before)["triple"] == 2
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "only the beginning of 2 texts as triple" in warning
    assert "passage_max_length=5" in warning
