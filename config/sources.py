"""The YAML file and the command line -> plain data -> `load`; and back to YAML: `dump`."""

import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from config.errors import ConfigError, show
from config.reference import help_text
from config.typed import Call, check_known, convert, places, section

T = TypeVar("T")


def load(cls: type[T], argv: list[str] | None = None) -> T:
    """`<file.yaml> [key=value ...]` -> an instance of `cls`. `--help` prints every key and exits."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    if not argv:
        raise ConfigError("no configuration: give a YAML file, then key=value for what differs (--help: all keys).")
    file, overrides = _split(argv)
    known = set(places(cls))
    for key, text in overrides:
        check_known(_spelled_out(key, known)[0], cls, "")
        if text is None:
            raise ConfigError(f"--{key} needs a value: --{key} VALUE or {key}=VALUE.")
    tree = _under_services(_read_file(file) if file else {}, known)
    for key, text in overrides:
        _set(tree, _spelled_out(key, known), _parse(text or "", f"{key}={text}"), cls)
    return convert(tree, cls, "")


def run_name(argv: list[str] | None = None) -> str:
    """The configuration file's name without its ending, for the run's folder; "run" where there is no file."""
    file, _ = _split(sys.argv[1:] if argv is None else argv)
    return file.stem if file else "run"


# The command line -----------------------------------------------------------------------------------------------


def _split(argv: list[str]) -> tuple[Path | None, list[tuple[str, str | None]]]:
    """The configuration file, and the overrides as (key, text); None where nothing follows a `--key`."""
    files: list[str] = []
    overrides: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        key, equals, text = arg.removeprefix("--").partition("=")
        if arg.startswith("--"):
            value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
            if key != "config":
                overrides.append((key, value))
            elif value is None:
                raise ConfigError("--config needs the path of a YAML file.")
            else:
                files.append(value)
        elif equals and re.fullmatch(r"\w[\w.-]*", key):
            overrides.append((key, text))
        elif files or arg.startswith("-"):
            raise ConfigError(f"{show(arg)} is not understood: an override is key=value or --key value.")
        else:
            files.append(arg)
    if len(files) > 1:
        raise ConfigError(f"two configuration files, {' and '.join(files)}: give one, and the rest as key=value.")
    return (Path(files[0]) if files else None), overrides


def _spelled_out(key: str, known: set[str]) -> list[str]:
    """`trainer.procs` is short for `services.trainer.procs`, as long as there is no other key `trainer.procs`."""
    path = key.split(".")
    start = ".".join(path[:2])
    return ["services", *path] if start not in known and f"services.{start}" in known else path


def _set(tree: dict[str, Any], path: list[str], value: Any, kind: Any) -> None:
    """Write one override into the tree, making the sections above it; a bare `Call` becomes `{fn: ...}`."""
    for depth, part in enumerate(path[:-1], start=1):
        cls = section(kind)
        kind = typing.get_type_hints(cls).get(part) if cls else (*typing.get_args(kind), None, None)[1]
        child = tree.get(part)
        if isinstance(child, str) and Call in (kind, *typing.get_args(kind)):
            child = {"fn": child}
        if not isinstance(child, dict | None):
            above = ".".join(path[:depth])
            raise ConfigError(f"{'.'.join(path)} cannot be set: {above} is {show(child)}, which has no keys.")
        tree[part] = dict(child or {})  # a copy: YAML aliases share their mapping
        tree = tree[part]
    tree[path[-1]] = value


# The file -------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> dict[Any, Any]:
    try:
        tree = _parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path} (current folder: {Path.cwd()}).") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text.") from error
    if tree is None:
        raise ConfigError(f"{path} is empty.")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} should hold `key: value` lines, got {show(tree)}.")
    return tree


def _under_services(tree: dict[Any, Any], known: set[str]) -> dict[str, Any]:
    """A role at the top level of a file means what it means on the command line: its place is under `services`."""
    services = tree.get("services") or {}
    moved = [k for k in tree if _spelled_out(str(k), known) != [str(k)]]
    if not moved or not isinstance(services, dict):
        return dict(tree)
    if twice := [k for k in moved if k in services]:
        raise ConfigError(f"{twice[0]} is given twice, at the top level and as services.{twice[0]}.")
    rest = {k: v for k, v in tree.items() if k not in moved}
    return {**rest, "services": {**services, **{k: tree[k] for k in moved}}}


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-6 is a number, `no` and 2024-01-01 are text. A key may stand in a mapping once."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                problem = f"the key {key.value} is given twice, first in line {first[key.value].start_mark.line + 1}"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Text that a YAML 1.1 or 1.2 reader would take for something else is quoted, so every reader agrees."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
]:
    for _yaml in (_Loader, _Dumper):
        _flags = re.ASCII | re.IGNORECASE if _tag == "float" else re.ASCII
        _yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z", _flags), _first)
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0 if node.value[1:2] in ("x", "o") else 10)
)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # derived from SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark and "\n" in text else ""
        hints = {"'\\t'": "YAML is indented with spaces, not tabs", "mapping values": 'text with ": " needs quotes'}
        hint = next((f" ({h})" for found, h in hints.items() if found in (error.problem or "")), "")
        raise ConfigError(f"{source}{line}: {error.problem}{hint}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}.") from error


def dump(cfg: Any) -> str:
    """A loaded configuration as YAML, every key written out; `load` reads it back as an equal one."""
    return yaml.dump(_plain_data(cfg), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain_data(value: Any) -> Any:
    if isinstance(value, Call):
        return {"fn": value.fn, **value.kwargs} if value.kwargs else value.fn
    if dataclasses.is_dataclass(value):
        return {f.name: _plain_data(vars(value)[f.name]) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain_data(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain_data(v) for v in value]
    return str(value) if isinstance(value, Path) else value
