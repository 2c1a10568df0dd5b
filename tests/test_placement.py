"""Placement may not change the numbers: the law that the whole architecture hangs on.

Each layout runs four rollouts of train_grpo.py with real collectives and is compared with one rank under the same settings. Where
a layout differs in the trainer alone, the completions that the one rank sampled are replayed; the others start real engines.
The layouts are in tests/layouts.py, with what is different on CUDA.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator

import pytest

from batch import Completion, Group
from tests.layouts import FOLLOWS, LAYOUTS, LEARNING_RATE, LOOSER, OFF_POLICY, ON_POLICY, RECIPES, SLOW, STEPS, Run, Runs
from tests.observe import Observed


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names])


each_layout = each(LAYOUTS)


Compare = Callable[[str], tuple[Run, Run]]


def compared(runs: Runs) -> Compare:
    """`compare(layout)`: what happened on one rank, and in that layout."""

    def compare(name: str) -> tuple[Run, Run]:
        one, run = runs.pair(name)
        for result in (one, run):
            if isinstance(result, str):
                pytest.fail(result, pytrace=False)
        return one, run  # type: ignore[return-value]

    return compare


@pytest.fixture(scope="module")
def compare(checkpoint_of, additions, held_out_additions, tmp_path_factory) -> Compare:
    return compared(Runs(checkpoint_of, additions, held_out_additions, lambda: tmp_path_factory.mktemp("run"), []))


def samples(run: Observed) -> Iterator[tuple[str, Group, int, Completion]]:
    for step, groups in enumerate(run.groups, 1):
        for group in groups:
            for sample, completion in enumerate(group.completions):
                yield f"step {step}, {group.prompt.text!r}, sample {sample}", group, sample, completion


def first_difference(where: str, one: Completion, other: Completion) -> str:
    """Which token was the first to differ, and how likely each of the two was: close to each other means a near tie."""
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            margin = one.logprobs[at] - other.logprobs[at]
            return (
                f"{where}: token {at} is {a} on one rank (log-prob {one.logprobs[at]:.7f}) and {b} here "
                f"({other.logprobs[at]:.7f}; margin {margin:.2e}); {one.text!r} and {other.text!r}"
            )
    return f"{where}: {len(one.token_ids)} tokens on one rank and {len(other.token_ids)} here: {one.text!r} and {other.text!r}"


@each_layout
def test_every_rank_holds_the_completions_and_rewards_of_one_rank(layout, compare: Compare):
    one, run = compare(layout)
    expected = list(samples(one.ranks[0]))
    reasons = {completion.stop_reason for _, _, _, completion in expected}
    assert len(reasons) == 3 or len(expected) < 60, f"the recipe is to show eos, stop_string and length, not only {reasons}"
    for rank in run.ranks:
        found = list(samples(rank))
        assert [where for where, *_ in found] == [where for where, *_ in expected]
        for (where, group, sample, completion), (_, theirs, _, other) in zip(expected, found, strict=True):
            assert completion.token_ids == other.token_ids, first_difference(where, completion, other)
            assert (completion.stop_reason, completion.text) == (other.stop_reason, other.text), where
            assert completion.policy_version == other.policy_version, where
            assert (group.rewards[sample], group.prompt) == (theirs.rewards[sample], theirs.prompt), where
        assert rank.advantages == one.ranks[0].advantages


@each_layout
def test_log_probs_of_every_token_agree_to_1e_4(layout, compare: Compare):
    one, run = compare(layout)
    largest = 0.0
    for rank in run.ranks:
        for (where, _, _, a), (_, _, _, b) in zip(samples(one.ranks[0]), samples(rank), strict=True):
            assert a.token_ids == b.token_ids, first_difference(where, a, b)
            largest = max([largest, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))])
            assert largest <= 1e-4, f"sampler, {where}: {a.logprobs} and {b.logprobs}"
        for step, (theirs, ours) in enumerate(zip(one.ranks[0].attached, rank.attached, strict=True), 1):
            assert theirs.keys() == ours.keys()
            for name in theirs:
                gap = max(float(abs(x - y).max()) for x, y in zip(theirs[name], ours[name], strict=True))
                largest = max(largest, gap)
                assert gap <= 1e-4, f"{name}, step {step}: {gap}"
    print(f"{layout}: log-probs {largest:.1e}")


EXEMPT = ("time/", "perf/", "mem/")
COUNTED = ("reward/", "adv/", "len/", "stop/", "trunc_rate", "staleness/", "policy_version", "loss/tokens", "grad/clipped", "optim/lr")


def tolerance(name: str, value: float) -> float:
    """How far a number of metrics.jsonl may be from that of one rank."""
    if name.startswith(COUNTED) or name == "step":
        return 0.0
    if name.startswith("mismatch/") or name == "ratio/max":
        return 1e-4  # of one token: a gap between log-probs
    if name.startswith("grad/norm"):
        return 1e-5 * abs(value) * LOOSER
    if name == "optim/update_to_weight":
        return 1e-4 * abs(value) * LOOSER  # AdamW makes much of gradients that are almost 0
    return (1e-5 * abs(value) + 1e-6) * LOOSER


@each_layout
def test_every_steps_numbers_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert len(one.steps) == len(run.steps) == STEPS
    used: dict[str, float] = {}
    for a, b in zip(one.steps, run.steps, strict=True):
        names, theirs = ({name for name in row if not name.startswith(EXEMPT)} for row in (a, b))
        assert names == theirs
        for name in sorted(names):
            gap, limit = abs(a[name] - b[name]), tolerance(name, a[name])
            assert gap <= limit, f"{name}, step {a['step']}: {a[name]} on one rank, {b[name]} here; allowed {limit:.1e}"
            used[name] = max(used.get(name, 0.0), gap / limit if limit else 0.0)
    worst = sorted(used.items(), key=lambda item: -item[1])[:4]
    print(f"{layout}: share of the tolerance used: " + ", ".join(f"{name} {share:.2f}" for name, share in worst))


@each(name for name in LAYOUTS if LAYOUTS[name].recipe in ON_POLICY)
def test_the_first_on_policy_loss_is_zero(layout, compare: Compare):
    """With ratios of 1, no divergence yet, and advantages that add up to 0 in each group, whatever the split.

    The sum is in float64, but advantages are rounded to float32, each by 2**-25 of its size at most.
    """
    _, run = compare(layout)
    size = statistics.fmean(abs(a) for group in run.ranks[0].advantages[0] for a in group)
    assert abs(run.steps[0]["loss/policy"]) <= 2**-24 * size
    assert run.steps[0]["ratio/max"] == 1.0


@each(name for name in LAYOUTS if LAYOUTS[name].recipe in OFF_POLICY)
def test_the_recipes_with_old_data_have_ratios_other_than_one(layout, compare: Compare):
    _, run = compare(layout)
    assert max(row["ratio/max"] for row in run.steps) > 1.001


@each(name for name in LAYOUTS if not LAYOUTS[name].replays and not FOLLOWS)
def test_evaluations_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert len(run.evaluations) == 2
    assert run.evaluations == one.evaluations


@each(name for name in LAYOUTS if not LAYOUTS[name].replays and FOLLOWS)
def test_engines_that_follow_sample_nearly_what_one_rank_sampled(layout, compare: Compare):
    """Nine answers in ten, and log-probs of what both have to 1e-3: vLLM's attention on CUDA rounds fp32 operands to TF32."""
    one, run = compare(layout)
    recorded = {g.prompt.index: g for groups in one.ranks[0].groups for g in groups}
    sampled = [group for rank in run.ranks for group in rank.sampled]
    assert {g.prompt.index for g in sampled} == recorded.keys()
    pairs = [pair for g in sampled for pair in zip(recorded[g.prompt.index].completions, g.completions, strict=True)]
    gaps = [0.0]
    for a, b in pairs:
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(a.token_ids, b.token_ids, strict=False))
        gaps += [abs(x - y) for x, y, _ in zip(a.logprobs, b.logprobs, same, strict=False)]
    equal = statistics.fmean(a.token_ids == b.token_ids for a, b in pairs)
    print(f"{layout}: {equal:.1%} of {len(pairs)} answers equal, log-probs {max(gaps):.1e}")
    assert equal >= 0.9 and max(gaps) <= 1e-3


@each_layout
def test_the_first_gradient_agrees_on_every_rank_that_trains(layout, compare: Compare):
    """This sees a factor that AdamW hides."""
    one, run = compare(layout)
    expected = one.ranks[0].gradient
    gradients = [rank.gradient for rank in run.ranks if rank.gradient]
    assert set().union(*gradients) == expected.keys() == one.start.keys()
    stages = LAYOUTS[layout].roles.get("parallelism", {}).get("pipeline_parallel_degree", 1)
    worst = (0.0, "")
    for gradient in gradients:
        assert stages > 1 or gradient.keys() == expected.keys()
        for name, ours in gradient.items():
            g = expected[name]
            assert g.norm() > 0, f"{name} has no gradient: nothing is tested"
            off = float((ours - g).norm() / g.norm())
            worst = max(worst, (off, name))
            sizes = f"||g|| is {float(g.norm()):.3e} on one rank, {float(ours.norm()):.3e} here"
            assert off <= 1e-5 * LOOSER, f"{name}: ||dg|| / ||g|| = {off:.1e}; {sizes}"
    print(f"{layout}: gradient of {len(gradients)} ranks, {worst[0]:.1e} ({worst[1]})")


@each_layout
def test_the_weights_after_four_steps_agree(layout, compare: Compare):
    one, run = compare(layout)
    assert run.weights.keys() == one.weights.keys() == one.start.keys()
    updates = STEPS * RECIPES[LAYOUTS[layout].recipe].get("training", {}).get("updates_per_rollout", 1)
    norm, largest = (0.0, ""), (0.0, "")
    for name, w in one.weights.items():
        assert (w - one.start[name]).abs().max() > LEARNING_RATE, f"{name} has hardly moved: nothing is tested"
        moved = run.weights[name] - w
        norm = max(norm, (float(moved.norm() / w.norm()), name))
        largest = max(largest, (float(moved.abs().max()), name))
    print(f"{layout}: weights {norm[0]:.1e} ({norm[1]}), largest {largest[0]:.1e} ({largest[1]})")
    assert norm[0] <= 1e-5 * LOOSER, f"{norm[1]}: ||dw|| / ||w|| = {norm[0]:.1e}"
    assert largest[0] <= 0.05 * LEARNING_RATE * updates * LOOSER, f"{largest[1]}: max |dw| = {largest[0]:.1e}"
