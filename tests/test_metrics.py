"""The numbers of a step are exact over ranks, and what is written can be read back."""

import html
import json
import math
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from batch import Completion, Group, Prompt
from log import Log, samples_table
from metrics import Clock, MetricsConfig, TokenStats, group_metrics, percentile

MEANS, MAXIMA = ("kl/old", "clip/high", "entropy/mean"), ("ratio/max",)


def uneven_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one rank: (values [B, T], mask [B, T]), uneven token counts, NaN where nothing counts."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for shape in [(2, 7), (5, 3)] if rank == 0 else [(1, 31)]:
        mask = torch.rand(shape, generator=generator) < 0.4 + 0.5 * rank
        values = torch.randn(shape, generator=generator) * 10 ** (3 * rank)
        batches.append((torch.where(mask, values, math.nan), mask))
    return batches


def add_all(stats: TokenStats, ranks: list[int]) -> TokenStats:
    for rank in ranks:
        for values, mask in uneven_batches(rank):
            stats.add("kl/old", values, mask)
            stats.add("ratio/max", values, mask)
    return stats


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    results = {}

    stats = TokenStats(("kl/ref_k3",), ())
    values = [torch.tensor([[4.0, 6.0]]), torch.zeros(2, 4)][rank]
    stats.add("kl/ref_k3", values, torch.ones_like(values))
    results["field case"] = stats.reduce(group)

    stats = TokenStats(MEANS, MAXIMA)
    if rank == 0:
        add_all(stats, [0])
    results["idle"] = stats.reduce(group)

    results["uneven"] = add_all(TokenStats(MEANS, MAXIMA), [rank]).reduce(group)
    results["none"] = TokenStats(MEANS, MAXIMA).reduce(group)

    clock = Clock()
    with clock.phase("train"):
        time.sleep(0.1 + 0.5 * rank)
    mine = clock.seconds["train"]
    results["clock"] = clock.reduce(group) | {"mine": mine}
    results["clock after"] = clock.reduce(group)
    dist.destroy_process_group()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(results, file)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_mean_over_ranks_is_over_tokens_and_not_over_ranks(two_ranks):
    for rank in two_ranks:  # field case LG-01: sum 10 over 2 tokens, sum 0 over 8 tokens; the mean of means is 2.5
        assert rank["field case"] == {"kl/ref_k3": 1.0}
    alone = TokenStats(("kl/ref_k3",), ())
    alone.add("kl/ref_k3", torch.tensor([[4.0, 6.0] + [0.0] * 8]), torch.ones(1, 10))
    assert alone.reduce(None) == {"kl/ref_k3": 1.0}


def test_a_rank_without_tokens_changes_no_value_and_gets_them_all(two_ranks):
    alone = add_all(TokenStats(MEANS, MAXIMA), [0]).reduce(None)
    assert two_ranks[0]["idle"] == two_ranks[1]["idle"] == alone


def test_a_value_that_no_rank_has_is_absent(two_ranks):
    assert two_ranks[0]["none"] == two_ranks[1]["none"] == {}
    assert set(two_ranks[0]["uneven"]) == {"kl/old", "ratio/max"}


def test_two_ranks_with_uneven_tokens_agree_with_one_process_that_has_them_all(two_ranks):
    flat = torch.cat([values[mask] for rank in (0, 1) for values, mask in uneven_batches(rank)]).double()
    assert flat.isfinite().all() and len(flat) > 20
    for rank in two_ranks:
        assert rank["uneven"]["kl/old"] == pytest.approx(math.fsum(flat.tolist()) / len(flat), rel=1e-14)
        assert rank["uneven"]["ratio/max"] == flat.max().item()
    together = add_all(TokenStats(MEANS, MAXIMA), [0, 1]).reduce(None)
    assert together == pytest.approx(two_ranks[0]["uneven"], rel=1e-14)


def test_a_micro_batch_without_columns_counts_for_nothing():
    stats = TokenStats(("kl/old",), ("ratio/max",))
    for name in ("kl/old", "ratio/max"):
        stats.add(name, torch.zeros(2, 0), torch.zeros(2, 0))
        stats.add(name, torch.full((1, 1), -3.0), torch.ones(1, 1))
    assert stats.reduce(None) == {"kl/old": -3.0, "ratio/max": -3.0}


def test_sums_do_not_lose_small_values_beside_large_ones():
    stats = TokenStats(("kl/old",), ())
    for _ in range(1000):
        stats.add("kl/old", torch.ones(1, 1), torch.ones(1, 1))
    stats.add("kl/old", torch.full((1, 1), 2.0**26, dtype=torch.bfloat16), torch.ones(1, 1))
    assert stats.reduce(None)["kl/old"] == (1000 + 2**26) / 1001  # in fp32 the ones would be rounded away


def test_a_nan_that_counts_is_seen_in_mean_and_maximum():
    stats = TokenStats(("kl/old",), ("ratio/max",))
    for name in ("kl/old", "ratio/max"):
        stats.add(name, torch.tensor([[1.0, math.nan]]), torch.ones(1, 2))
    result = stats.reduce(None)
    assert math.isnan(result["kl/old"]) and result["ratio/max"] == math.inf


def test_a_name_that_was_not_declared_is_refused():
    with pytest.raises(ValueError, match="kl/odd is not among"):
        TokenStats().add("kl/odd", torch.ones(1, 1), torch.ones(1, 1))


def test_the_phases_of_a_rank_add_up_to_its_step_and_ranks_report_longest_and_mean(two_ranks):
    mine = [rank["clock"].pop("mine") for rank in two_ranks]
    clock = two_ranks[0]["clock"]
    assert two_ranks[1]["clock"] == clock
    assert clock["time/train"] == max(mine) and clock["time/train_mean"] == pytest.approx(sum(mine) / 2)
    phases = [v for n, v in clock.items() if n.endswith("_mean") and n != "time/step_mean"]
    assert clock["time/step_mean"] == pytest.approx(sum(phases))
    # The faster rank waited in the first reduction, 0.5 s, and the wait is told by the second.
    assert two_ranks[0]["clock after"]["time/wait"] > 0.1
    assert two_ranks[0]["clock after"]["time/train"] == 0


def test_an_inner_phase_interrupts_the_outer_one():
    clock = Clock()
    with clock.phase("generate"):
        with clock.phase("reward"):
            time.sleep(0.2)
    times = clock.reduce(None)
    assert times["time/reward"] >= 0.2 > times["time/generate"]
    assert times["time/step"] == pytest.approx(sum(times[f"time/{n}"] for n in clock.seconds))


def test_a_percentile_is_the_smallest_value_that_covers_its_share():
    for n in range(1, 60):
        values = [(7 * i) % 61 for i in range(n)]
        for percent in (1, 50, 95, 100):
            p = percentile(values, percent)
            assert p in values
            assert sum(v <= p for v in values) * 100 >= percent * n > sum(v < p for v in values) * 100


def group(rewards, lengths=None, stops=None, versions=None, **parts) -> Group:
    n = len(rewards)
    lengths, stops, versions = lengths or [1] * n, stops or ["eos"] * n, versions or [0] * n
    completions = [Completion(f"answer {i}", [5] * lengths[i], [-1.0] * lengths[i], {}, stops[i], versions[i]) for i in range(n)]
    return Group(Prompt(0, [1, 2], "what?", "42"), completions, list(rewards), parts)


def test_group_metrics_of_a_step_computed_by_hand():
    groups = [
        group([1.0, 0.0], [10, 30], ["eos", "length"], [7, 7], math=[1.0, 0.0], form=[0.0, 1.0]),
        group([1.0, 1.0], [20, 40], ["stop_string", "eos"], [6, 6], math=[1.0, 1.0], form=[0.0, 0.0]),
        group([0.0, 0.0], [50, 50], ["length", "abort"], [5, 7], math=[0.0, 0.0], form=[0.0, 0.0]),
        group([0.5, 0.5], [100, 100], ["eos", "eos"], [7, 7], math=[0.5, 0.5], form=[0.0, 0.0]),
    ]
    result = group_metrics(groups, [[2.0, -1.0], [0.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], trainer_version=7)
    assert result == {
        "reward/mean": 0.5,
        "reward/std": math.sqrt((5 * 0.25 + 0.25) / 8),
        "reward/math/mean": 0.5,
        "reward/math/std": math.sqrt(1.5 / 8),
        "reward/form/mean": 1 / 8,
        "reward/form/std": math.sqrt(1 / 8 - 1 / 64),
        "reward/missing": 0.0,
        "reward/solve_none": 0.25,
        "reward/solve_all": 0.25,
        "reward/frac_zero_std": 0.75,
        "adv/mean": 0.0,
        "adv/std": math.sqrt(6 / 8),
        "adv/abs_max": 2.0,
        "adv/token_mean": (2 * 10 - 30 - 100) / 400,
        "adv/frac_pos": 1 / 8,
        "len/mean": 50.0,
        "len/p50": 40.0,
        "len/p95": 100.0,
        "len/max": 100.0,
        "len/mean_correct": (10 + 20 + 40) / 3,
        "len/mean_wrong": (30 + 50 + 50 + 100 + 100) / 5,
        "stop/eos": 0.5,
        "stop/stop_string": 1 / 8,
        "stop/length": 0.25,
        "stop/abort": 1 / 8,
        "trunc_rate": 0.25,
        "staleness/mean": (1 * 60 + 2 * 50) / 400,
        "staleness/max": 2.0,
    }


@pytest.mark.parametrize("reward, count", [(0.1, 8), (0.7, 8), (1.0, 4), (0.1, 3)])
def test_equal_rewards_have_no_spread_at_all(reward, count):
    result = group_metrics([group([reward] * count)], None, 0)  # field case AD-01
    assert result["reward/frac_zero_std"] == 1 and result["reward/std"] == 0 and result["reward/mean"] == reward
    assert (result["reward/solve_all"], result["reward/solve_none"]) == (1, 0)
    assert "adv/mean" not in result


def test_a_step_in_which_nothing_was_solved_is_not_called_solved():
    result = group_metrics([group([0.0, 0.0], [3, 5]), group([0.0, 0.0])], None, 0)
    assert (result["reward/solve_all"], result["reward/solve_none"]) == (0, 1)
    assert "len/mean_correct" not in result and result["len/mean_wrong"] == 2.5


def test_every_stop_reason_is_counted_once():
    result = group_metrics([group([0.0] * 4, stops=["eos", "tool", "length", "tool"])], None, 0)
    shares = {n: v for n, v in result.items() if n.startswith("stop/")}
    assert shares["stop/tool"] == 0.5 and sum(shares.values()) == 1


def scalars(output) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def lines(output) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def write(output, steps, resume_at=None, **extra) -> None:
    log = Log(MetricsConfig(), output, enabled=True, total_steps=9)
    if resume_at is not None:
        log.resume_at(resume_at)
    for step in steps:
        log.step(step, {"loss/policy": step / 3, "policy_version": step} | extra)
    log.close()


def test_what_is_logged_can_be_read_back(tmp_path):
    write(tmp_path / "run", [1, 2])
    assert lines(tmp_path / "run") == [{"step": s, "loss/policy": s / 3, "policy_version": s} for s in (1, 2)]
    assert scalars(tmp_path / "run") == {
        "loss/policy": {s: pytest.approx(s / 3) for s in (1, 2)},
        "policy_version": {1: 1.0, 2: 2.0},
    }


def test_a_resumed_run_replaces_the_steps_it_takes_again(tmp_path):
    write(tmp_path, [1, 2, 3, 4], first=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss/po')  # killed while writing
    (tmp_path / "samples").mkdir()
    for step in (1, 3):
        (tmp_path / f"samples/step_{step:06d}.md").write_text("old")
    write(tmp_path, [3, 4, 5], resume_at=3, second=2.0)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines(tmp_path) if "second" in line] == [3, 4, 5]
    board = scalars(tmp_path)
    assert set(board["first"]) == {1, 2} and set(board["second"]) == {3, 4, 5} and len(board["loss/policy"]) == 5
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["step_000001.md"]


def test_a_run_from_the_start_in_an_old_folder_leaves_one_line_a_step(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [1, 2])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert set(scalars(tmp_path)["loss/policy"]) == {1, 2}


def test_json_has_no_nan_and_says_so_once(tmp_path):
    with pytest.warns(UserWarning, match="kl/old is nan at step 1") as caught:
        write(tmp_path, [1, 2], **{"kl/old": math.nan})
    assert len([w for w in caught if "kl/old" in str(w.message)]) == 1
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and [line["kl/old"] for line in lines(tmp_path)] == [None, None]


def test_a_rank_that_does_not_log_leaves_no_trace(tmp_path, capsys):
    log = Log(MetricsConfig(), tmp_path / "run", enabled=False, total_steps=3)
    log.resume_at(1)
    log.step(1, {"loss/policy": 1.0})
    log.samples(1, [group([1.0])])
    log.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


GRPO_LINE = {
    "reward/mean": 0.4312,
    "len/mean": 182.4,
    "loss/policy": -1.2e-9,
    "kl/ref_k3": 0.00123,
    "entropy/mean": 1.23,
}
TIMES = {
    "time/generate": 112.34,
    "time/logp_ref": 1.0,
    "time/train": 4.5,
    "time/sync": 0.84,
    "perf/tok_s_generate": 12345.6,
}


@pytest.mark.parametrize("without", [(), ("kl/ref_k3",), ("reward/mean",)])
def test_the_console_shows_aligned_lines_of_at_most_100_columns_from_first_to_last_step(tmp_path, capsys, without):
    values = {n: v for n, v in (GRPO_LINE | TIMES).items() if n not in without}
    log = Log(MetricsConfig(tensorboard=False), tmp_path, enabled=True, total_steps=1500)
    log.step(1, values | {"time/step": 300.0})  # warms up
    log.step(2, values | {"time/step": 10.0})
    log.step(1500, values | {"time/step": 10.0, "loss/policy": 123456.7, "eval/pass@1": 0.25})
    log.close()
    titles, first, second, last, scores = capsys.readouterr().out.splitlines()
    assert len(titles) == len(first) == len(second) == len(last) <= 100
    cells = [dict(zip(titles.split(), line.split(), strict=True)) for line in (first, second, last)]
    assert [c["step"] for c in cells] == ["1/1500", "2/1500", "1500/1500"]
    assert [c["eta"] for c in cells] == ["124h55m", "4:09:40", "0:00:00"]
    assert cells[0]["loss"] == "-1e-09" and cells[2]["loss"] == "123457" and cells[0]["train"] == "4.5s"
    assert ("kl" in cells[0]) == ("kl/ref_k3" in values and "reward/mean" in values)
    if "reward/mean" in values:
        assert cells[0]["reward"] == "0.4312" and cells[0]["gen"] == "112s" and cells[0]["tok/s"] == "12346"
    assert scores == "step 1500: eval/pass@1 0.2500"


HOSTILE = [
    "a | b || c \\| d \\\\| e |",
    "first\nsecond\r\nthird\u2028fourth",
    "<script>alert(1)</script> <b>x</b> 1 < 2 && 3 > 2 &lt; &amp;",
    "`code | pipe` ``` **bold** __x__ *y* [link](http://x) ![i](j)",
    "|---|---|\n# title\n- item",
    "half \ud800 surrogate, \x00 and \x02",
]


def rendered_cells(table: str) -> list[list[str]]:
    """The rows of the table as TensorBoard shows them, as text."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(table)
    rows = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", page, re.S)[1:]]
    return [[html.unescape(re.sub(r"<br ?/?>", "\n", cell)) for cell in row] for row in rows]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_sample_is_shown_as_the_text_it_is(text):
    sample = Group(Prompt(0, [1], text, text), [Completion(text, [1, 2], [0.0, 0.0])], [0.5], {"math": [0.25]})
    expected = (
        re.sub("\r\n|\u2028", "\n", text).replace("\ud800", "?").replace("\x00", "\ufffd").replace("\x02", "\ufffd")
    )
    assert rendered_cells(samples_table([sample])) == [[expected] * 3 + ["0.5", "math 0.25", "eos", "2"]]


def test_a_long_sample_keeps_its_beginning_and_its_end():
    sample = Group(Prompt(0, [1]), [Completion("start" + "x" * 9000 + "end", [1], [0.0])], [0.0])
    ((_, response, *_),) = rendered_cells(samples_table([sample]))
    assert response.startswith("start") and response.endswith("end") and "7008 characters" in response


def test_the_table_shows_the_best_and_the_worst_of_each_group_up_to_the_limit():
    groups = [group([0.5, 0.0, 1.0]), group([0.0]), group([0.2, 0.9])]
    assert [row[3] for row in rendered_cells(samples_table(groups))] == ["1", "0", "0", "0.9", "0.2"]
    assert [row[3] for row in rendered_cells(samples_table(groups, limit=2))] == ["1", "0"]


def test_samples_are_written_on_the_first_the_last_and_every_tenth_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(MetricsConfig(samples_every=10), tmp_path, enabled=True, total_steps=23)
    for step in range(1, 24):
        log.step(step, {})
        log.samples(step, [group([1.0, 0.0])])
    log.close()
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == [
        f"step_{step:06d}.md" for step in (1, 10, 20, 23)
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Tensors("samples/text_summary")] == [1, 10, 20, 23]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert (tmp_path / "samples/step_000023.md").read_text().endswith(text) and "answer 1" in text


def test_no_samples_are_written_when_none_are_asked_for(tmp_path):
    log = Log(MetricsConfig(samples_every=0, tensorboard=False, jsonl=False), tmp_path, enabled=True, total_steps=1)
    log.step(1, {"loss/policy": 1.0})
    log.samples(1, [group([1.0])])
    log.close()
    assert list(tmp_path.iterdir()) == []
