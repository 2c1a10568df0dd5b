"""The engine on CUDA: graphs, asynchronous scheduling, prefix cache, seeds, and how it shares the GPU with the trainer."""

import pytest

from tests.gpu.conftest import scenario


@pytest.fixture(scope="module")
def engine(shape_of, tmp_path_factory):
    return scenario("engine", tmp_path_factory.mktemp("engine"), model=shape_of("qwen3_06b"))


def test_graphs_are_captured_and_scheduling_is_asynchronous(engine, figures):
    figures |= {name: engine[name] for name in ("start_s", "graphs", "graph_sizes", "async_scheduling")}
    assert engine["async_scheduling"] is True
    assert engine["graphs"] != "NONE" and engine["graph_sizes"] > 10


def test_a_prompt_is_found_in_the_prefix_cache_until_new_weights_arrive(engine, figures):
    figures["cached_tokens"] = engine["cached"]
    first, again, after_load = engine["cached"]
    assert first == 0 and after_load == 0
    assert again >= 2 * 480  # two prompts of 500 tokens, in whole blocks


def test_a_seed_of_its_own_repeats_a_sample_and_tells_it_from_the_others(engine, figures):
    """What the seeds cost, which is why they are off by default on CUDA, is among the figures."""
    figures |= {name: engine[name] for name in ("distinct", "same_in_half_a_batch", "unseeded_s", "seeded_s", "seed_cost")}
    figures["tokens_per_s"] = 256 * 256 / engine["unseeded_s"]
    assert engine["repeats"] and engine["other_seed_differs"] and engine["unseeded_differ"]
    assert engine["distinct"] == 8


@pytest.mark.parametrize("kind", ["stays", "drops its KV cache", "sleeps"])
@pytest.mark.parametrize("until_load", [True, False])
def test_the_engine_makes_room_and_comes_back_with_the_right_weights(kind, until_load, engine, figures):
    seen = next(s for s in engine["sharing"] if s["kind"] == kind and s["until_load"] == until_load)
    figures |= {name: value for name, value in seen.items() if name not in ("kind", "until_load")}
    figures["freed_gib"] = seen["used_before"] - seen["used_asleep"]
    least = {"stays": -0.1, "drops its KV cache": 0.95 * engine["kv_gib"], "sleeps": 0.95 * engine["kv_gib"] + 1}[kind]
    assert figures["freed_gib"] >= least
    assert abs(seen["used_after"] - seen["used_before"]) <= 0.05
    assert seen["gap_after"] <= 1.5 * seen["gap_before"] + 1e-3


def test_what_the_engine_does_follows_from_bytes(engine, figures):
    figures |= {name: engine[name] for name in ("free_gib", "kv_gib")}
    assert engine["choices"] == ["stays", "drops its KV cache", "sleeps"]
