"""Two torchrun agents, as two nodes have them, are one world: the numbers of one rank, logs of the right rank, failures told once."""

from functools import partial

import pytest

from tests.two_nodes import assert_same_run, steps, two_agents, write_config
from tests.world import run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path, tiny_qwen3, additions):
    """`config(name, **keys)`: the file of a small run whose folder is `tmp_path`/name."""
    return partial(write_config, tmp_path, model=tiny_qwen3, data=additions)


def test_roles_on_two_agents_are_one_run_with_the_numbers_of_one_rank(config, tmp_path):
    run_script(1, "train_grpo.py", str(config("one")))
    roles = {"trainer": {"procs": 1}, "ref_model": {"with_gpus": False}, "generator": {"procs": 1}}
    codes, output = two_agents("train_grpo.py", config("two", services=roles))
    assert codes == [0, 0], output
    assert output.count("run folder ") == 1
    assert len(steps(tmp_path / "two")) == 3
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert sorted(p.name for p in (tmp_path / "two/checkpoints").iterdir()) == ["step_2", "step_3"]


def test_what_does_not_fit_is_told_once_for_both_agents(config):
    services = {"trainer": {"procs": 2}, "ref_model": {"with_gpus": False}, "generator": {"procs": 1}}
    codes, output = two_agents("train_grpo.py", config("three", services=services))
    assert 0 not in codes
    assert output.count("the roles need 3 ranks and there are 2; start more (--nproc 3), lower services.*.procs, or") == 1
