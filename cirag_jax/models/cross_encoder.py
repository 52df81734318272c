"""Cross-encoders in Flax NNX: an encoder of a pair of texts, and a head that scores the pair.

The head is the same as in Hugging Face's sequence classifiers: a dense layer over the state of the
first token, an activation, and an inner product for each label. The names of its tensors differ:
``pooler`` and ``classifier`` in BERT, ``classifier.dense`` and ``classifier.out_proj`` in
XLM-RoBERTa, MPNet and ``bge-reranker-v2-m3``, ``head`` and ``classifier`` in ModernBERT.

The score is a logit. Training uses binary cross-entropy, so 0 means p = 0.5. With several labels
(such as entailment, neutral and contradiction), the score is the log-odds of one of them: its
logistic function is the probability of the label.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.activations import TRANSFORMERS_NAMES, Activation, activate
from cirag_jax.models.encoder import Encoder, add_parameters
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import folders, pretrained, tokenizer_files, weights
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.io.tensor_files import check_tensor, fetch, read_tensors
from cirag_jax.models.layers import drop_units, layer_norm
from cirag_jax.models.pooling import Pooling, pool_tokens
from cirag_jax.sharding import ShapesAndAxes


@dataclasses.dataclass(frozen=True)
class Head:
    """Hyper-parameters of a head; hashable, so usable as a static argument.

    Attributes:
      num_labels: number of labels.
      label: index of the label whose log-odds is the score; ignored with one label.
      activation: activation of the dense layer.
      pooling: input of the dense layer: first token, or mean over real tokens.
      dense_bias, norm, norm_bias: whether the dense layer has a bias, and whether a layer norm with
        a bias follows the activation (ModernBERT).
      drops_input: whether dropout is also applied to the input (RoBERTa, MPNet).
    """

    num_labels: int = 1
    label: int = 0
    activation: Activation = "tanh"
    pooling: Pooling = "cls"
    dense_bias: bool = True
    norm: bool = False
    norm_bias: bool = False
    drops_input: bool = False


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
_MODERNBERT_HEAD = {
    "dense_kernel": "head.dense.weight",
    "dense_bias": "head.dense.bias",
    "norm_scale": "head.norm.weight",
    "norm_bias": "head.norm.bias",
    "score_kernel": "classifier.weight",
    "score_bias": "classifier.bias",
}
# model_type -> architecture, prefix of the encoder's tensors, and names of the head's tensors.
_FAMILIES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "bert": ("BertForSequenceClassification", "bert.", _BERT_HEAD),
    "roberta": ("RobertaForSequenceClassification", "roberta.", _ROBERTA_HEAD),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", "roberta.", _ROBERTA_HEAD),
    "camembert": ("CamembertForSequenceClassification", "roberta.", _ROBERTA_HEAD),
    "mpnet": ("MPNetForSequenceClassification", "mpnet.", _ROBERTA_HEAD),
    "modernbert": ("ModernBertForSequenceClassification", "model.", _MODERNBERT_HEAD),
    "nomic_bert": ("NomicBertForSequenceClassification", "nomic_bert.", _BERT_HEAD),
    "gte": ("GteForSequenceClassification", "gte.", _BERT_HEAD),
    "jina_embeddings_v3": (
        "JinaEmbeddingsV3ForSequenceClassification",
        "roberta.",
        _ROBERTA_HEAD,
    ),
}
ARCHITECTURES = {family: architecture for family, (architecture, _, _) in _FAMILIES.items()}


def head_parameters(config: EncoderConfig, head: Head) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of the head."""
    d = config.d_model
    labels = () if head.num_labels == 1 else (head.num_labels,)
    # The head is small, so it is replicated on every mesh.
    parameters: ShapesAndAxes = {
        "dense_kernel": ((d, d), (None, None)),
        "score_kernel": ((d, *labels), (None, *(None for _ in labels))),
        "score_bias": ((head.num_labels,), (None,)),
    }
    if head.dense_bias:
        parameters["dense_bias"] = ((d,), (None,))
    if head.norm:
        parameters["norm_scale"] = ((d,), (None,))
    if head.norm and head.norm_bias:
        parameters["norm_bias"] = ((d,), (None,))
    return parameters


class CrossEncoder(nnx.Module):
    """An `Encoder` and a scoring head."""

    dense_kernel: nnx.Param
    dense_bias: nnx.Param
    norm_scale: nnx.Param
    norm_bias: nnx.Param
    score_kernel: nnx.Param
    score_bias: nnx.Param

    def __init__(self, config: EncoderConfig, head: Head | None = None, *, rngs: nnx.Rngs):
        """Creates random parameters; by default, the head is that of BERT with one label."""
        self.config, self.head = config, head or Head()
        self.encoder = Encoder(config, rngs=rngs)
        add_parameters(self, head_parameters(config, self.head), config, rngs)

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
        head, encoder_key, first_key, second_key = self.head, None, None, None
        if dropout_key is not None:
            encoder_key, first_key, second_key = jax.random.split(dropout_key, 3)
        rate = self.config.hidden_dropout
        hidden_BTD = self.encoder(tokens_BT, mask_BT, types_BT=types_BT, dropout_key=encoder_key)
        state_BD = pool_tokens(hidden_BTD, mask_BT, head.pooling)
        if head.drops_input:
            state_BD = drop_units(state_BD, rate, first_key)
        state_BD = state_BD @ self.dense_kernel[...]
        if head.dense_bias:
            state_BD += self.dense_bias[...]
        state_BD = activate(state_BD, head.activation)
        if head.norm:
            bias_D = self.norm_bias[...] if head.norm_bias else None
            eps = self.config.layer_norm_eps
            normed_B1D: Any = layer_norm(state_BD[:, None], self.norm_scale[...], bias_D, eps)
            state_BD = normed_B1D[:, 0]
        state_BD = drop_units(state_BD, rate, second_key)
        logits = state_BD @ self.score_kernel[...] + self.score_bias[...]
        if head.num_labels == 1:
            return logits
        others_BL = jnp.delete(logits, head.label, axis=1, assume_unique_indices=True)
        return logits[:, head.label] - jax.nn.logsumexp(others_BL, axis=1)


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
    label: str | None = None,
    max_length: int | None = None,
    dropout: float = 0.0,
    remat: bool = False,
) -> PairEncoder:
    """Loads a cross-encoder, or an encoder with a new head; see `pretrained.load_encoder`.

    ``new_head`` is the seed for head parameters that the folder lacks; None requires all of them.
    ``label`` is the name or number of the label that is scored, for models with several labels.
    ``max_length`` overrides the token limit in the folder.
    """
    folder = folders.resolve_model_folder(spec)
    config, raw = pretrained.read_config(folder)
    config = pretrained.with_compute_options(config, dtype=dtype, dropout=dropout, remat=remat)
    head, tensors = _read_head(folder, config, raw, new_head, label)
    graphdef, state = _load_state(folder, config, head, tensors, raw["model_type"], mesh)
    limit = tokenizer_files.read_max_length(folder, config)
    tokenizer = tokenizer_files.read_tokenizer(folder, config.vocab_size)
    types = max(tokenizer.encode("", "").type_ids, default=0) + 1
    if has_pair_types(raw["model_type"]) and types > config.type_vocab_size:
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


def has_pair_types(family: str) -> bool:
    """Returns whether the second text of a pair has other token types than the first."""
    return family in ("bert", "nomic_bert")


def _load_state(
    folder: Path,
    config: EncoderConfig,
    head: Head,
    tensors: Mapping[str, np.ndarray],
    family: str,
    mesh: jax.sharding.Mesh | None,
) -> tuple[nnx.GraphDef, nnx.State]:
    _, encoder_state = weights.load_state(
        folder, config, family, mesh=mesh, ignored=(*weights.IGNORED, "classifier.*")
    )
    encoder: dict[Any, Any] = {
        ("encoder", *path): v for path, v in nnx.to_flat_state(encoder_state)
    }
    abstract = nnx.eval_shape(lambda: CrossEncoder(config, head, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        if path not in encoder:
            variable = sharding.place_variable(variable, tensors[str(path[-1])], mesh)
        filled.append((path, encoder.get(path, variable)))
    return graphdef, nnx.from_flat_state(filled)


def _read_head(
    folder: Path,
    config: EncoderConfig,
    raw: Mapping[str, Any],
    new_head: int | None,
    label: str | None,
) -> tuple[Head, dict[str, np.ndarray]]:
    """Returns the head's hyper-parameters and parameters."""
    family = raw["model_type"]
    names, tensors = _FAMILIES[family][2], {}
    for full_name, file, array in read_tensors(folder):
        name = weights.strip_prefix(full_name)  # the pooler has a prefix, the classifier has none
        if name in names.values():
            tensors[name] = check_tensor(array, full_name, file)
    scores = tensors.get(names["score_bias"])
    head = _head_of(family, raw, 1 if scores is None else scores.size, f"{folder}/config.json")
    if head.num_labels > 1:
        head = dataclasses.replace(head, label=_find_label(folder, raw, head.num_labels, label))
    elif label is not None:
        raise UserError(f"{folder} has one label, so label {label!r} cannot be chosen")
    values = {}
    rng = np.random.default_rng(new_head)
    for name, (shape, _) in head_parameters(config, head).items():
        source = names[name]
        array = tensors.get(source)
        if array is None and new_head is None:
            raise UserError(
                f"{folder} is not a cross-encoder: tensor {source} is missing; train one from an "
                "encoder with launch/train.py --config=configs/cross_encoder.py"
            )
        if array is None:
            noise = config.initializer_range * rng.normal(size=shape).astype(np.float32)
            constant = {"bias": 0, "scale": 1}.get(name.rpartition("_")[2])
            values[name] = noise if constant is None else 0 * noise + constant
            continue
        array = array.T if name.endswith("kernel") else array
        if array.size != np.prod(shape):
            raise UserError(f"{folder}: tensor {source} has shape {array.shape}; expected {shape}")
        values[name] = np.ascontiguousarray(array.reshape(shape), np.float32)
    return head, values


def _head_of(family: str, raw: Mapping[str, Any], num_labels: int, where: str) -> Head:
    if family != "modernbert":
        return Head(num_labels, drops_input=_FAMILIES[family][2] is _ROBERTA_HEAD)
    fields = ConfigFields(raw, where)
    pooling = raw.get("classifier_pooling") or "cls"
    if pooling not in get_args(Pooling):
        raise fields.unsupported("classifier_pooling", pooling, ", ".join(get_args(Pooling)))
    activation = raw.get("classifier_activation") or "gelu"
    if not isinstance(activation, str) or activation not in TRANSFORMERS_NAMES:
        supported = ", ".join(TRANSFORMERS_NAMES)
        raise fields.unsupported("classifier_activation", activation, supported)
    return Head(
        num_labels,
        activation=TRANSFORMERS_NAMES[activation],
        pooling=pooling,
        dense_bias=fields.flag("classifier_bias", False),
        norm=True,
        norm_bias=fields.flag("norm_bias", False),
    )


def score_bias(family: str) -> str:
    """Returns the name of the tensor that has one element per label."""
    return _FAMILIES[family][2]["score_bias"]


def label_names(raw: Mapping[str, Any], num_labels: int) -> list[str]:
    """Returns the names of labels in a parsed ``config.json``; LABEL_0 and so on by default."""
    names = raw.get("id2label")
    names = names if isinstance(names, dict) else {}
    return [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels)]


def _find_label(folder: Path, raw: Mapping[str, Any], num_labels: int, label: str | None) -> int:
    names = label_names(raw, num_labels)
    listed = f"{folder} has {num_labels} labels ({', '.join(names)})"
    if label is None:
        raise UserError(f"{listed}; name the one that is scored in the field label")
    folded = [name.lower() for name in names]
    if label.lower() in folded:
        return folded.index(label.lower())
    if label.isdecimal() and int(label) < num_labels:
        return int(label)
    raise UserError(f"{listed}, but not {label!r}")


def to_tensors(state: Any, config: EncoderConfig, family: str) -> dict[str, np.ndarray]:
    """Returns Hugging Face's name -> host array for all parameters; the inverse of loading."""
    flat: dict[Any, Any] = {tuple(path): v for path, v in nnx.to_flat_state(state)}
    encoder = [(path[1:], v) for path, v in flat.items() if path[0] == "encoder"]
    _, prefix, names = _FAMILIES[family]
    tensors = weights.to_tensors(nnx.from_flat_state(encoder), config, family, published=True)
    tensors = {prefix + name: array for name, array in tensors.items()}
    for name, source in names.items():
        if (name,) not in flat:
            continue
        array = np.asarray(fetch(flat[(name,)].get_value()), np.float32)
        if name.endswith("kernel"):
            array = array.reshape(len(array), -1).T
        full = prefix + source if source.startswith("pooler.") else source
        tensors[full] = np.ascontiguousarray(array)
    return tensors
