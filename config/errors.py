"""What every message about a configuration is made of."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """The user's file or command line is wrong; the message is meant to be read without a traceback."""


def show(value: Any, width: int = 80) -> str:
    """A value as a user would write it: true, null, "text", [1, 2]."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= width else text[: width - 3] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
