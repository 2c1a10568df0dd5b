"""Plain YAML data -> dataclasses, strictly: an unknown key, a wrong type or a missing key is an error that names it."""

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from config.comments import meanings
from config.errors import ConfigError, did_you_mean, show
from config.imports import find

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


@runtime_checkable
class Checked(Protocol):
    """A dataclass that knows which of its values are impossible, alone or together."""

    def check(self) -> None:
        """Raise ValueError; change nothing, read nothing but `self`."""


@dataclass(frozen=True)
class Call:
    """A class or function chosen in YAML, with its keyword arguments; its signature is the list of its options.

    `{fn: losses.grpo.GRPOLoss, clip_high: 0.28}`, `{fn: my_rewards.py:Exact}`, or the bare string where there are none.
    """

    fn: str  # dotted path, or file.py:Name relative to the current folder
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: str = field(default="", compare=False, repr=False)  # its place in the configuration, for messages

    def target(self) -> Callable[..., Any]:
        """The class or function itself, imported but not built."""
        try:
            return find(self.fn)
        except ConfigError as error:
            raise self._error(error) from error.__cause__

    def resolve(self) -> Any:
        """An instance if `fn` is a class; if it is a function, the function with the keyword arguments bound."""
        target = self.target()
        bound = self._bound(target)
        if not inspect.isclass(target):
            return functools.partial(target, **bound) if bound else target
        try:
            return target(**bound)
        except ValueError as error:  # the constructor's own limits, such as a negative coefficient
            raise self._error(f"{self.fn}: {error}") from error

    def _bound(self, target: Callable[..., Any]) -> dict[str, Any]:
        """The keyword arguments, checked against the signature. What a function takes by position is its data."""
        try:
            parameters = inspect.signature(target, eval_str=True).parameters.values()
        except NameError:  # an annotation imported for type checkers only: names can be checked, its type cannot
            parameters = inspect.signature(target).parameters.values()
        named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        required = {n for n, p in named.items() if p.default is p.empty}
        if not inspect.isclass(target):
            named = {n: p for n, p in named.items() if p.kind is p.KEYWORD_ONLY or n not in required}
            required = set()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in self.kwargs.keys() - named.keys():
                options = f"Its arguments: {', '.join(named)}." if named else "It takes none."
                raise self._error(f"{self.fn} has no argument {name}.{did_you_mean(name, named)} {options}")
        if missing := sorted(required - self.kwargs.keys()):
            raise self._error(f"{self.fn} needs {', '.join(missing)}.")
        kinds = {n: p.annotation for n, p in named.items() if (p.default, self.kwargs.get(n)) != (None, None)}
        place = f"{self.key}." if self.key else f"{self.fn}: "
        return {n: convert(v, kinds.get(n, Any), f"{place}{n}") for n, v in self.kwargs.items()}

    def _error(self, message: object) -> ConfigError:
        return ConfigError(f"{self.key}: {message}" if self.key else str(message))


def section(kind: Any) -> type | None:
    """The dataclass that a field of type `kind` holds, perhaps optionally."""
    found = [k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and dataclasses.is_dataclass(k)]
    return found[0] if found and found[0] is not Call and typing.get_origin(kind) not in (list, dict) else None


def places(cls: type, prefix: str = "") -> list[str]:
    """Every dotted key of `cls`, sections included."""
    found = []
    for name, kind in typing.get_type_hints(cls).items():
        found.append(prefix + name)
        if inner := section(kind):
            found += places(inner, f"{prefix}{name}.")
    return found


def check_known(key: Any, cls: type, where: str) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    if key in known:
        return
    prefix = f"{where}." if where else ""
    elsewhere = [place for place in places(cls) if place.rpartition(".")[2] == key]  # right name, wrong section
    hint = f" Did you mean {prefix}{elsewhere[0]}?" if elsewhere else did_you_mean(str(key), known)
    title = f"Keys of {where}" if where else "Top-level keys"
    raise ConfigError(f"unknown key {prefix}{key}.{hint} {title}: {', '.join(known)}.")


def convert(value: Any, kind: Any, where: str) -> Any:
    """Plain YAML data as `kind`, or an error that says what is allowed. `where` is the dotted key."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(value, kind, where)
    if origin is typing.Literal:
        same = [option for option in args if option == value and type(option) is type(value)]
        return same[0] if same else _refuse(value, kind, where)
    if kind is Call:
        return _call(value, where)
    if section(kind):
        return _section(value, kind, where)
    if origin in (list, Sequence) and (isinstance(value, list) or _refuse(value, kind, where)):
        return [convert(v, (*args, Any)[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and (isinstance(value, dict) or _refuse(value, kind, where)):
        return {k: convert(v, (*args, Any, Any)[1], f"{where}.{k}") for k, v in _text_keys(value, where).items()}
    return _scalar(value, kind, where) if kind in NAMES else _plain(value, where)


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if type(value) is kind and kind is not float:
        return value
    if kind is bool and value in ("yes", "on", "no", "off"):
        return value in ("yes", "on")
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    _refuse(value, kind, where)


def _plain(value: Any, where: str) -> Any:
    """A value whose type nobody has declared: any YAML but nan and infinity."""
    if isinstance(value, dict):
        return {k: _plain(v, f"{where}.{k}") for k, v in _text_keys(value, where).items()}
    if isinstance(value, list):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    return _scalar(value, float, where) if isinstance(value, float) else value


def _union(value: Any, kind: Any, where: str) -> Any:
    options = [o for o in typing.get_args(kind) if o is not type(None)]
    if value is None and len(options) < len(typing.get_args(kind)):
        return None
    if len(options) == 1 and (options[0] is Call or section(options[0])):
        return convert(value, options[0], where)  # its own message says more
    shaped = [o for o in options if section(o) and isinstance(value, dict) or typing.get_origin(o) is list and isinstance(value, list)]
    if len(shaped) == 1:  # as above
        return convert(value, shaped[0], where)
    for option in options:
        try:
            return convert(value, option, where)
        except ConfigError:
            continue
    _refuse(value, kind, where)


def _call(value: Any, where: str) -> Call:
    value = {"fn": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("fn"), str):
        raise ConfigError(f"{where} should be {{fn: dotted.path or file.py:Name, arguments ...}}, got {show(value)}.")
    return Call(value["fn"], {k: v for k, v in _plain(value, where).items() if k != "fn"}, where)


def _section(value: Any, cls: type, where: str) -> Any:
    value = {} if value is None else value  # a section whose lines are all commented out
    if not isinstance(value, dict):
        _refuse(value, cls, where)
    hints, fields, prefix = typing.get_type_hints(cls), dataclasses.fields(cls), f"{where}." if where else ""
    for key in _text_keys(value, where):
        check_known(key, cls, where)
    given = dict(value)
    missing = []
    for f in fields:
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if isinstance(default, Call) and isinstance(given.get(f.name), dict) and "fn" not in given[f.name]:
            given[f.name] = {"fn": default.fn, **default.kwargs, **given[f.name]}  # arguments for the default function
        if f.name not in given and default is dataclasses.MISSING:
            if section(hints[f.name]):
                given[f.name] = {}
            else:
                missing.append(f"{prefix}{f.name} ({meanings(cls).get(f.name, '')})")
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}.")
    loaded = {f.name: convert(given[f.name], hints[f.name], prefix + f.name) for f in fields if f.name in given}
    try:
        instance = cls(**loaded)
        if isinstance(instance, Checked):
            instance.check()
    except ValueError as error:
        message, first = str(error), re.match(r"\w*", str(error))
        if where and first and first[0] in hints:
            message = f"{where}.{message}"
        elif where and f"{where}." not in message:
            message = f"{where}: {message}"
        raise ConfigError(message) from error
    return instance


def _text_keys(value: dict[Any, Any], where: str) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where or 'the file'} has the key {show(key)}, which is not text; put it in quotes.")
    return value


def allowed(kind: Any) -> str:
    """What a value of type `kind` may be, for a sentence."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed(a) for a in args)
    if origin is typing.Literal:
        return " or ".join(map(str, args)) if len(args) < 3 else f"one of {', '.join(map(str, args))}"
    if origin in (list, Sequence):
        return "a list, such as [a, b]"
    if origin is dict or section(kind):
        return "a section of `key: value` lines"
    return "null" if kind is type(None) else "a call" if kind is Call else NAMES.get(kind, str(kind))


def _refuse(value: Any, kind: Any, where: str) -> NoReturn:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds, hint = typing.get_args(kind) if is_union else (kind,), ""
    if isinstance(value, str):
        literals = [a for k in kinds if typing.get_origin(k) is typing.Literal for a in typing.get_args(k)]
        hint = did_you_mean(value, map(str, literals))
    elif str in kinds and isinstance(value, int | float):
        hint = f' In quotes it is text: "{show(value)}".'
    raise ConfigError(f"{where or 'the configuration'} should be {allowed(kind)}, got {show(value)}.{hint}")


def model_source(model: str) -> tuple[str, str | None]:
    """(hub id or folder, revision) of a `model` key. `hf://Qwen/Qwen3-1.7B@main` -> ("Qwen/Qwen3-1.7B", "main")."""
    hub = re.fullmatch(r"hf://(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?", model)
    if hub:
        return hub[1], hub[2]
    if not model.strip() or model.startswith("hf:") or "://" in model:
        options = "a hub id (Qwen/Qwen3-1.7B), hf://org/name[@revision] or a folder"
        raise ConfigError(f"model should be {options}, got {show(model)}.")
    return model, None
