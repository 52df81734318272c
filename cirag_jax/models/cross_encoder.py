"""Cross-encoders in Flax NNX: an encoder of a pair of texts, and a head that scores the pair.

The head is the same as in Hugging Face's sequence classifiers with one label: a dense layer over
the state of the first token, tanh, and an inner product. Only the names of its tensors differ:
``pooler`` and ``classifier`` in BERT, ``classifier.dense`` and ``classifier.out_proj`` in
XLM-RoBERTa, MPNet and ``bge-reranker-v2-m3``. The score is a logit. Training uses binary
cross-entropy, so 0 means p = 0.5.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.encoder import Encoder, EncoderConfig, add_parameters, drop_units
from cirag_jax.models.io import folders, pretrained, weights
from cirag_jax.models.io.tensor_files import check_tensor, fetch, read_tensors
from cirag_jax.sharding import ShapesAndAxes

# Parameter of the head -> its tensor in the checkpoint; kernels in torch are (out, in).
_BERT_HEAD = {
    "dense_kernel": "pooler.dense.weight",
    "dense_bias": "pooler.dense.bias",
    "score_kernel": "classifier.weight",
    "score_bias": "classifier.bias",
}
_ROBERTA_HEAD = {
    "dense_kernel": "classifier.dense.weight",
    "dense_bias": "classifier.dense.bias",
    "score_kernel": "classifier.out_proj.weight",
    "score_bias": "classifier.out_proj.bias",
}
ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
    "camembert": "CamembertForSequenceClassification",
    "mpnet": "MPNetForSequenceClassification",
}
# model_type -> prefix of the encoder's tensors; "roberta." for all others.
_PREFIXES = {"bert": "bert.", "mpnet": "mpnet."}


def _head_tensors(family: str) -> Mapping[str, str]:
    return _BERT_HEAD if family == "bert" else _ROBERTA_HEAD


def head_parameters(config: EncoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of the head."""
    d = config.d_model
    # The head is small, so it is replicated on every mesh.
    return {
        "dense_kernel": ((d, d), (None, None)),
        "dense_bias": ((d,), (None,)),
        "score_kernel": ((d,), (None,)),
        "score_bias": ((1,), (None,)),
    }


class CrossEncoder(nnx.Module):
    """An `Encoder` and a scoring head."""

    dense_kernel: nnx.Param
    dense_bias: nnx.Param
    score_kernel: nnx.Param
    score_bias: nnx.Param

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        add_parameters(self, head_parameters(config), config, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array,
        types_BT: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of a padded batch of pairs, ``logit_B`` in fp32.

        For the arguments, see `Encoder.__call__`.
        """
        encoder_key = first_key = second_key = None
        if dropout_key is not None:
            encoder_key, first_key, second_key = jax.random.split(dropout_key, 3)
        rate = self.config.hidden_dropout
        hidden_BTD = self.encoder(tokens_BT, mask_BT, types_BT=types_BT, dropout_key=encoder_key)
        first_BD = hidden_BTD[:, 0].astype(jnp.float32)
        if self.config.position_offset:  # RoBERTa and MPNet also apply dropout to the head's input
            first_BD = drop_units(first_BD, rate, first_key)
        dense_BD = jnp.tanh(first_BD @ self.dense_kernel[...] + self.dense_bias[...])
        dense_BD = drop_units(dense_BD, rate, second_key)
        return dense_BD @ self.score_kernel[...] + self.score_bias[...]


class PairEncoder(pretrained.PretrainedModel):
    """A `CrossEncoder` with its tokenizer."""


def apply(
    graphdef: nnx.GraphDef,
    state: Any,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    types_BT: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns ``logit_B`` in fp32; ``graphdef, state = nnx.split(CrossEncoder(...))``."""
    model = nnx.merge(graphdef, state)
    return model(tokens_BT, mask_BT, types_BT, dropout_key=dropout_key)


def load_cross_encoder(
    spec: str,
    *,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    name: str | None = None,
    new_head: int | None = None,
    max_length: int | None = None,
    dropout: float = 0.0,
    remat: bool = False,
) -> PairEncoder:
    """Loads a cross-encoder, or an encoder with a new head; see `pretrained.load_encoder`.

    ``new_head`` is the seed for head parameters that the folder lacks; None requires all of them.
    ``max_length`` overrides the token limit in the folder.
    """
    folder = folders.resolve_model_folder(spec)
    config, raw = pretrained.read_config(folder)
    config = pretrained.with_compute_options(
        config, dtype=dtype, hidden_dropout=dropout, attention_dropout=dropout, remat=remat
    )
    graphdef, state = _load_state(folder, config, raw["model_type"], mesh, new_head)
    limit = pretrained.read_max_length(folder, config)
    tokenizer = pretrained.read_tokenizer(folder, config.vocab_size)
    types = max(tokenizer.encode("", "").type_ids, default=0) + 1
    if raw["model_type"] == "bert" and types > config.type_vocab_size:
        raise UserError(
            f"{folder}: the tokenizer uses {types} token types for pairs, but field "
            f"type_vocab_size of config.json is {config.type_vocab_size}"
        )
    return PairEncoder(
        graphdef=graphdef,
        state=state,
        config=config,
        tokenizer=tokenizer,
        max_length=min(max_length or limit, config.max_length),
        model_type=raw["model_type"],
        source=name or spec,
        folder=folder,
        revision=folders.weights_revision(folder),
        hf_config=raw,
    )


def _load_state(
    folder: Path,
    config: EncoderConfig,
    family: str,
    mesh: jax.sharding.Mesh | None,
    new_head: int | None,
) -> tuple[nnx.GraphDef, nnx.State]:
    head = _read_head(folder, config, family, new_head)
    _, encoder_state = weights.load_state(
        folder, config, family, mesh=mesh, ignored=(*weights.IGNORED, "classifier.*")
    )
    encoder: dict[Any, Any] = {
        ("encoder", *path): v for path, v in nnx.to_flat_state(encoder_state)
    }
    abstract = nnx.eval_shape(lambda: CrossEncoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        if path not in encoder:
            variable = sharding.place_variable(variable, head[str(path[-1])], mesh)
        filled.append((path, encoder.get(path, variable)))
    return graphdef, nnx.from_flat_state(filled)


def _read_head(
    folder: Path, config: EncoderConfig, family: str, new_head: int | None
) -> dict[str, np.ndarray]:
    tensors = {}
    for full_name, file, array in read_tensors(folder):
        name = weights.strip_prefix(full_name)  # the pooler has a prefix, the classifier has none
        if name.startswith(("classifier.", "pooler.")):
            tensors[name] = check_tensor(array, full_name, file)
    head = {}
    rng = np.random.default_rng(new_head)
    for name, (shape, _) in head_parameters(config).items():
        source = _head_tensors(family)[name]
        array = tensors.get(source)
        if array is None and new_head is None:
            raise UserError(
                f"{folder} is not a cross-encoder: tensor {source} is missing; train one from an "
                "encoder with launch/train.py --config=configs/cross_encoder.py"
            )
        if array is None:
            noise = rng.normal(size=shape).astype(np.float32)
            head[name] = 0 * noise if name.endswith("bias") else config.initializer_range * noise
            continue
        if name.startswith("score") and array.shape[0] != 1:
            raise UserError(f"{folder} scores {array.shape[0]} labels; expected one")
        array = array.T if name == "dense_kernel" else array
        if array.size != np.prod(shape):
            raise UserError(f"{folder}: tensor {source} has shape {array.shape}; expected {shape}")
        head[name] = np.ascontiguousarray(array.reshape(shape), np.float32)
    return head


def to_tensors(state: Any, config: EncoderConfig, family: str) -> dict[str, np.ndarray]:
    """Returns Hugging Face's name -> host array for all parameters; the inverse of loading."""
    flat: dict[Any, Any] = {tuple(path): v for path, v in nnx.to_flat_state(state)}
    encoder = [(path[1:], v) for path, v in flat.items() if path[0] == "encoder"]
    prefix = _PREFIXES.get(family, "roberta.")
    tensors = {
        prefix + name: array
        for name, array in weights.to_tensors(nnx.from_flat_state(encoder), config, family).items()
    }
    for name, source in _head_tensors(family).items():
        array = np.asarray(fetch(flat[(name,)].get_value()), np.float32)
        array = array.T if name == "dense_kernel" else array
        array = array[None] if name == "score_kernel" else array
        full = prefix + source if source.startswith("pooler.") else source
        tensors[full] = np.ascontiguousarray(array)
    return tensors
