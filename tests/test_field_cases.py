"""Faults that other trainers' users reported (tests/data/field_cases.jsonl, with the right values) and the tests that hold them off."""

import ast
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = {case["id"]: case for case in map(json.loads, (HERE / "data/field_cases.jsonl").read_text().splitlines())}

TESTS = {
    "FC-LN-01": "test_losses.py::test_a_token_mean_over_two_ranks_is_the_mean_over_all_their_tokens",
    "FC-LN-05": "test_losses.py::test_masked_answers_count_in_neither_numerator_nor_denominator",
    "FC-AD-01": "test_advantages.py::test_equal_rewards_give_exactly_no_advantage",
    "FC-KL-01": "test_losses.py::test_the_loss_rises_by_beta_times_a_kl_that_is_never_negative",
    "FC-MT-01": "test_conversations.py::test_the_mask_of_a_short_chat_to_smollm2_has_its_eos_which_is_also_its_padding",
    "FC-MT-05": "test_data.py::test_a_prompt_begins_with_one_bos_at_most_and_has_no_eos_behind",
    "FC-MT-09": "test_rewards.py::test_a_thought_counts_once_and_only_with_an_answer_after_it",
    "FC-RP-01": "test_answers.py::test_an_answer_is_right_or_wrong",
    "FC-RP-04": "test_answers.py::test_an_answer_is_right_or_wrong",
    "FC-RF-01": "test_rewards.py::test_a_reward_without_a_finite_number_stops_the_run_and_names_itself_and_the_sample",
    "FC-DS-01": "test_data.py::test_the_data_starts_again_after_a_pass_in_another_order",
    "FC-DS-04": "test_dataset_files.py::test_a_bad_line_stops_the_run_and_is_named",
    "FC-WS-01": "test_weight_sync.py::test_after_a_sync_a_cached_prompt_is_answered_as_by_a_new_engine",
    "FC-WS-02": "test_weight_sync.py::test_a_tied_models_embedding_and_head_both_follow_the_policy",
    "FC-VL-01": "test_weight_sync.py::test_replicas_answer_the_same_prompt_differently",
    "FC-VL-03": "test_head.py::test_a_temperature_scales_the_logits_before_the_softmax",
    "FC-DI-01": "test_sft.py::test_each_held_out_row_counts_once_however_many_ranks_there_are",
    "FC-CK-02": "test_checkpoint.py::test_six_steps_of_fine_tuning_equal_three_and_three",
    "FC-NU-01": "test_trainer.py::test_master_weights_are_fp32_so_that_bf16_training_keeps_steps_of_1e_6",
    "FC-CF-01": "test_config.py::test_exponents_are_numbers_in_a_file_and_on_the_command_line",
    "FC-LG-01": "test_metrics.py::test_a_mean_over_ranks_is_over_tokens_and_not_over_ranks",
    "FC-SL-01": "test_run_sh.py::test_a_host_list_is_expanded_without_scontrol",
    "FC-SE-01": "test_rewards.py::test_text_from_a_model_is_never_executed_nor_evaluated",
}


def test_every_field_case_that_is_kept_has_a_test():
    assert CASES.keys() == TESTS.keys()


@pytest.mark.parametrize("case", sorted(TESTS))
def test_the_test_of_a_field_case_exists(case):
    file, _, name = TESTS[case].partition("::")
    tree = ast.parse((HERE / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, TESTS[case]
