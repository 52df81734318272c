"""DualRAG's settings."""

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
    """DualRAG's switches; the defaults are the paper's (section 4.3) and the released code's.

    Attributes:
      max_steps: rounds at most.
      num_retrieved: documents retrieved for a query.
      num_documents: documents kept for an entity.
      min_score: what a document must score above against the entity's name: 0 is the logit of a
        cross-encoder that takes it for relevant; a bi-encoder's cosines need a threshold of theirs.
      use_reasoner: off (Table 3, w/o R): a sentence at a time, as IRCoT, in the reasoner's place.
      use_entities: off (w/o EI): the thought is the query, a document's title its entity.
      use_outline: off (w/o KO): the documents themselves, under one heading.
      use_reranker: off: the best documents as retrieved.
      max_entities: entities of a round at most.
      max_keywords: queries of an entity at most.
      constrained: hold the JSON to its schema while it is decoded.
      max_retries: how often JSON that cannot be read is asked for again; the released code never
        gives up.
      few_shot: show worked examples.
      min_retrievals: ours: so many rounds retrieve whatever the reasoner says.
      entities: free (any name), or named (ours, for small models): the schema allows only names
        that question, thoughts and outline hold and that were not searched yet; each is a query.
      summarizer: model, or sentences (ours, without a language model): the sentences of D_e that
        the ranker puts first after the question and the outline.
      num_sentences: how many of these.
      reader_format: outline (the paper's: outline and thoughts in, reasoning out), or as for
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
            raise UserError("entities=named needs constrained.")
        if self.summarizer == "sentences" and not self.use_reranker:
            raise UserError("summarizer=sentences needs use_reranker.")

    @property
    def needs(self) -> Needs:
        """Only the roles that the switches leave."""
        json: tuple[Ability, ...] = ("json_schema",)
        constrained = [
            *(["reasoner"] if self.use_reasoner else []),
            *(["entity_identifier"] if self.use_entities else []),
        ]
        writes = self.use_outline and self.summarizer == "model"
        return Needs(
            roles=(
                "reasoner",
                *(["entity_identifier"] if self.use_entities else []),
                *(["summarizer"] if writes else []),
                "reader",
            ),
            abilities=dict.fromkeys(constrained, json) if self.constrained else {},
            rankers=("passages",) if self.use_reranker else (),
        )
