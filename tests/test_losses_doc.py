"""docs/losses.md is true: its examples run, its card is the default one, its tables and its loss file are what they say."""

import doctest
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import losses
from config import Call
from losses import PolicyLoss, advantages, correction
from losses.advantages import group_centred, group_zscore, leave_one_out
from losses.card import card
from losses.check import check
from tests.test_card import DEFAULT, LOSS, given

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/losses.md"
TEXT = DOCUMENT.read_text()
OPTIONS: dict[str, dict[str, object]] = {"DrGRPOLoss": {"max_tokens": 4}}  # what a constructor cannot do without


def block(first: str) -> str:
    """The indented block that begins with this line."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:(?:    .*)?\n)*", TEXT, re.MULTILINE)
    assert found, f"no block begins with {first}"
    return textwrap.dedent(found.group()).strip() + "\n"


def table(header: str) -> dict[str, list[str]]:
    """The cells of the table with this first column, by the names in it."""
    rows = TEXT.split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {re.findall(r"\w+", row[0])[0]: row[1:] for row in cells}


def test_its_examples_run():
    results = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert results.failed == 0 and results.attempted > 15


def test_its_card_is_that_of_the_defaults():
    assert block("objective") == card(LOSS, DEFAULT) + "\n"


def test_it_lists_every_objective_with_its_averaging_and_advantage():
    listed = table("Class")
    assert listed.keys() == set(losses.__all__) - {"PolicyLoss"}
    for name, (_, averaging, advantage, *_) in listed.items():
        loss = Call(f"losses.{name}", OPTIONS.get(name, {})).resolve()
        assert averaging.split()[0].strip(",") == loss.averaging, name
        assert advantage == (loss.advantage if "advantages" in loss.needs() else "none"), name


def test_it_lists_every_advantage_function_and_correction():
    members = vars(advantages).items()
    functions = {name for name, value in members if inspect.isfunction(value) and inspect.getmodule(value) is advantages and name[0] != "_"}
    assert table("Name").keys() == functions - {"credit"}
    for function in (group_zscore, group_centred, leave_one_out):
        shown = table("Name")[function.__name__][1]
        assert [float(x) for x in shown.split(", ")] == pytest.approx(function([1.0, 0.0, 0.0, 0.5]), abs=6e-4)
    classes = {name for name, value in vars(correction).items() if isinstance(value, type) and value.__module__ == correction.__name__}
    rows = TEXT.split("| `losses.correction.` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)\(", rows, re.MULTILINE)) == classes


@pytest.fixture
def own(tmp_path) -> PolicyLoss:
    path = tmp_path / "my_loss.py"
    path.write_text(block("# my_loss.py"))
    return Call(f"{path}:CustomLoss").resolve()


def shown(first: str) -> dict[str, str]:
    return {line.split()[1]: line.split()[0] for line in block(first).splitlines()}


def test_its_loss_file_keeps_the_laws_as_shown(own):
    found = {verdict.law.split()[0]: verdict.status for verdict in check(own)}
    assert found == shown("pass  repeatable")
    assert set(found.values()) == {"pass"}


def test_its_loss_file_has_its_formula_on_the_card(own):
    assert "u = -min(r A, clip(r, 0.8, 1.2) A) + 0.1 r k3" in card(own, given(own, {}))


def test_the_guides_loss_gets_the_notes_as_shown():
    found = {verdict.law: verdict.status for verdict in check(Call(f"{ROOT}/tests/data/guide/custom_loss.py:CustomLoss").resolve())}
    assert shown("note  averaging").items() <= found.items()


def test_the_kl_of_the_guides_loss_is_a_constant_added_to_every_advantage_as_said(own):
    guide = Call(f"{ROOT}/tests/data/guide/custom_loss.py:CustomLoss").resolve()
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    tensors = {"ref_logprobs": logprobs.detach(), "advantages": torch.tensor([[0.3]]), "padding_mask": torch.ones(1, 2)}
    (gradient,) = torch.autograd.grad(guide(logprobs, **tensors), logprobs)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -(0.3 + 0.1) / 2))
    risen = torch.tensor([[0.5]]).log().requires_grad_()
    tensors = {"ref_logprobs": torch.tensor([[0.25]]).log(), "advantages": torch.ones(1, 1), "padding_mask": torch.ones(1, 1)}
    (gradient,) = torch.autograd.grad(guide(risen, **tensors), risen)
    assert gradient.item() == pytest.approx(-0.1), "the clip has stopped it: what is left is the constant of the KL term"
    (gradient,) = torch.autograd.grad(own(logprobs=risen, **tensors), risen)
    assert gradient.item() < -0.9, "against the policy that sampled, the same token still learns"
