"""A `Call`: what a dotted path or file.py:Name stands for, or the exact words where there is none."""

import functools
import sys
from pathlib import Path

import pytest

from config import Call, ConfigError

USER_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from nowhere import Tokenizer

@dataclass
class Exact:
    scale: float = 1.0
    strip: bool = True
    kind: Literal["text", "number"] = "text"
    names: list[str] | None = None
    def __call__(self, prompt: str, response: str, target: str) -> float:
        return self.scale * (response == target)

class Needs:
    def __init__(self, words: list[str]):
        if not words:
            raise ValueError("words is empty")
        self.words = words

def close(prompt: str, response: str, target: str, *, margin: int = 0) -> float:
    return float(abs(len(response) - len(target)) <= margin)

def loose(prompt, response, target, scale=1.0, **others):
    return scale, others

def later(prompt: Tokenizer, *, margin: int = 0):
    return margin

number = 3
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(USER_FILE)
    return "my_rewards.py"


def test_a_call_of_a_class_is_an_instance_and_of_a_function_the_bound_function(user_file):
    exact = Call(f"{user_file}:Exact", {"scale": 2, "names": ["a"]}).resolve()
    assert exact("", "x", "x") == 2.0 and type(exact.scale) is float and exact.names == ["a"]
    assert Call(f"{user_file}:close", {"margin": 1e0}).resolve()("", "ab", "a") == 1.0
    assert Call(f"{user_file}:close").resolve() is Call(f"{user_file}:close").target()
    assert Call(f"{user_file}:loose", {"x": [1], "scale": None}).resolve()("", "", "") == (None, {"x": [1]})
    assert Call(f"{user_file}:later", {"margin": 2}).resolve()(None) == 2
    assert Call("functools.partial").target() is functools.partial


def test_a_file_is_one_module_however_it_is_written_and_cannot_be_imported_by_another_name(user_file, tmp_path):
    here, there = Call(f"{user_file}:Exact").target(), Call(f"{tmp_path}/./my_rewards.py:Exact").target()
    assert here is there and sys.modules[here.__module__].Exact is here
    assert not here.__module__.isidentifier() and "my_rewards" not in sys.modules


CALL_MISTAKES = {
    "no module": (
        Call("losses.grppo.GRPOLoss", key="loss"),
        "loss: there is no module losses.grppo. Did you mean losses.grpo?",
    ),
    "no package": (Call("lozzes.grpo.GRPOLoss", key="loss"), "loss: there is no module lozzes. Did you mean losses?"),
    "no attribute": (
        Call("losses.grpo.GPROLoss", key="loss"),
        "loss: losses.grpo has no class or function GPROLoss. Did you mean GRPOLoss?",
    ),
    "not a name": (
        Call("MathReward", key="rewards.math"),
        'rewards.math: "MathReward" is neither a dotted path (losses.grpo.GRPOLoss) nor file.py:Name.',
    ),
    "code": (
        Call("__import__('os').getcwd()", key="loss"),
        "loss: \"__import__('os').getcwd()\" is neither a dotted path (losses.grpo.GRPOLoss) nor file.py:Name.",
    ),
    "no file": (
        Call("your_rewards.py:Exact", key="rewards.math"),
        "rewards.math: there is no file your_rewards.py (current folder: {folder}).",
    ),
    "no name in the file": (
        Call("my_rewards.py:Exat", key="rewards.math"),
        "rewards.math: my_rewards.py has no class or function Exat. Did you mean Exact?",
    ),
    "not callable": (
        Call("my_rewards.py:number", key="rewards.math"),
        "rewards.math: my_rewards.py has no class or function number.",
    ),
    "unknown argument": (
        Call("my_rewards.py:Exact", {"scael": 2}, "rewards.math"),
        "rewards.math: my_rewards.py:Exact has no argument scael. Did you mean scale? "
        "Its arguments: scale, strip, kind, names.",
    ),
    "data for an argument": (
        Call("my_rewards.py:close", {"target": "x"}, "rewards.math"),
        "rewards.math: my_rewards.py:close has no argument target. Its arguments: margin.",
    ),
    "wrong type of an argument": (
        Call("my_rewards.py:Exact", {"scale": "big"}, "rewards.math"),
        'rewards.math.scale should be a number, got "big".',
    ),
    "wrong type, call from code": (
        Call("my_rewards.py:Exact", {"strip": 1}),
        "my_rewards.py:Exact: strip should be true or false, got 1.",
    ),
    "missing argument": (
        Call("my_rewards.py:Needs", key="rewards.math"),
        "rewards.math: my_rewards.py:Needs needs words.",
    ),
    "refused by the constructor": (
        Call("my_rewards.py:Needs", {"words": []}, "rewards.math"),
        "rewards.math: my_rewards.py:Needs: words is empty",
    ),
    "dotted path to a user's file": (
        Call("my_rewards.Exact", key="rewards.math"),
        "rewards.math: there is no module my_rewards. The current folder has my_rewards.py: write my_rewards.py:Exact.",
    ),
}


@pytest.mark.parametrize("mistake", CALL_MISTAKES)
def test_a_mistake_in_a_call_is_explained(user_file, mistake):
    call, message = CALL_MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        call.resolve()
    assert str(caught.value) == message.replace("{folder}", str(Path.cwd()))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "import re\nfrom forge.data.rewards import MathReward\n",
            "line 2: ModuleNotFoundError: No module named 'forge'",
        ),
        ("def f(:\n", "line 1: SyntaxError: invalid syntax"),
        ("x = 1\ny = z\n", "line 2: NameError: name 'z' is not defined"),
    ],
)
def test_a_file_that_fails_to_import_is_named_with_its_line_and_the_error(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(text)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ConfigError) as caught:
            Call("broken.py:Exact", key="rewards.math").resolve()
        path = tmp_path / "broken.py"
        assert str(caught.value) == f"rewards.math: {path} cannot be imported: broken.py, {message}"
        assert caught.value.__cause__ is not None
