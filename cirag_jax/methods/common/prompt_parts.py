"""Helpers that the prompts of several methods share."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cirag_jax.llm.types import Message


def example_turns(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    """Returns worked examples, each a user turn and the response to it, as messages."""
    return tuple(
        Message(role, text)
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def conversation_hash(messages: Iterable[Message]) -> str:
    """Returns a hash of the roles and texts of messages."""
    turns = json.dumps([[message.role, message.text] for message in messages])
    return hashlib.sha256(turns.encode()).hexdigest()[:16]
