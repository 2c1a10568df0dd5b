"""The architecture, as a test: who may import whom, where the sharp tools may be used, and how long anything may be."""

import ast
import graphlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from config import Call, ConfigError

ROOT = Path(__file__).parent.parent
NOT_OURS = {"tests", "runs", "build", "dist", "shared"}
FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in NOT_OURS]
FILES = sorted([*ROOT.glob("*.py"), *(p for folder in FOLDERS for p in folder.rglob("*.py"))])
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
OURS = {name.split(".")[0] for name in MODULES}
SCRIPTS = {name for name in OURS if name.startswith("train_")}
LAST_FRAME = ROOT / "parallel/launch.py"  # where any error ends the process, loudly
MAX_LINES = {"train_grpo.py": 150, "train_sft.py": 100}

# module or folder -> what it may import of ours. A module that is not here may import any but a script, without cycles.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "batch": set(),
    "parallel": set(),
    "losses": {"batch"},
    "losses/check.py": {"batch", "config"},  # tools, which resolve what a user names
    "losses/card.py": {"batch", "config"},
    "logits": set(),
    "head": {"batch", "logits"},
    "data": {"batch", "config"},
    "conversations": {"data"},
    "metrics": {"batch", "config", "parallel"},
}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports at any depth, by its full name; a `from` import also as the name it takes."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def owner(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@each_file
def test_imports_point_inwards(path):
    here = str(path.relative_to(ROOT))
    allowed = MAY_IMPORT.get(here if here in MAY_IMPORT else owner(path), OURS if owner(path) in SCRIPTS | {"bench"} else OURS - SCRIPTS)
    extra = {name.split(".")[0] for name in imports(path)} & OURS - allowed - {owner(path)}
    assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}; see MAY_IMPORT"


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: {i for i in imports(path) if i in MODULES and i != name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of the cycle


def test_only_the_generator_imports_vllm():
    users = [p for p in FILES if any(name.split(".")[0] == "vllm" for name in imports(p))]
    assert [p for p in users if p != ROOT / "rollout/generator.py" and owner(p) != "bench"] == []


def test_config_does_not_import_torch():
    heavy = {"torch", "transformers", "datasets", "numpy"}
    found = {p.name: names for p in FILES if owner(p) == "config" and (names := heavy & set(imports(p)))}
    assert not found


@each_file
def test_files_and_functions_stay_readable(path):
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {n.name: lines for n in functions if (lines := (n.end_lineno or 0) - n.lineno + 1) > 80}
    assert not long, f"split {long}"
    assert len(path.read_text().splitlines()) <= MAX_LINES.get(str(path.relative_to(ROOT)), 400)


@each_file
def test_names_say_what_a_thing_is(path):
    words = {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    assert not words & {"utils", "util", "common", "helpers", "helper", "misc"}
    classes = [n.name for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Utils", "Registry"))]


@each_file
def test_no_code_asks_which_role_or_rank_it_is(path):
    if owner(path) == "parallel":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            for side in (node.left, *node.comparators):
                name = getattr(side, "attr", getattr(side, "id", ""))
                assert name != "role", f"line {node.lineno}: give every role a share of the work instead"
                rank = isinstance(side, ast.Call) and called(side) in (
                    "get_rank",
                    "get_local_rank",
                    "get_node_local_rank",
                )
                assert not rank, f"line {node.lineno}: ask parallel/ for the share of this rank"


# Where CUDA and a CPU may be told apart. head.py: for the size of its blocks of logits, which changes no result; logits.py: for a product
# that torch has on CUDA alone.
KNOWS_DEVICES = {"parallel", "rollout/generator.py", "head.py", "logits.py"}


def asks_for_the_device(node: ast.AST) -> bool:
    """Does it compare with the name of a device, or read a tensor's flag or what torch sees? Anything else is no branch."""
    names, seen = ("cuda", "cpu"), ("is_available", "device_count")
    if isinstance(node, ast.Compare | ast.MatchValue):
        sides = [node.value] if isinstance(node, ast.MatchValue) else [node.left, *node.comparators]
        listed = [item for s in sides for item in (s.elts if isinstance(s, ast.Tuple | ast.List | ast.Set) else [s])]
        return any(isinstance(item, ast.Constant) and item.value in names for item in listed)
    if isinstance(node, ast.Call) and called(node) == "startswith":
        return any(isinstance(arg, ast.Constant) and str(arg.value).startswith(names) for arg in node.args)
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) in [f"torch.cuda.{name}" for name in seen]
    return isinstance(node, ast.ImportFrom) and node.module == "torch.cuda" and not {a.name for a in node.names}.isdisjoint(seen)


@each_file
def test_no_code_asks_which_device_it_runs_on(path):
    """A table keyed by device, as attention.py has one, is no branch; nor is the configuration's list of devices."""
    if not KNOWS_DEVICES & {owner(path), str(path.relative_to(ROOT))}:
        found = [ast.unparse(node) for node in ast.walk(tree(path)) if asks_for_the_device(node)]
        assert not found, "ask parallel/hardware.py or parallel/memory.py instead"


@pytest.mark.parametrize(
    "line",
    [
        'if device.type == "cuda": pass',
        'seeded = place.device.type != "cpu" or always',
        'if "cuda" in str(device): pass',
        'fast = device.type in ("cuda", "xpu")',
        'if str(device).startswith("cuda:"): pass',
        "if weights.is_cuda: pass",
        "ranks = torch.cuda.device_count() or 2",
        "device = pick() if torch.cuda.is_available() else other",
        "from torch.cuda import is_available",
        'match device.type:\n    case "cuda": pass',
    ],
)
def test_a_question_for_the_device_is_recognized(line):
    assert any(map(asks_for_the_device, ast.walk(ast.parse(line))))


@pytest.mark.parametrize(
    "line", ['KERNELS = {("cuda", bf16): flash}', 'device: Literal["auto", "cpu", "cuda"] = "auto"', 'cpu = torch.device("cpu")']
)
def test_the_name_of_a_device_alone_is_no_question(line):
    assert not any(map(asks_for_the_device, ast.walk(ast.parse(line))))


@each_file
def test_an_error_that_nobody_named_is_never_swallowed(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = [k for k in kinds if k is None or ast.unparse(k) in ("Exception", "BaseException")]
            passed_on = isinstance(node.body[-1], ast.Raise) or path == LAST_FRAME
            assert not broad or passed_on, f"line {node.lineno}: name the exception, or raise at the end"
        if isinstance(node, ast.Call) and called(node) == "suppress":
            assert not {"Exception", "BaseException"} & {ast.unparse(a) for a in node.args}, f"line {node.lineno}"


@each_file
def test_no_text_is_ever_run_as_code(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), f"line {node.lineno}"


def test_no_module_shadows_the_standard_library_or_an_installed_package():
    assert OURS & set(sys.stdlib_module_names) == set()
    site = Path(sysconfig.get_path("purelib"))
    installed = {p.stem for p in site.glob("*.py")} | {p.parent.name for p in site.glob("*/__init__.py")}
    assert OURS & installed == set()


IMPORT_ALL = """
import importlib, logging, os, sys, threading
import datasets, tensorboard, torch, transformers  # what these do to the process is not ours
import torch.distributed.fsdp, torch.nn.attention.varlen, torch.utils.tensorboard

def state():
    return {
        "environment": dict(os.environ),
        "folder": os.listdir("."),
        "handlers": list(logging.getLogger().handlers),
        "threads": threading.active_count(),
        "dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().sum().item(),
        "cuda": torch.cuda.is_initialized(),
        "world": torch.distributed.is_initialized(),
    }

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "vllm" not in sys.modules, f"{name} imports vllm"
    changed = {key for key, value in state().items() if value != before[key]}
    assert not changed, f"importing {name} changes {changed}"
"""


def test_importing_a_module_does_nothing_and_needs_neither_torchrun_nor_vllm(tmp_path):
    names = [name for name in MODULES if not name.endswith("__main__") and owner(MODULES[name]) != "bench"]
    ranked = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {k: v for k, v in os.environ.items() if k not in ranked} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["data", "model", "metrics", "batch", "config"])
def test_a_users_file_with_the_name_of_one_of_our_modules_is_theirs_or_an_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text("def exact(prompt, response, target):\n    return 7.0\n")
    assert Call(f"{name}.py:exact").resolve()("", "", "") == 7.0
    with pytest.raises(ConfigError, match=rf"The current folder has {name}\.py: write {name}\.py:exact\."):
        Call(f"{name}.exact").resolve()


def test_the_names_that_users_are_told_to_give_their_files_are_free():
    assert OURS & {"rewards", "my_rewards", "reward", "custom_loss", "my_loss", "loss"} == set()
