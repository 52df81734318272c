import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.cirag.settings import CiragConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"granularities": ()}, "granularities"),
        ({"granularities": ("passage", "triple")}, "in this order"),
        ({"granularities": ("triple", "page")}, "granularities"),
        ({"prompt_format": "xml"}, "multi_turn, paper, compact"),
        ({"normalization": "latin"}, "one of ascii, unicode"),
        ({"integrator": "top"}, "one of model, aligner, top_k"),
        ({"units": "page"}, "units='page' is not one of triple, sentence"),
        ({"units": "sentence"}, "units=sentence needs integrator=.*=compact, not multi_turn"),
        ({"units": "sentence", "prompt_format": "paper"}, "integrator=.*=compact, not paper"),
        ({"reader_format": "xml"}, "reader_format='xml' is not one of thought, chain, brief"),
        ({"integrator": "aligner", "use_reranker": False}, "link_bonus need use_reranker=true"),
        (
            {"units": "sentence", "integrator": "aligner", "granularities": ("triple",)},
            "needs sentence or passage with units=sentence",
        ),
        ({"on_repeat": "ponder"}, "on_repeat='ponder' is not one of ask, stop, chain"),
        ({"next_query": "none"}, "next_query='none' is not one of written, chain"),
        ({"match_cutoff": 1.5}, "match_cutoff=1.5 must lie between 0 and 1"),
        ({"max_steps": -1}, "max_steps"),
        ({"num_passages": 0}, "num_passages"),
        ({"num_candidates": 0}, "num_candidates"),
        ({"keep": 0}, "keep=0 must be at least 1"),
        ({"link_bonus": -0.1}, "link_bonus=-0.1 must not be negative"),
    ],
)
def test_cirag_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        CiragConfig(**settings)
