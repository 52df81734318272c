"""The weights that an engine keeps."""

import jax

from cirag_jax import sharding
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine import loading
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_params import FUSED, PROJECTIONS
from cirag_jax.models.io.pretrained_decoder import load_decoder


def test_engine_fuses_kernels_on_one_accelerator(folder, monkeypatch):
    """The engine copies stacked weights in memory, so that a trainer can still use them."""
    loaded = load_decoder(str(folder), dtype="float32")
    params = decoder_params.to_params(loaded.state)

    def opened():
        return Engine(loaded.config, params, ChatTokenizer.load(folder))

    def kernels(engine):
        layers = engine._model.weights.params["layers"]
        return {name for layer in layers for name in layer if name.endswith("_proj")}

    plain = opened()
    assert kernels(plain) == set(PROJECTIONS)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fused = {*FUSED, "o_proj", "down_proj"}
    assert kernels(opened()) == fused
    assert kernels(Engine.open(str(folder), dtype="float32")) == fused
    unstacked = plain._model.weights.params
    assert loading.fuse_kernels(unstacked, sharding.make_mesh()) is unstacked
    assert not any(array.is_deleted() for array in jax.tree.leaves(params))
