"""Decoder language models in Flax NNX; `io.decoder_families.FAMILIES` lists the families.

They are pre-norm transformers with rotary positions, grouped-query attention and gated feed-forward
layers. `decoder_config` has the hyper-parameters, `decoder_params` the parameters, `decoder_layer`
one layer. The arithmetic is in pure functions of plain pytrees, so that one implementation of a
layer can be scanned (in training), unrolled (in generation), rematerialized and sharded.

``params["layers"]`` has one of two forms. One dictionary of arrays stacked over layers runs with
`jax.lax.scan`, and a 28-layer model compiles about as fast as one layer. A tuple of dictionaries,
one per layer (`decoder_params.unstack_layers`), is unrolled. On a CPU a scan copies the weights of
every layer at every step, which takes six times as long as decoding one token (SmolLM2-135M).

In a mixture of experts, layers may differ (`decoder_params.layers_with`). A parameter is then
stacked over the layers that have it, and the layers are always unrolled.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from cirag_jax import sharding
from cirag_jax.models import attention, block_attention, paged_cache
from cirag_jax.models.attention import Branches
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import (
    DEFAULT_LORA,
    Adapter,
    Layer,
    LoraOptions,
    multiply,
    rms_norm,
)
from cirag_jax.models.decoder_params import Params, arrange_layers, layers_with
from cirag_jax.models.paged_cache import Cache
from cirag_jax.models.rope import Rope, rope_tables


def _layer_windows(config: DecoderConfig) -> tuple[int, ...]:
    """Returns the window of each layer, with a huge number in place of 0."""
    windows = config.windows or (0,) * config.num_layers
    return tuple(window or (1 << 30) for window in windows)


def _layer_ropes(config: DecoderConfig) -> tuple[tuple[Rope | None, ...], tuple[int, ...]]:
    """Returns the distinct ropes, and the index of each layer's."""
    distinct = tuple(dict.fromkeys(config.ropes))
    indices = tuple(map(distinct.index, config.ropes))
    return distinct, indices * config.num_layers if len(indices) == 1 else indices


def _make_tables(config, positions_BT, totals_BT):
    dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    return rope_tables(positions_BT, dim, _layer_ropes(config)[0], totals_BT)


def _select(tables, rope: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tables of one rope; the index is traced in a scan."""
    cos, sin = (table[0] if table.shape[0] == 1 else table[rope] for table in tables)
    return cos, sin


def _totals(segments_BT: jax.Array, positions_BT: jax.Array, shared_B: jax.Array | None):
    """Returns the length of the segment of each token, ``[B, T]``.

    Segments with a shared prefix have the length of the longest segment of their row, because they
    attend to the same keys of the prefix.
    """
    if shared_B is not None:
        segments_BT = jnp.minimum(segments_BT, 1)
    largest = functools.partial(jax.ops.segment_max, num_segments=segments_BT.shape[1] + 1)
    segments_BT = jnp.maximum(segments_BT, 0)
    longest_BS = jax.vmap(largest)(positions_BT, segments_BT)
    return jnp.take_along_axis(longest_BS, segments_BT, axis=1) + 1


def _embed(config: DecoderConfig, params: Params, tokens_BT: jax.Array) -> jax.Array:
    x_BTD = sharding.lookup_embedding(params["embedding"], tokens_BT, config.d_model)
    x_BTD = x_BTD.astype(config.dtype)
    if config.embedding_scale != 1.0:
        x_BTD = x_BTD * jnp.asarray(config.embedding_scale, x_BTD.dtype)
    return x_BTD


def logits(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the logits of normed hidden states ``[..., D]``, fp32 ``[..., V]``."""
    head = params.get("lm_head")  # a tied layer may also be packed
    weight, axis = (params["embedding"], 1) if head is None else (head, 0)
    scores = multiply(hidden, weight, axis, jnp.float32)
    return attention.softcap(scores, config.final_softcap)


def forward(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    lengths_B: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    shared_B: jax.Array | None = None,
    adapter: Adapter | None = None,
    lora: LoraOptions = DEFAULT_LORA,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns hidden states after the final norm, ``hidden_BTD``, without a cache (for training).

    Args:
      config: hyper-parameters.
      params: weights with stacked layers or a tuple of layers.
      tokens_BT: int32 ids, padded on the right.
      lengths_B: int32 number of real tokens per row; None means all. Outputs at padding are
        undefined.
      positions_BT: int32 rotary positions; None means 0, 1, 2, ... in every row.
      segments_BT: int32 segments of packed rows, 0 for padding. Tokens attend only within their
        segment. Overrides ``lengths_B``, and needs ``positions_BT`` that restart in each segment.
      shared_B: int32 length of the prefix that all segments of a packed row share. Positions of
        each segment continue from the end of the prefix.
      adapter: LoRA factors, stacked like ``params["layers"]``.
      lora: scale and dropout of the adapter.
      dropout_key: key of the adapter's dropout; None disables it.
    """
    b, t = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    x_BTD = _embed(config, params, tokens_BT)
    if config.attention == "splash" and shared_B is not None:
        raise ValueError("attention 'splash' does not support shared prefixes")
    index = jnp.arange(t, dtype=jnp.int32)
    packed = segments_BT is not None
    if segments_BT is None:
        real_B = jnp.full(b, t, jnp.int32) if lengths_B is None else lengths_B
        segments_BT = (index[None] < real_B[:, None]).astype(jnp.int32)
    visible = block_attention.make_visibility(
        segments_BT, positions_BT, shared_B, causal=config.causal
    )
    totals_BT = _totals(segments_BT, positions_BT, shared_B) if config.rope_switch else None
    tables = _make_tables(config, positions_BT, totals_BT)

    def layer(x_BTD, p, pairs, window, rope, key):
        block = Layer(config, p, pairs, lora, key)
        heads = block.heads(block.norm(x_BTD, "attention_norm"), _select(tables, rope))
        if config.attention == "cudnn":
            mixed_BTNH = _attend_fused(config, *heads, visible, lengths_B, window, packed)
        elif config.attention == "splash":
            from cirag_jax.models import splash  # Only TPUs need Pallas, whose import takes long.

            size = config.windows[0] if config.windowed else 0
            mixed_BTNH = splash.attend(config.scoring, *heads, segments_BT, size)
        else:
            mixed_BTNH = _attend_sequence(config, *heads, visible, window)
        return block.after_attention(x_BTD, mixed_BTNH)

    x_BTD = _run_layers(config, layer, x_BTD, params, adapter, dropout_key)
    return rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm_offset)


def _attend_fused(config, q_BTNH, k_BTKH, v_BTKH, visible, lengths_B, window, packed):
    """Attention among the tokens of one call, with cuDNN.

    Packed rows pass a mask. cuDNN also supports offsets of segments, but these do not allow shared
    prefixes, and before jax 0.11.2 they read the wrong keys of grouped heads (jax#39521).
    """
    if config.attention_softcap is not None:
        raise ValueError(
            "attention 'cudnn' does not support attention_softcap; see `choose_attention`"
        )
    if packed or len(set(config.windows)) > 1:
        options = {"mask": visible.mask(q_BTNH.shape[1], window)[:, None]}
    else:
        options = {}
        if lengths_B is not None:
            options["key_value_seq_lengths"] = jnp.maximum(lengths_B, 1)
            options["query_seq_lengths"] = jnp.full_like(lengths_B, q_BTNH.shape[1])
        if config.windowed:
            size = config.windows[0] - 1
            options["local_window_size"] = (size, 0 if config.causal else size)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=config.score_scale,
        is_causal=config.causal,
        implementation="cudnn",
        **options,
    )


def _attend_sequence(config, q_BTNH, k_BTKH, v_BTKH, visible, window):
    """Attention among the tokens of one call, without a fused kernel."""
    length = q_BTNH.shape[1]
    if config.attention == "transposed" and length > block_attention.BLOCK:
        return block_attention.attend_visible(
            config.scoring, q_BTNH, k_BTKH, v_BTKH, visible, window
        )
    k_BKHS, v_BKSH = k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)
    mask_BTS = visible.mask(length, window)
    return attention.attend(config.scoring, q_BTNH, k_BKHS, v_BKSH, mask_BTS)


def _apply_remat(config: DecoderConfig, layer: Any, *, scanned: bool) -> Any:
    if config.remat == "off":
        return layer
    policy = None
    if config.remat == "projections":
        names = ("projection", block_attention.SAVED)
        policies = jax.checkpoint_policies
        policy = policies.save_from_both_policies(
            policies.save_only_these_names(*names), _is_fused_attention
        )
    return jax.checkpoint(layer, prevent_cse=not scanned, policy=policy)


def _is_fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether a primitive is cuDNN's attention.

    Its gradient needs both of its results: the output and the log-sum-exp of the scores. Only the
    output could have a name.
    """
    return "dot_product_attention_fwd" in primitive.name


def _split_layers(config: DecoderConfig, stacked: Any) -> tuple[dict[str, Any], ...]:
    columns = {}
    for name, tree in stacked.items():
        rows = range(len(layers_with(config, name)))
        columns[name] = [jax.tree.map(lambda x, row=row: x[row], tree) for row in rows]
    return arrange_layers(config, columns)


def _run_layers(config, layer, x_BTD, params, adapter, dropout_key):
    """Runs ``layer(x, p, pairs, window, rope, key)`` over all layers, rematerialized as configured.

    Equal layers that are stacked run as a scan.
    """
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    windows, layers = _layer_windows(config), params["layers"]
    _, ropes = _layer_ropes(config)
    pairs = {} if adapter is None else adapter["layers"]
    if not isinstance(layers, tuple) and config.dense_layers:
        layers, pairs = (_split_layers(config, stacked) for stacked in (layers, pairs))
    if not isinstance(layers, tuple):
        source, select = layers, lambda x, p: p
        if jax.default_backend() == "cpu" and config.param_dtype == "bfloat16":
            source = jnp.arange(config.num_layers, dtype=jnp.int32)
            select = functools.partial(_read_layer, layers)

        def run(x, source, *row):
            return layer(x, select(x, source), *row)

        run = _apply_remat(config, run, scanned=True)
        settings = (jnp.asarray(each, jnp.int32) for each in (windows, ropes))
        inputs = (source, pairs, *settings, keys)
        return jax.lax.scan(lambda x, row: (run(x, *row), None), x_BTD, inputs)[0]
    layer = _apply_remat(config, layer, scanned=False)
    for i, p in enumerate(layers):
        key = None if keys is None else keys[i]
        x_BTD = layer(x_BTD, p, pairs[i] if pairs else {}, windows[i], ropes[i], key)
    return x_BTD


def _read_layer(layers: Any, x_BTD: jax.Array, index: jax.Array) -> Any:
    """Returns the parameters of the layer ``index``, whose input is ``x_BTD``.

    XLA on a CPU slices and multiplies bf16 parameters in fp32. Without the barrier, it converts all
    layers before the scan, because that does not depend on the step.
    """
    layers, _ = jax.lax.optimization_barrier((layers, x_BTD))
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), layers)


def empty_cache(config: DecoderConfig, pages: int, size: int) -> Cache:
    """Returns a zeroed key-value cache of ``pages`` pages with ``size`` tokens each."""

    def zeros(shape):
        array = jnp.zeros(shape, config.cache_dtype)
        return sharding.constrain(array, None, "kv_heads", None, None)

    k, h = config.num_kv_heads, config.head_dim
    shapes = {"k": (pages, k, h, size), "v": (pages, k, size, h)}

    def build():
        layers = range(config.num_layers)
        return {name: tuple(zeros(shape) for _ in layers) for name, shape in shapes.items()}

    return jax.jit(build)()


def forward_cached(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: Cache,
    tables_BN: jax.Array | None,
    *,
    branch: int = 0,
    is_start: bool = False,
    totals_B: jax.Array | None = None,
    adapter: Adapter | None = None,
    lora: LoraOptions = DEFAULT_LORA,
) -> tuple[jax.Array, Cache, tuple[jax.Array, jax.Array]]:
    """Runs new tokens with a key-value cache.

    Args:
      config: hyper-parameters.
      params: weights with unstacked layers (`decoder_params.unstack_layers`).
      tokens_BT: int32 new tokens.
      start_B: int32 position of the first new token of each row. Cached tokens from there on are
        overwritten or masked.
      cache: keys and values; donate it under `jax.jit`.
      tables_BN: int32 pages of each row in order; None means that row i has page i. Writes beyond a
        row's pages, or to a page that does not exist, are dropped.
      branch: if above 0, the new tokens of a row are alternative branches of this length. Each
        branch continues from the cached tokens and does not attend to the other branches.
      is_start: whether every row starts at position 0, so that cuDNN need not read cached keys.
      totals_B: int32 length of each row's text, of which the new tokens may be a part; it matters
        only with `DecoderConfig.rope_switch`. None means that the text ends with the new tokens.
      adapter: LoRA factors with unstacked layers.
      lora: scale of the adapter.

    Returns:
      ``hidden_BTD`` after the final norm, the cache with the new keys and values, and the last
        layer's queries ``q_BTNH`` and mask ``mask_BTS`` (for `attention.probabilities`).
    """
    size = cache["v"][0].shape[2]
    length = size if tables_BN is None else tables_BN.shape[1] * size
    slots_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    branches = Branches(start_B, branch) if branch else None
    # On several devices, cuDNN needs equal shardings of queries and cached keys.
    fused = config.attention == "cudnn" and jax.sharding.get_abstract_mesh().size <= 1
    fused = fused and tokens_BT.shape[1] > 1
    distance_BTS = attention.distances(slots_BT, jnp.arange(length, dtype=jnp.int32), branches)
    positions_BT = slots_BT if branches is None else slots_BT - branches.skipped(slots_BT)
    totals_B = positions_BT[:, -1] + 1 if totals_B is None else totals_B
    tables = _make_tables(config, positions_BT, totals_B[:, None])
    _, ropes = _layer_ropes(config)
    x_BTD = _embed(config, params, tokens_BT)
    at_BT = paged_cache.locate_slots(cache, tables_BN, slots_BT)
    keys, values = list(cache["k"]), list(cache["v"])
    q_BTNH = mask_BTS = None
    for i, window in enumerate(_layer_windows(config)):
        pairs = adapter["layers"][i] if adapter is not None else {}
        block = Layer(config, params["layers"][i], pairs, lora, None)
        q_BTNH, k_BTKH, v_BTKH = block.heads(
            block.norm(x_BTD, "attention_norm"), _select(tables, ropes[i])
        )
        new = paged_cache.pack_pair(k_BTKH, v_BTKH, keys[i].dtype)
        keys[i], values[i] = paged_cache.write_slots(keys[i], values[i], at_BT, *new)
        mask_BTS = distance_BTS >= 0
        if config.windowed:
            mask_BTS &= distance_BTS < window
        if config.attention == "transposed" and tables_BN is not None:
            mixed_BTNH = paged_cache.attend_pages(
                config.scoring, q_BTNH, keys[i], values[i], tables_BN, slots_BT, window, branches
            )
        elif fused and is_start and not config.windowed:
            mixed_BTNH = jax.nn.dot_product_attention(
                q_BTNH, *new, scale=config.score_scale, is_causal=True, implementation="cudnn"
            )
        else:
            cached = keys[i], values[i]
            if tables_BN is not None:
                cached = paged_cache.read_pages(*cached, tables_BN)
            k_BKHS, v_BKSH = map(paged_cache.unpack, cached)
            if fused:
                mixed_BTNH = _attend_cached(config, q_BTNH, k_BKHS, v_BKSH, slots_BT, mask_BTS)
            else:
                mixed_BTNH = attention.attend(config.scoring, q_BTNH, k_BKHS, v_BKSH, mask_BTS)
        x_BTD = block.after_attention(x_BTD, mixed_BTNH)
    hidden_BTD = rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm_offset)
    assert q_BTNH is not None and mask_BTS is not None
    return hidden_BTD, {"k": tuple(keys), "v": tuple(values)}, (q_BTNH, mask_BTS)


def _attend_cached(config, q_BTNH, k_BKHS, v_BKSH, slots_BT, mask_BTS):
    """Attention of several tokens to cached tokens, with cuDNN."""
    k_BSKH, v_BSKH = k_BKHS.transpose(0, 3, 1, 2), v_BKSH.transpose(0, 2, 1, 3)
    # cuDNN adds the mask to the scores, so that NaN in unwritten slots or foreign pages would last.
    written_BS = jnp.arange(k_BSKH.shape[1]) <= slots_BT[:, -1:]
    k_BSKH = jnp.where(written_BS[:, :, None, None], k_BSKH, 0)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_BTS[:, None],
        scale=config.score_scale,
        implementation="cudnn",
    )
