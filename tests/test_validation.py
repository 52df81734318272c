"""Checks of settings against the type annotations of their fields."""

import dataclasses
from typing import Annotated, Literal

import pytest
from ml_collections import ConfigDict
from msgspec import Meta

from cirag_jax.errors import UserError
from cirag_jax.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from cirag_jax.validation import check_fields

Unit = Literal["triple", "sentence"]


@dataclasses.dataclass
class Block:
    num_passages: PositiveInt = 10
    units: Unit = "triple"


@dataclasses.dataclass
class Settings:
    units: Literal["passage", Unit] = "triple"
    pools: tuple[Unit, ...] = ("triple", "sentence")
    corpus: Unit | None = None
    size: Literal["auto"] | int = "auto"
    name: str = ""
    retry: bool = True
    num_passages: PositiveInt = 10
    limit: Count = 0
    budget: PositiveInt | None = None
    bonus: NonNegativeFloat = 0.0
    temperature: PositiveFloat = 1.0
    cutoff: UnitInterval = 0.8
    share: Annotated[float, Meta(le=0.5)] = 0.0
    decay: Annotated[float, Meta(lt=1)] = 0.0
    block: Block = dataclasses.field(default_factory=Block)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"units": "word"}, "units='word' is not one of passage, triple, sentence."),
        ({"units": None}, "units=None is not one of passage, triple, sentence."),
        ({"units": ["triple"]}, "units=['triple'] is not one of passage, triple, sentence."),
        ({"pools": ("word",)}, "pools=('word',) must be a list of triple, sentence."),
        ({"pools": "triple"}, "pools='triple' must be a list of triple, sentence."),
        ({"corpus": "all"}, "corpus='all' is not one of triple, sentence, null."),
        ({"size": 0.5}, "size=0.5 is not one of auto, an integer."),
        ({"name": 1}, "name=1 must be a string."),
        ({"retry": "yes"}, "retry='yes' must be true or false."),
        ({"num_passages": 0}, "num_passages=0 must be at least 1."),
        ({"num_passages": 1.5}, "num_passages=1.5 must be an integer."),
        ({"num_passages": True}, "num_passages=True must be an integer."),
        ({"limit": -1}, "limit=-1 must not be negative."),
        ({"budget": 0}, "budget=0 must be at least 1."),
        ({"budget": "much"}, "budget='much' is not one of an integer, null."),
        ({"bonus": -0.5}, "bonus=-0.5 must not be negative."),
        ({"bonus": "high"}, "bonus='high' must be a number."),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0."),
        ({"cutoff": 80}, "cutoff=80 must lie between 0 and 1."),
        ({"cutoff": float("nan")}, "cutoff=nan must lie between 0 and 1."),
        ({"share": 0.75}, "share=0.75 must be at most 0.5."),
        ({"decay": 1.0}, "decay=1.0 must be below 1."),
        ({"block": Block(num_passages=0)}, "block.num_passages=0 must be at least 1."),
    ],
)
def test_check_fields_excluded_value_names_field_and_requirement(values, message):
    with pytest.raises(UserError) as error:
        check_fields(Settings(**values))
    assert str(error.value) == message


def test_check_fields_allowed_values_pass():
    check_fields(Settings())
    check_fields(
        Settings("sentence", ("triple",), "triple", 3, "x", False, 1, 1, 1, 1, 0.1, 1, -1.0, -1.0)
    )


def test_check_fields_config_block_is_checked_against_a_dataclass():
    block = ConfigDict({"num_passages": 3, "units": "triple", "model": "m"})
    check_fields(block, Block, "config.search.")
    block.units = "word"
    with pytest.raises(UserError, match=r"^config\.search\.units='word' is not one of triple, s"):
        check_fields(block, Block, "config.search.")
