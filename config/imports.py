"""`losses.grpo.GRPOLoss` or `my_rewards.py:Exact` -> the class or function of that name. Nothing is evaluated.

A user's file is loaded by its path, so a `data.py` of theirs and ours never meet; and where a dotted path finds our
module although the current folder has a file of that name, that is an error and not a surprise.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from config.errors import ConfigError, did_you_mean, show

# What goes wrong while a file is imported and is its author's to fix.
IMPORT_ERRORS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError)


def find(name: str) -> Callable[..., Any]:
    if match := re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", name):
        module, attribute = _from_file(Path(match[1]).expanduser()), match[2]
    elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        path, _, attribute = name.rpartition(".")
        module = _from_path(path, attribute)
    else:
        raise ConfigError(f"{show(name)} is neither a dotted path (losses.grpo.GRPOLoss) nor file.py:Name.")
    found = vars(module).get(attribute)
    if not callable(found):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        source = name[: -len(attribute) - 1]
        raise ConfigError(f"{source} has no class or function {attribute}.{did_you_mean(attribute, known)}")
    return found


def _from_path(path: str, attribute: str) -> ModuleType:
    here = Path(path.replace(".", "/") + ".py")
    instead = f" The current folder has {here}: write {here}:{attribute}." if here.is_file() else ""
    try:
        module = importlib.import_module(path)
    except IMPORT_ERRORS as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{path}.".startswith(f"{missing}."):  # the module is there, what it does fails
            raise ConfigError(f"{path} cannot be imported: {_told(error)}") from error
        parent = missing.rpartition(".")[0]
        folders = sys.modules[parent].__path__ if parent else None
        siblings = [f"{parent}.{m.name}" if parent else m.name for m in pkgutil.iter_modules(folders)]
        raise ConfigError(f"there is no module {missing}.{instead or did_you_mean(missing, siblings)}") from error
    if instead and here.resolve() != Path(module.__file__ or "").resolve():
        raise ConfigError(f"{path} is {module.__file__}, not the file in the current folder.{instead}")
    return module


def _from_file(path: Path) -> ModuleType:
    """The same file is the same module, however often and however it is written."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path} (current folder: {Path.cwd()}).")
    path = path.resolve()
    name = "file:" + str(path).replace(".", "_")  # no import statement can write it: it shadows nothing
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        sys.modules[name] = importlib.util.module_from_spec(spec)  # before it runs: dataclasses look themselves up
        try:
            spec.loader.exec_module(sys.modules[name])
        except IMPORT_ERRORS as error:
            del sys.modules[name]
            raise ConfigError(f"{path} cannot be imported: {_told(error)}") from error
    return sys.modules[name]


def _told(error: BaseException) -> str:
    """`rewards.py, line 3: ModuleNotFoundError: ...`: the last line outside the import system, and the error itself."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames[1:] else ""
    return f"{place}{type(error).__name__}: {error}"
