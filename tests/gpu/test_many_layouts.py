"""The law of tests/test_placement.py over NCCL, on all GPUs of a machine: several layouts at a time, each on GPUs of its own.

The matrix of docs/parallelism.md and a case of each kind of parallelism; with LAYOUTS=all every layout. What is other than on a CPU is in
tests/layouts.py. A rehearsal runs the same on a CPU with gloo, one layout after the other.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import test_placement as law
from tests.gpu.many import RANKS, devices, needs_two
from tests.layouts import FAST, FOLLOWS, LAYOUTS, OFF_POLICY, ON_POLICY, Layout, Runs, documented

pytestmark = needs_two
CHOSEN = [*FAST, "trainer TP 4", "trainer 1, 2 generators of TP 2, stale", *documented()]
LAWS: dict[Callable, Callable[[Layout], bool]] = {
    law.test_every_rank_holds_the_completions_and_rewards_of_one_rank: lambda layout: True,
    law.test_log_probs_of_every_token_agree_to_1e_4: lambda layout: True,
    law.test_every_steps_numbers_agree: lambda layout: True,
    law.test_the_first_on_policy_loss_is_zero: lambda layout: layout.recipe in ON_POLICY,
    law.test_the_recipes_with_old_data_have_ratios_other_than_one: lambda layout: layout.recipe in OFF_POLICY,
    law.test_engines_that_follow_sample_nearly_what_one_rank_sampled: lambda layout: not layout.replays,
    law.test_the_first_gradient_agrees_on_every_rank_that_trains: lambda layout: True,
    law.test_the_weights_after_four_steps_agree: lambda layout: True,
}


@pytest.fixture(scope="module")
def compare(request, checkpoint_of, additions, held_out_additions, tmp_path_factory) -> law.Compare:
    """All that were asked for run at once, as far as there are GPUs for them."""
    assert FOLLOWS, "start this by tests/gpu/run.sh, which sets LAYOUTS_DEVICE"
    runs = Runs(checkpoint_of, additions, held_out_additions, lambda: tmp_path_factory.mktemp("run"), devices())
    asked = [item.callspec.params["layout"] for item in request.session.items if item.path == request.path]
    runs.start([name for name in asked if LAYOUTS[name].nproc <= RANKS])
    return law.compared(runs)


@pytest.fixture
def told(capsys) -> Iterator[Callable[[], str]]:
    yield lambda: "; ".join(line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("layout", LAYOUTS if os.environ.get("LAYOUTS") == "all" else CHOSEN)
def test_a_layout_has_the_numbers_of_one_rank(layout, compare, told, figures: dict[str, Any]):
    """All laws are tried, and those that do not hold are named together."""
    if LAYOUTS[layout].nproc > RANKS:
        pytest.skip(f"needs {LAYOUTS[layout].nproc} GPUs")
    compare(layout)
    broken = []
    for holds, concerns in LAWS.items():
        if concerns(LAYOUTS[layout]):
            try:
                holds(layout, compare)
            except AssertionError as error:
                broken.append(f"{holds.__name__}: {str(error).partition(chr(10))[0]}")
    figures["found"] = told()
    assert not broken, "\n".join(broken)
