"""The settings of DualRAG."""

import dataclasses
from typing import Literal

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Ability
from cirag_jax.methods.common import reading_prompts
from cirag_jax.runtime.requests import Needs
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class DualragConfig:
    """DualRAG's settings, with the defaults of the paper (section 4.3) and its code.

    Attributes:
      max_steps: maximum number of rounds.
      num_retrieved: documents retrieved per query.
      num_documents: documents kept per entity.
      min_score: drop documents whose score for the entity's name is this or less; 0 suits the
        logits of a cross-encoder, but not the cosines of a bi-encoder.
      use_reasoner: off replaces the reasoner with one sentence per round, as in IRCoT (Table 3, w/o
        R).
      use_entities: off uses the thought as the query, and titles as entities (w/o EI).
      use_outline: off shows the documents themselves, under one heading (w/o KO).
      use_reranker: off keeps the best documents in the order of retrieval.
      max_entities: maximum number of entities per round.
      max_keywords: maximum number of queries per entity.
      max_thought: maximum characters of a thought (ours, for small models); 0 is no limit (paper).
      constrained: force JSON responses to follow their schema.
      max_retries: how often unreadable JSON is requested again (released code: without limit).
      few_shot: show worked examples.
      min_retrievals: number of rounds, counted from the first, that retrieve regardless of the
        reasoner (ours).
      entities: allowed entities: free (any name), or named (ours, for small models). With named,
        the schema allows only names in the question, thoughts and outline that were not searched
        before; each name is also a query.
      summarizer: model, or sentences (ours; no language model). With sentences, the ranker selects
        the sentences nearest to the question and the outline.
      num_sentences: number of sentences per entity with summarizer=sentences.
      reader_format: outline (the paper's: outline and thoughts, then reasoning), or a format of
        CIRAG's reader: thought, chain, brief.
    """

    max_steps: PositiveInt = 5
    num_retrieved: PositiveInt = 50
    num_documents: PositiveInt = 10
    min_score: float = 0.0
    use_reasoner: bool = True
    use_entities: bool = True
    use_outline: bool = True
    use_reranker: bool = True
    max_entities: PositiveInt = 5
    max_keywords: PositiveInt = 4
    max_thought: Count = 0
    constrained: bool = True
    max_retries: Count = 1
    few_shot: bool = True
    min_retrievals: Count = 0
    entities: Literal["free", "named"] = "free"
    summarizer: Literal["model", "sentences"] = "model"
    num_sentences: PositiveInt = 2
    reader_format: Literal["outline", reading_prompts.ReaderFormat] = "outline"

    def __post_init__(self):
        check_fields(self)
        if self.entities == "named" and not self.constrained:
            raise UserError("entities=named needs constrained=true.")
        if self.summarizer == "sentences" and not self.use_reranker:
            raise UserError("summarizer=sentences needs use_reranker=true.")

    @property
    def needs(self) -> Needs:
        """The models that the enabled components need."""
        has_summarizer = self.use_outline and self.summarizer == "model"
        identifier = ("entity_identifier",) if self.use_entities else ()
        writers_of_json = (*(("reasoner",) if self.use_reasoner else ()), *identifier)
        json: tuple[Ability, ...] = ("json_schema",)
        return Needs(
            roles=("reasoner", *identifier, *(("summarizer",) if has_summarizer else ()), "reader"),
            abilities=dict.fromkeys(writers_of_json, json) if self.constrained else {},
            rankers=("passages",) if self.use_reranker else (),
        )
