"""The methods by name: their programs and their settings, which say what they need."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.methods.beam_retrieval import BeamRetrievalConfig, beam_retrieval
from cirag_jax.methods.c2rag import c2rag
from cirag_jax.methods.c2rag_config import C2ragConfig
from cirag_jax.methods.cirag import cirag
from cirag_jax.methods.cirag_config import CiragConfig
from cirag_jax.methods.direct import DirectConfig, direct
from cirag_jax.methods.dualrag import DualragConfig, dualrag
from cirag_jax.methods.genground import GengroundConfig, genground
from cirag_jax.methods.ircot import IrcotConfig, ircot
from cirag_jax.methods.iter_retgen import IterRetgenConfig, iter_retgen
from cirag_jax.methods.kirag import KiragConfig, kirag
from cirag_jax.methods.native_rag import NativeRagConfig, native_rag
from cirag_jax.methods.oracle import OracleConfig, oracle
from cirag_jax.runtime.requests import Program
from cirag_jax.types import Prediction, Question


@dataclasses.dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
      program: begins it for a question, which has its id and its text alone unless the method
        declares that it sees gold.
      config: its settings, a frozen dataclass whose ``needs`` is a `Needs`; ``config.<name>`` of a
        config file.
    """

    program: Callable[[Question, Any], Program[Prediction]]
    config: type[Any]


METHODS: Mapping[str, Method] = {
    "beam_retrieval": Method(beam_retrieval, BeamRetrievalConfig),
    "c2rag": Method(c2rag, C2ragConfig),
    "cirag": Method(cirag, CiragConfig),
    "direct": Method(direct, DirectConfig),
    "dualrag": Method(dualrag, DualragConfig),
    "genground": Method(genground, GengroundConfig),
    "ircot": Method(ircot, IrcotConfig),
    "iter_retgen": Method(iter_retgen, IterRetgenConfig),
    "kirag": Method(kirag, KiragConfig),
    "native_rag": Method(native_rag, NativeRagConfig),
    "oracle": Method(oracle, OracleConfig),
}


def find_method(name: str) -> Method:
    """The method of this name.

    Raises:
      UserError: there is none.
    """
    if name not in METHODS:
        raise UserError(f"config.method={name!r} is no method; there are {', '.join(METHODS)}.")
    return METHODS[name]
