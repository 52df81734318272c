"""Measures entity equivalence over 100,000 claims within 24 GiB of memory.

Claims are synthetic: vectors of 384 numbers around 500 topics, each with a triple of two names from
the topic. A fifth of the names occur with and without an article, and some are abbreviated. The
vectors are reduced and clustered, and the claims are compared by rules, as in
launch/generate_questions.py (cirag_jax/grade). A language model would need one request per 40
claims of a cluster.

Results
  --claims=100000, one thread under load, 2026-11-26, Python 3.11, commits afa8936 (PCA) and 9369a4f
  (UMAP); processor time of clustering; everything else took 3 s:

            clustering   clusters   largest   model requests        peak memory
    PCA     557 s        732        1,594     4,167                 0.71 GiB
    UMAP    1,034 s      559        602       2,809                 2.29 GiB

  Mixtures and UMAP are fitted to 20,000 claims; mixtures fitted to all claims did not finish in 20
  minutes.
"""

import argparse
import json
import pathlib
import resource
import sys
import time

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.grade import clusters, equivalence, triples
from cirag_jax.grade.records import Claim, Group
from cirag_jax.io import standard_streams
from cirag_jax.types import Triple

_LIMIT_GIB = 24.0
_TOPICS = 500
_DIM = 384


def make_claims(
    count: int, rng: np.random.Generator
) -> tuple[np.ndarray, list[Claim], list[Triple]]:
    """Returns unit vectors [N, D], claims, and the triple of each claim."""
    center_TD = rng.normal(size=(_TOPICS, _DIM)).astype(np.float32)
    topic_N = rng.integers(_TOPICS, size=count)
    vector_ND = center_TD[topic_N] + 0.8 * rng.normal(size=(count, _DIM)).astype(np.float32)
    vector_ND /= np.linalg.norm(vector_ND, axis=1, keepdims=True)
    names = max(2, count // _TOPICS // 2)
    found = []
    for topic, ends, style in zip(
        topic_N, rng.integers(names, size=(count, 2)), rng.random(count), strict=True
    ):
        head, tail = (f"Kor Tal Bureau {topic} {chr(97 + end % 26)}{end}" for end in ends)
        head = f"the {head}" if style < 0.2 else "KTB" if style < 0.21 else head
        found.append(Triple(head, "works with", tail))
    claims = [Claim(f"d{at // 10}", at % 10, f"claim {at}") for at in range(count)]
    return vector_ND, claims, found


def main() -> None:
    """Prints the results as JSON; exits with 1 if the benchmark took too much memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=100_000)
    parser.add_argument("--reduction", choices=("pca", "umap"), default="pca")
    options = parser.parse_args()
    vector_ND, claims, stated = make_claims(options.claims, np.random.default_rng(0))
    facts = triples.facts(zip(stated, range(len(stated)), strict=True))
    start, before = time.perf_counter(), time.process_time()
    how = clusters.ClusterSettings(reduction=options.reduction)
    clustered = clusters.clusters(vector_ND, how)
    clustering = time.perf_counter() - start, time.process_time() - before
    settings = equivalence.EquivalenceSettings(kind="rules")
    start, before = time.perf_counter(), time.process_time()
    groups = [
        Group(cluster, nodes, kind)
        for cluster, places in equivalence.parts(clustered, facts, settings)
        for nodes, kind in equivalence.by_rules([facts[at] for at in places], claims)
    ]
    graph = equivalence.link(facts, clustered, groups, settings.most_names)
    linking = time.perf_counter() - start, time.process_time() - before
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = sorted(map(len, clustered))
    result = {
        "claims": len(claims),
        "reduction": options.reduction,
        "clusters": len(clustered),
        "median_cluster": sizes[len(sizes) // 2],
        "largest_cluster": sizes[-1],
        "requests_of_a_model": sum(-(-size // 40) for size in sizes),
        "groups": len(groups),
        "added_edges": len(graph.added),
        "clustering_seconds": round(clustering[0], 1),
        "clustering_processor_seconds": round(clustering[1], 1),
        "linking_seconds": round(linking[0], 1),
        "linking_processor_seconds": round(linking[1], 1),
        "peak_gib": round(gib, 2),
    }
    print(json.dumps(result))
    sys.exit(gib > _LIMIT_GIB)


if __name__ == "__main__":
    with standard_streams():
        main()
