"""What travels: JSON text in one record. A refusal is one of a few fixed codes, never the text of an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

_RECORD, _TEXT = "tacit", "json"
_LONGEST = 1_000_000  # characters: an answer has a few dozen numbers

REFUSALS = {
    "budget": "it cannot afford the question. Nothing was charged there.",
    "refused": "it refuses the question (another kind of noise, an id that was used for something else, or one that "
    "was interrupted). Nothing more was charged there.",
    "unreadable": "it could not read the question. Nothing was charged there.",
    "settings": "its settings are wrong; its own log says how. Nothing was charged there.",
    "ledger": "its ledger cannot be used; a source on another machine keeps one in a file or a database.",
    "failed": "it failed. Whether it was charged is known there.",
}


def content(value: Mapping[str, Any]) -> RecordDict:
    return RecordDict({_RECORD: ConfigRecord({_TEXT: json.dumps(value)})})


def value_of(message: Message) -> dict[str, Any] | None:
    """What a message says, or None if it says nothing that can be read."""
    if message.has_error() or not message.has_content():
        return None
    try:
        text = message.content.config_records[_RECORD][_TEXT]
        if not isinstance(text, str) or len(text) > _LONGEST:
            return None
        value = json.loads(text)
    except (KeyError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
