"""The aligner's contrastive loss, for any choice of negatives.

The host chooses the negatives of each query and passes them as a matrix of counts. Negatives may
come from the question's pool, the micro-batch, a group or the complete batch, with or without false
negatives. The loss is therefore a single formula that does not depend on the sharding.
"""

import jax
import jax.numpy as jnp


def contrastive_loss(
    query_BD: jax.Array,
    candidate_CD: jax.Array,
    positive_B: jax.Array,
    count_BC: jax.Array,
    weight_B: jax.Array,
    temperature: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the cross-entropy of the positives among the candidates of each query, and metrics.

    This is equation 4 of KiRAG with ``g = exp(s / tau)``. The paper prints ``exp(s) / tau``, where
    the temperature cancels.

    Args:
      query_BD: float32 query embeddings.
      candidate_CD: float32 candidate embeddings, each distinct text once.
      positive_B: int32 index of each query's positive in ``candidate_CD``.
      count_BC: float32, how often the denominator of query B contains candidate C. 0 masks the
        candidate. The positive counts at least once.
      weight_B: float32, 1 for a query, 0 for a padding row.
      temperature: tau.

    Returns:
      The weighted mean loss, and the metrics ``accuracy`` (share of queries whose positive has the
      highest score) and ``positive_score`` (mean inner product with the positive).
    """
    scores_BC = jnp.einsum("bd,cd->bc", query_BD, candidate_CD, preferred_element_type=jnp.float32)
    logits_BC = jnp.where(
        count_BC > 0, scores_BC / temperature + jnp.log(jnp.maximum(count_BC, 1.0)), -jnp.inf
    )
    # Padding rows have no candidates. They get finite values, which have weight 0 below.
    logits_BC = jnp.where(weight_B[:, None] > 0, logits_BC, 0.0)
    is_positive_BC = jax.nn.one_hot(positive_B, scores_BC.shape[1])
    positive_score_B = (is_positive_BC * scores_BC).sum(axis=1)
    loss_B = jax.nn.logsumexp(logits_BC, axis=1) - positive_score_B / temperature
    correct_B = (jnp.argmax(logits_BC, axis=1) == positive_B).astype(jnp.float32)
    total = weight_B.sum()
    share_B = weight_B / jnp.where(total > 0, total, 1.0)

    def mean(x_B: jax.Array) -> jax.Array:
        return jnp.where(weight_B > 0, x_B * share_B, 0.0).sum()

    return mean(loss_B), {"accuracy": mean(correct_B), "positive_score": mean(positive_score_B)}
