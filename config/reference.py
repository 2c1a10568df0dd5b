"""The fields of the dataclasses, told to a reader: `--help` and docs/config.md."""

import dataclasses
import importlib
import inspect
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

from config.comments import meanings
from config.errors import show
from config.typed import Call, section

DOCUMENT = Path(__file__).parent.parent / "docs" / "config.md"
SCRIPTS = ("train_grpo", "train_sft")

OVERRIDES = """\
The file is YAML; what differs for one run goes behind it, in any of these forms:

    config.yaml training.steps=20            # a value is YAML as well: grpo.stop='["\\n\\n"]', eval.dataset=null
    config.yaml --training.steps 20 --grpo.beta=0.1
    --config config.yaml --trainer.procs 4   # a role's name is short for services.<role>
    config.yaml loss.clip_high=0.3 rewards.math.weight=0.5   # an argument of a call
"""

CALLS = """\
A call is a class or function and its keyword arguments: {fn: losses.grpo.GRPOLoss, clip_high: 0.3}, or the bare name
where there are no arguments. The name is a dotted path, or file.py:Name for a file of your own, relative to the current
folder. Its signature is the list of its options.
"""


class Option(NamedTuple):
    key: str  # dotted
    type: str
    default: str  # "required" where there is none, "" for a section
    meaning: str


def describe(cls: type) -> list[Option]:
    """Every key in the order of the source. A section whose keys were told before refers to where."""
    options: list[Option] = []
    told: dict[type, str] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            key, kind, meaning = prefix + field.name, hints[field.name], meanings(cls).get(field.name, "")
            inner = section(kind)
            if inner is None:
                options.append(Option(key, type_name(kind), _default(field), meaning))
                continue
            default = "" if inner is kind else _default(field)
            meaning = meaning or _first_line(inner)
            if inner in told:
                options.append(Option(key, type_name(kind), default, f"{meaning} (keys: see {told[inner]})".strip()))
            else:
                options.append(Option(key, type_name(kind), default, meaning))
                told[inner] = key
                walk(inner, f"{key}.")

    walk(cls, "")
    return options


def type_name(kind: Any) -> str:
    """`int`, `float | null`, `auto | cpu | cuda`, `list[str]`, `dict[str, call]`, `section`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_name(a) for a in args)}]"
    names = {type(None): "null", Call: "call", Path: "path", Any: "any"}
    return "section" if section(kind) else names.get(kind) or str(kind.__name__)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, Call):
        return show({"fn": value.fn, **value.kwargs}) if value.kwargs else value.fn
    if isinstance(value, str | Path):
        return str(value) or '""'
    return "required" if value is dataclasses.MISSING else show(value)


def _first_line(cls: type) -> str:
    """Of the docstring; the one that dataclass() makes up says nothing."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text.strip().partition("\n")[0]


def _by_section(options: list[Option]) -> dict[str, list[Option]]:
    """Top-level keys under "", then each top-level section with everything in it."""
    sections = {o.key for o in options if o.type.startswith("section")}
    groups: dict[str, list[Option]] = {"": []}
    for option in options:
        first = option.key.partition(".")[0]
        if option.type == "section" and not option.meaning:
            continue  # its keys say it all
        groups.setdefault(first if first in sections else "", []).append(option)
    return groups


def help_text(cls: type) -> str:
    module = inspect.getmodule(cls)
    script = Path(inspect.getfile(cls)).name
    parts = [(module.__doc__ or "").strip() if module else "", f"usage: {script} CONFIG.yaml [key=value ...]"]
    parts += [OVERRIDES.strip(), CALLS.strip()]
    for name, options in _by_section(describe(cls)).items():
        lines = [name or "top level"]
        for key, kind, default, meaning in options:
            lines.append(f"  {key}: {kind}" + (f" = {default}" if default not in ("", "required") else ""))
            lines[-1] += " (required)" if default == "required" else ""
            lines.append(textwrap.fill(meaning, 112, initial_indent="      ", subsequent_indent="      "))
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(part for part in parts if part)


def document(cls_by_script: dict[str, type]) -> str:
    """docs/config.md: one table per section; a key that several scripts read stands there once."""
    scripts_of: dict[Option, list[str]] = {}
    for script, cls in cls_by_script.items():
        for option in describe(cls):
            scripts_of.setdefault(option, []).append(script)
    commands = textwrap.indent("\n".join(f"{script} CONFIG.yaml [key=value ...]" for script in cls_by_script), "    ")
    origin = "Written by `python -m config` from the comments beside the fields; edit those."
    parts = ["# Configuration", origin, commands, OVERRIDES.strip(), CALLS.strip()]
    for name, options in _by_section(list(scripts_of)).items():
        rows = ["| Key | Type | Default | Meaning | Read by |", "|---|---|---|---|---|"]
        for option in options:
            default = f"`{option.default}`" if option.default not in ("", "required") else option.default
            readers = scripts_of[option]
            told = "all" if len(readers) == len(cls_by_script) else ", ".join(readers)
            cells = [f"`{option.key}`", f"`{option.type}`", default, option.meaning, told]
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts += [f"## {name or 'Top level'}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def current_document() -> str:
    """docs/config.md as it should be now. Imports the scripts, which nothing else here may."""
    return document({f"{name}.py": importlib.import_module(name).Config for name in SCRIPTS})
