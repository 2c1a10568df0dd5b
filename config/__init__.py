"""A YAML file and `key=value` overrides become nested dataclasses, or an error that says what to change.

The dataclasses stand beside the code that reads them; this package knows none of them, and nothing of training. Every
mistake that can be seen in a configuration is reported before a model is loaded, as one `ConfigError` that can be read
without a traceback. Nothing in a configuration is ever evaluated: values are YAML, and a `Call` is imported by name.

    sources.py     the YAML file and the command line -> plain data; load, dump
    typed.py       plain data -> dataclasses, strictly; Call: a class or function and its keyword arguments
    imports.py     dotted.path or file.py:Name -> the class or function
    reference.py   the fields -> --help and docs/config.md (`python -m config` writes it)
    comments.py    the meaning of a field: the comment beside it
"""

from config.errors import ConfigError
from config.reference import Option, describe, document
from config.sources import dump, load, run_name
from config.typed import Call, model_source

__all__ = ["Call", "ConfigError", "Option", "describe", "document", "dump", "load", "model_source", "run_name"]
