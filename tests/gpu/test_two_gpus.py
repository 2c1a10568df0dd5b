"""One engine over two GPUs, asleep while the policy trains on both."""

import pytest
import torch

from tests.gpu.conftest import scenario


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_asynchronous_scheduling_works_with_tensor_parallelism_and_sleep(shape_of, tmp_path, figures):
    options = {"disable_custom_all_reduce": True}
    seen = scenario("tensor_parallel", tmp_path, nproc=2, model=shape_of("qwen3_06b"), rounds=4, engine_options=options)
    figures |= {name: value for name, value in seen.items() if name != "gaps"} | {"gap": max(seen["gaps"])}
    assert seen["async_scheduling"] is True and seen["ranks_agree"]
    assert max(seen["gaps"]) <= 2 * seen["gaps"][0] + 1e-3
    assert seen["freed_gib"] > 20
