"""The checker finds planted faults by the law they break, and finds none in what ships."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import losses
from config import Call, ConfigError
from losses import DAPOLoss, GRPOLoss, PolicyLoss
from losses.check import GOLDEN, LAWS, Verdict, check, resolve, table

ROOT = Path(__file__).parent.parent
MUTANTS = ROOT / "tests/data/mutants"
GUIDE = ROOT / "tests/data/guide/custom_loss.py"
OPTIONS: dict[str, dict[str, object]] = {"DrGRPOLoss": {"max_tokens": 4}}  # what a constructor cannot do without
SHIPPED = [name for name in losses.__all__ if name != "PolicyLoss"]


def verdicts(name: str, **options: object) -> dict[str, Verdict]:
    return {verdict.law: verdict for verdict in check(Call(name, options).resolve())}


def mutant(name: str) -> dict[str, Verdict]:
    return verdicts(f"{MUTANTS}/{name}")


def failed(found: dict[str, Verdict]) -> set[str]:
    return {law for law, verdict in found.items() if verdict.status == "FAIL"}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_objective_keeps_every_law_and_its_golden_values(name):
    found = verdicts(f"losses.{name}", **OPTIONS.get(name, {}))
    assert not failed(found), table(list(found.values()))
    assert found["golden"].status == "pass"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GRPOLoss", {"beta": 0.1}),
        ("GRPOLoss", {"beta": 0.1, "kl": "k1"}),
        ("GRPOLoss", {"beta": 0.1, "kl": "k3_ratio", "averaging": "prompt"}),
        ("SimpleGRPOLoss", {"beta": 0.0}),
        ("DAPOLoss", {"dual_clip": 3.0}),
        ("ReinforceLoss", {"clip_ratio": 0.2}),
        ("ReinforcePlusPlusBaselineLoss", {"beta": 0.01}),
    ],
)
def test_a_shipped_objective_keeps_the_laws_with_other_options(name, options):
    found = verdicts(f"losses.{name}", **options)
    assert not failed(found), table(list(found.values()))


FAULTS = {  # mutant -> the law that names its fault, and what the message must say of it
    "mean_of_means.py:Declared": (
        "on-policy",
        'sequence 0, token 0: gradient -0.0140739; -A w = -(0.506662 x 0.0833333) = -0.0422218 by averaging "token". '
        'Its gradient is 0.416667 times that of averaging "sequence"',
    ),
    "mean_of_means.py:OfItsMicroBatch": (
        "split",
        "sequence 0, token 0: gradient -0.0422218 in the whole step of 5 sequences, -0.168887 in a micro-batch of sequence 0",
    ),
    "counts_padding.py:SequenceRatio": ("padding", "sequence 0, token 0: its gradient goes from -0.0186705 to -0.0120377: padding is"),
    "counts_padding.py:Scalar": ("padding", "sequence 0, token 0: its gradient goes from -0.0168887 to -0.0112592: padding is counted"),
    "counts_padding.py:Whitened": ("padding", "with 3 more columns of padding, sequence 0, token 0: its gradient goes from"),
    "mask_after_division.py:Scalar": ("finite", "sequences 3 and 4 have no loss tokens: the value is nan"),
    "mask_after_division.py:Width": ("padding", "sequence 0, token 0: its gradient goes from -0.0186705 to -0.0120377: padding is"),
    "in_place.py:Advantages": ("in place", "it edits advantages in place: sequence 1, token 0 was 1.29278, is 1"),
    "in_place.py:Logprobs": ("in place", "it edits logprobs in place: sequence 0, token 0 was -2.54011, is 0.156771"),
    "in_place.py:Data": ("in place", "it edits old_logprobs in place: sequence 0, token 0 was -2.69688, is -1.34844"),
    "false_elementwise.py:GapToTheSampler": (
        "elementwise",
        "elementwise = True: the loss of sequence 0, token 0 is -0.433773 on the grid [5, 6] and -0.524794 on a slice [1, 1] of all",
    ),
    "false_elementwise.py:ClipByLength": ("elementwise", "on a slice [1, 1] of all sequences' tokens in one line"),
    "false_elementwise.py:AdvantagesToGo": (
        "elementwise",
        "the loss of sequence 0, token 0 is 1.28698 on the grid [5, 6] and 2.57395 on a slice [1, 2] of all sequences' tokens",
    ),
    "false_elementwise.py:ByWidth": ("elementwise", "on a slice [1, 12] of all sequences' tokens in one line"),
    "raises.py:OnWideGrids": (
        "elementwise",
        "elementwise = True: on 12 of the step's tokens in one line, [1, 12], it raised OutOfBudget (raises.py, line 25)",
    ),
    "raises.py:Always": ("repeatable", "raised OutOfBudget: no tokens left (raises.py, line 14)"),
    "false_elementwise.py:SequenceRatio": (
        "elementwise",
        "elementwise = True: moving the log-prob of sequence 0, token 0 by +0.2 takes the loss of sequence 0, token 1 "
        "from -0.619205 to -0.661892",
    ),
    "not_finite.py:Overflow": (
        "finite",
        "sequence 0, token 0 has gradient nan (value -7.12432e+12) where sequences 0 and 1 have logprobs 0, old_logprobs -30",
    ),
    "not_finite.py:LogOfZero": ("finite", "sequence 0, token 0 has gradient -inf (value -inf) where sequences 0 and 1 have logprobs 0"),
    "not_finite.py:LogOfEntropy": ("finite", "the value is inf where sequences 0 and 1 have logprobs -30, entropy 0 at each token"),
    "not_finite.py:RootOfEntropy": ("finite", "sequence 0, token 0 has gradient -inf in its entropy (value"),
    "not_finite.py:Product": ("finite", "sequence 1, token 0 has gradient -inf"),
    "swapped_kl.py:GRPOLoss": (
        "golden",
        "GRPOLoss(clip_low=0.2, clip_high=0.28, beta=0.04): value 0.046526, should be 0.0465306; sequence 0, token 0: gradient "
        "-0.0850799, should be -0.0851904: its value is golden with the sign of logprobs - ref_logprobs changed",
    ),
    "wrong_policy.py:GRPOLoss": (
        "golden",
        "GRPOLoss(clip_low=0.2, clip_high=0.2): value 0.360285, should be 0.0520206; "
        "sequence 0, token 0: gradient -0.0343655, should be -0.0845256: "
        "it is golden with old_logprobs in the place of gen_logprobs",
    ),
    "wrong_averaging.py:GRPOLoss": ("golden", 'it is golden with averaging "sequence", and declares "token"'),
    "false_reference.py:Needed": ("reference", "declares that it needs no reference; without, it raised TypeError"),
    "false_reference.py:NotNeeded": ("reference", "declares that it needs a reference; without, it works"),
    "not_repeatable.py:Noise": ("repeatable", "called twice with the same tensors, sequence 0, token 0: its gradient goes from"),
    "not_repeatable.py:Counter": ("repeatable", "its gradient goes from -0.0422218 to -0.0844437"),
    "wrong_backward.py:Penalised": ("gradcheck", "autograd says -0.0480816, finite differences -0.0493881: its own autograd.Function"),
}
ALSO = {  # what else the same fault breaks
    "counts_padding.py:SequenceRatio": {"split", "on-policy"},
    "mask_after_division.py:Width": {"split", "on-policy"},
    "in_place.py:Advantages": {"on-policy"},
    "false_elementwise.py:ByWidth": {"padding"},
    "not_finite.py:Overflow": {"on-policy"},
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom")
def test_a_planted_fault_fails_the_law_it_breaks_with_numbers_and_no_other(name):
    law, message = FAULTS[name]
    found = mutant(name)
    assert failed(found) == {law} | ALSO.get(name, set()), table(list(found.values()))
    assert message in found[law].detail


NOTES = {  # nothing declared is broken: said and not failed
    "mean_of_means.py:Scalar": ("averaging", 'the mean inside it is averaging "sequence" (sequence 0, token 0: -A x 0.0666667)'),
    "false_elementwise.py:Undeclared": ("elementwise", "it could declare elementwise = True"),
    "wrong_backward.py:Hidden": ("gradcheck", "something is hidden from autograd"),
    "mask_after_division.py:Guarded": ("on-policy", "where a sequence has one advantage"),
    "derived.py:AgainstTheSampler": (
        "golden",
        "it derives from GRPOLoss and has its own per_token: "
        "GRPOLoss(clip_low=0.2, clip_high=0.2): value 0.360285, that class has 0.0520206",
    ),
    "derived.py:ByTokens": ("golden", "has its own __init__: GRPOLoss(clip_low=0.2, clip_high=0.2): value"),
    "derived.py:OtherOptions": ("golden", "it cannot be compared with GRPOLoss(clip_low=0.2, clip_high=0.2): it raised TypeError"),
}


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_what_breaks_no_declaration_is_a_note(name):
    law, message = NOTES[name]
    found = mutant(name)
    assert not failed(found), table(list(found.values()))
    assert found[law].status == "note" and message in found[law].detail


def test_the_guides_loss_passes_with_notes_about_its_averaging_and_its_kl():
    found = verdicts(f"{GUIDE}:CustomLoss")
    assert not failed(found)
    assert 'averaging "token"' in found["averaging"].detail and "with A = 0 it is -0.1 times that weight" in found["averaging"].detail
    assert found["kl"].status == "note"
    assert "where the policy moves away from the reference (log-ratio 0.5), the loss falls by 0.05" in found["kl"].detail
    assert "its KL term has no gradient in expectation" in found["kl"].detail
    assert "no sequence has a loss token: the value is nan" in found["finite"].detail


@pytest.mark.parametrize(
    ("kl", "status", "detail"),
    [
        ("k1", "note", "no gradient in expectation"),
        ("k2", "pass", "0.3 times that of KL(policy || reference)"),
        ("k3", "pass", "0.3 times that of KL(reference || policy)"),
        ("k3_ratio", "pass", "0.3 times that of KL(policy || reference)"),
    ],
)
def test_the_direction_of_a_kl_is_found_from_its_expected_gradient(kl, status, detail):
    found = verdicts("losses.GRPOLoss", beta=0.3, kl=kl)["kl"]
    assert found.status == status and detail in found.detail


class Scaled(nn.Module):
    """A scalar loss by the averaging it is given, written out."""

    def __init__(self, averaging: str) -> None:
        super().__init__()
        self.averaging = averaging

    def forward(self, logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        loss = -torch.exp(logprobs - logprobs.detach()) * advantages * padding_mask
        sequences = (padding_mask.sum(1) > 0).sum().clamp(min=1)
        if self.averaging == "token":
            return loss.sum() / padding_mask.sum().clamp(min=1)
        return loss.sum() / sequences / (1 if self.averaging == "sum" else 7)


@pytest.mark.parametrize(("averaging", "said"), [("token", '"token"'), ("sum", '"sum"'), ("constant", '"constant, max_tokens=7"')])
def test_a_scalar_loss_is_told_which_averaging_its_gradient_has(averaging, said):
    found = {verdict.law: verdict for verdict in check(Scaled(averaging))}
    assert not failed(found)
    assert f"the mean inside it is averaging {said}" in found["averaging"].detail


def test_a_loss_that_raises_fails_with_its_own_words_and_line():
    class Broken(PolicyLoss):
        averaging = "token"

        def per_token(self, logprobs: Tensor) -> Tensor:
            return logprobs @ logprobs

    found = check(Broken())
    assert found[0].status == "FAIL" and found[0].detail.startswith("raised RuntimeError: ") and "test_check.py, line" in found[0].detail

    class Misspelt(PolicyLoss):
        averaging = "token"

        def per_token(self, logps: Tensor) -> Tensor:
            return -logps

    assert [(v.status, v.law) for v in check(Misspelt())] == [("FAIL", "arguments")]


def test_a_stop_gradient_is_known_in_either_way_to_write_it():
    found = mutant("derived.py:Detached")
    assert not failed(found)
    assert found["gradcheck"].status == "pass" and "with what it detaches held constant" in found["gradcheck"].detail


def test_a_derived_class_that_changes_no_value_keeps_the_golden_ones():
    class Renamed(GRPOLoss):
        def formula(self) -> str:
            return "u = GRPO's"

    found = {verdict.law: verdict for verdict in check(Renamed())}
    assert found["golden"] == ("pass", "golden", "value and gradient of 2 golden cases of GRPOLoss")


def test_the_line_that_raised_is_found_in_a_folder_called_torch(tmp_path):
    folder = tmp_path / "torch" / "mine"
    folder.mkdir(parents=True)
    shutil.copy(MUTANTS / "raises.py", folder)
    assert verdicts(f"{folder}/raises.py:Always")["repeatable"].detail.endswith("(raises.py, line 14)")


def test_a_constructor_that_raises_is_told_in_one_sentence():
    with pytest.raises(
        ConfigError, match=r"raises.py:Built cannot be built: it raised OutOfBudget: none to begin with \(raises.py, line 33\)"
    ):
        resolve([f"{MUTANTS}/raises.py:Built"])


def test_a_loss_that_could_declare_itself_centred_is_told_so():
    class Shy(DAPOLoss):
        centred = False

    found = {verdict.law: verdict for verdict in check(Shy())}
    assert found["on-policy"].status == "note" and "it could declare centred" in found["on-policy"].detail


def test_the_golden_values_that_ship_are_those_the_losses_are_tested_against():
    shipped = json.loads(GOLDEN.read_text())
    tested = json.loads((ROOT / "tests/data/golden_losses.json").read_text())
    assert {case["class"] for case in shipped["cases"]} == set(SHIPPED)
    for name in ("logprobs", "old_logprobs", "gen_logprobs", "ref_logprobs", "padding_mask"):
        assert shipped[name] == tested[name]
    values = {expected["value"]: expected["grad"] for expected in tested["expected"].values()}
    known = [case for case in shipped["cases"] if case["value"] in values]
    assert len(known) == 13 and all(case["grad"] == values[case["value"]] for case in known)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "losses.check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_the_command_prints_aligned_verdicts_exits_by_them_and_leaves_the_users_folder_alone(tmp_path):
    for file in (GUIDE, MUTANTS / "mean_of_means.py"):
        shutil.copy(file, tmp_path)
    before = state(tmp_path)
    passed = run(f"{tmp_path}/custom_loss.py:CustomLoss", "beta=2e-1")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "with A = 0 it is -0.2 times" in passed.stdout
    columns = [line.index(line.split(maxsplit=2 + line.startswith("pass  in place"))[-1]) for line in passed.stdout.splitlines()]
    assert set(columns) == {columns[0]} and len(columns) == len(LAWS) - 4
    broken = run(f"{tmp_path}/mean_of_means.py:Declared")
    assert run("losses.grpo.GRPOLoss", "beta").stderr == "beta is not understood: options of losses.grpo.GRPOLoss are key=value.\n"
    assert broken.returncode == 1 and [line[:17] for line in broken.stdout.splitlines() if "FAIL" in line] == ["FAIL  on-policy  "]
    assert state(tmp_path) == before and sorted(p.name for p in tmp_path.iterdir()) == ["custom_loss.py", "mean_of_means.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["losses.grpo.GRPOLoss", "bta=0.1"], "losses.grpo.GRPOLoss has no argument bta. Did you mean beta?"),
        (["losses.grpo.GRPOLoss", "beta=much"], "loss.beta should be a number"),
        (["losses.grpo.GPROLoss"], "Did you mean GRPOLoss?"),
        (["losses.grpo.GRPOLoss", "beta"], "is not understood"),
        (["nowhere.py:Loss"], "there is no file nowhere.py"),
        ([], "python -m losses.check FILE.py:ClassName"),
    ],
)
def test_a_command_line_that_cannot_be_meant_says_what_to_write(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(arguments)
