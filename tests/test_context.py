"""Which heads context parallelism can deal out, and how it cuts a row."""

import pytest
from transformers import LlamaConfig

from parallel.context import Context
from parallel.fit import _check_cp


def model(heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads)


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "cp"), [(8, 8, 1, 4), (8, 2, 1, 4), (8, 2, 2, 4), (12, 6, 1, 3), (4, 1, 1, 4)])
def test_heads_that_each_rank_gets_a_part_of_are_taken(heads, kv_heads, tp, cp):
    _check_cp(model(heads, kv_heads), tp, cp, "parallelism")


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "cp", "told"), [
    (6, 2, 1, 4, "context_parallel_degree=4 must divide a rank's 6 attention heads, and divide or be a multiple of its 2 key-value heads"),
    (12, 3, 1, 2, "its 3 key-value heads"),
    (8, 8, 4, 4, r"a rank's 2 attention heads.*\(of tensor_parallel_degree=4\)"),
])  # fmt: skip
def test_heads_that_cannot_be_dealt_out_are_refused_by_their_numbers(heads, kv_heads, tp, cp, told):
    with pytest.raises(ValueError, match=told):
        _check_cp(model(heads, kv_heads), tp, cp, "parallelism")


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_row_is_cut_into_parts_that_differ_by_one_token_at_most_and_leave_none_out(tokens, size):
    rows = [Context(None, size, r).row(tokens) for r in range(size)]  # type: ignore[arg-type]
    assert [t for row in rows for t in range(tokens)[row.own]] == list(range(tokens))
    assert max(rows[0].lengths) - min(rows[0].lengths) <= 1
