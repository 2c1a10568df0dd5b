"""Which ranks do what, from a configuration alone: the guide's files, and plans that do not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

import train_grpo
import train_sft
from parallel.fit import check_engine
from parallel.placement import check_gpus

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "tests/data/guide"
GIVEN = ["dataset.path=x.jsonl", "rewards.math=rollout.rewards.MathReward"]


@pytest.fixture
def planned(monkeypatch, capsys):
    """`planned(arguments, ranks=None)`: what train_grpo prints, started by torchrun on `ranks`, or as a plain script."""

    def plan(*arguments: str, ranks: int | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *map(str, arguments)])
        if ranks is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
        train_grpo.main()
        return capsys.readouterr().out

    return plan


EIGHT_RANKS = """\
8 ranks
  role        ranks          replicas x tensor parallel
  trainer     0-3            2 FSDP shards x TP 2
  ref_model   none
  generator   4-7            1 engines x TP 4
"""


def test_the_guides_command_for_eight_gpus_is_planned_as_eight_ranks(planned):
    command = ["--config", GUIDE / "distributed.yaml", "--trainer.procs", "4", "--generator.procs", "4"]
    assert planned(*command, "--plan") == EIGHT_RANKS
    assert planned(*command, "--plan=8") == EIGHT_RANKS
    assert planned(*command, "--plan", ranks=2) == EIGHT_RANKS  # --plan says what is needed, wherever it is asked


@pytest.mark.parametrize(("degrees", "ranks", "row"), [
    (["data_parallel_replicate_degree=2"], 4, "  trainer     0-3            2 x 2 FSDP shards x TP 1"),
    (["context_parallel_degree=2"], 4, "  trainer     0-3            2 FSDP shards x CP 2 x TP 1"),
    (["data_parallel_replicate_degree=2", "context_parallel_degree=2", "tensor_parallel_degree=2"], 16,
     "  trainer     0-15           2 x 2 FSDP shards x CP 2 x TP 2"),
])  # fmt: skip
def test_degrees_multiply_and_shards_take_the_rest(degrees, ranks, row, planned):
    table = planned("model=m", *GIVEN, *(f"parallelism.{d}" for d in degrees), f"--plan={ranks}")
    assert row in table.splitlines()


@pytest.mark.parametrize(("arguments", "message"), [
    (["parallelism.context_parallel_degree=2"],
     "all roles share 3 ranks, which the product of parallelism (context_parallel_degree=2 x tensor_parallel_degree=1 x "
     "data_parallel_shard_degree=-1) does not divide; start a multiple"),
    (["parallelism.data_parallel_replicate_degree=3", "parallelism.data_parallel_shard_degree=2"],
     "all roles share 3 ranks, but parallelism asks the trainer for data_parallel_replicate_degree=3 x tensor_parallel_degree=1 x "
     "data_parallel_shard_degree=2; start 6 ranks, or set data_parallel_shard_degree: -1"),
    (["parallelism.context_parallel_degree=0"], "parallelism.context_parallel_degree=0: must be at least 1"),
])  # fmt: skip
def test_degrees_that_three_ranks_cannot_have_are_refused_by_their_numbers(arguments, message, planned):
    with pytest.raises(ValueError) as error:
        planned("model=m", *GIVEN, *arguments, "--plan=3")
    assert message in str(error.value)


def test_a_plan_needs_no_model_data_reward_or_torchrun():
    # The guide's file names a model that nobody can read without asking its owner, and neither data nor rewards.
    command = [sys.executable, "train_grpo.py", "tests/data/guide/distributed.yaml", "trainer.procs=4", "generator.procs=4", "--plan"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, EIGHT_RANKS, "")


CONTRADICTION = """\
the services do not fit:
  trainer    0-1            2 ranks
  generator  2-3            2 ranks
  - services.trainer.procs=2, but parallelism asks for tensor_parallel_degree=2 x data_parallel_shard_degree=2 = 4 ranks; \
set services.trainer.procs: 4, or data_parallel_shard_degree: -1"""


def test_the_guides_distributed_file_alone_is_refused_with_the_rank_table_and_the_remedy(planned):
    ranks = (
        "\n  - the roles need 6 ranks and there are 4; start more (--nproc 6), lower services.*.procs, "
        "or set colocate: true to share 4 ranks"
    )
    for arguments, more in ((["--plan"], ""), ([], ranks)):
        with pytest.raises(ValueError) as error:
            planned(GUIDE / "distributed.yaml", *arguments, ranks=4)
        assert str(error.value) == CONTRADICTION + more


@pytest.mark.parametrize("remedy", ["services.trainer.procs=4", "parallelism.data_parallel_shard_degree=-1"])
def test_each_remedy_of_that_message_works(remedy, planned):
    assert "x TP 2" in planned(GUIDE / "distributed.yaml", remedy, "--plan")


def test_the_guides_grpo_file_is_three_ranks_as_its_checklist_says(planned):
    assert planned("--config", GUIDE / "grpo_math.yaml", "--plan") == """\
3 ranks
  role        ranks          replicas x tensor parallel
  trainer     0              1 FSDP shards x TP 1
  ref_model   1              1 FSDP shards x TP 1
  generator   2              1 engines x TP 1
"""


@pytest.mark.parametrize(("ranks", "what"), [
    (1, "the roles need 3 ranks and there are 1; start more (--nproc 3), lower services.*.procs, set ref_model.with_gpus: false "
        "or remove ref_model (with beta 0), or set colocate: true to share 1 ranks"),
    (2, "the roles need 3 ranks and there are 2; start more (--nproc 3), lower services.*.procs, set ref_model.with_gpus: false "
        "or remove ref_model (with beta 0), or set colocate: true to share 2 ranks"),
    (5, "2 of 5 ranks would be idle; start 3, or raise services.*.procs"),
])  # fmt: skip
def test_a_wrong_number_of_ranks_is_refused_with_the_rank_table_and_what_to_change(ranks, what, planned):
    with pytest.raises(ValueError) as error:
        planned(GUIDE / "grpo_math.yaml", *GIVEN, ranks=ranks)
    table = "  trainer    0              1 ranks\n  ref_model  1              1 ranks\n  generator  2              1 ranks\n"
    assert str(error.value) == f"the services do not fit:\n{table}  - {what}"


@pytest.mark.parametrize(("remedy", "ranks"), [
    (["ref_model.with_gpus=false"], 2),
    (["services.ref_model=null", "grpo.beta=0"], 2),
    (["colocate=true"], 1),
    (["colocate=true"], 2),
])  # fmt: skip
def test_each_remedy_for_too_few_ranks_fits(remedy, ranks, planned):
    assert planned(GUIDE / "grpo_math.yaml", *remedy, f"--plan={ranks}").startswith(f"{ranks} ranks\n")


def test_a_reference_without_gpus_lives_on_the_cpu_of_the_trainers_ranks(planned):
    plan = planned(GUIDE / "grpo_math.yaml", "--ref_model.with_gpus", "false", "--plan")
    assert "2 ranks\n" in plan and "ref_model   0              1 FSDP shards x TP 1 (on the CPU)\n" in plan


@pytest.mark.parametrize(("reference", "ranks", "row"), [
    (["ref_model.procs=2", "ref_model.parallelism.tensor_parallel_degree=2"], 4, "  ref_model   1-2            1 FSDP shards x TP 2"),
    (["ref_model.procs=4", "ref_model.parallelism.data_parallel_replicate_degree=2"], 6,
     "  ref_model   1-4            2 x 2 FSDP shards x TP 1"),
    (["trainer.procs=4", "parallelism.tensor_parallel_degree=4", "ref_model.procs=2", "ref_model.parallelism={}"], 7,
     "  ref_model   4-5            2 FSDP shards x TP 1"),
    (["trainer.procs=2", "ref_model.with_gpus=false", "ref_model.parallelism.context_parallel_degree=2"], 3,
     "  ref_model   0-1            1 FSDP shards x CP 2 x TP 1 (on the CPU)"),
    (["colocate=true", "parallelism.pipeline_parallel_degree=2", "ref_model.parallelism.tensor_parallel_degree=4"], 8,
     "  ref_model   0-7            2 FSDP shards x TP 4"),
])  # fmt: skip
def test_a_reference_may_have_degrees_of_its_own(reference, ranks, row, planned):
    assert row in planned(GUIDE / "grpo_math.yaml", *reference, f"--plan={ranks}").splitlines()


def test_roles_that_share_ranks_are_as_many_as_all_their_degrees_divide(planned):
    degrees = ["parallelism.tensor_parallel_degree=2", "ref_model.parallelism.tensor_parallel_degree=3", "generator.procs=4"]
    assert planned(GUIDE / "grpo_math.yaml", "colocate=true", *degrees, "--plan").startswith("12 ranks\n")


@pytest.mark.parametrize(("arguments", "ranks", "message"), [
    (["trainer.procs=3", "parallelism.tensor_parallel_degree=2", "ref_model.procs=2"], 6,
     "services.trainer.procs=3 is not a multiple of 2, and parallelism has tensor_parallel_degree=2 x data_parallel_shard_degree=-1; set "
     "services.trainer.procs: 4, or lower these degrees to a product that divides 3"),
    (["trainer.procs=2", "parallelism.tensor_parallel_degree=2", "ref_model.procs=1"], 4,
     "services.ref_model.procs=1 is not a multiple of 2, and parallelism has tensor_parallel_degree=2 x data_parallel_shard_degree=-1; set "
     "services.ref_model.procs: 2, or give the reference degrees of its own with services.ref_model.parallelism"),
    (["ref_model.procs=3", "ref_model.parallelism.data_parallel_shard_degree=2"], 5,
     "services.ref_model.procs=3, but services.ref_model.parallelism asks for tensor_parallel_degree=1 x data_parallel_shard_degree=2 = 2 "
     "ranks; set services.ref_model.procs: 2, or services.ref_model.parallelism.data_parallel_shard_degree: -1"),
    (["ref_model.with_gpus=false", "ref_model.parallelism.tensor_parallel_degree=2"], 2,
     "services.ref_model.parallelism asks for tensor_parallel_degree=2 x data_parallel_shard_degree=-1, and the reference is on the CPU of "
     "the trainer's 1 ranks; set services.ref_model.parallelism: null for the trainer's degrees, or degrees whose product divides 1"),
    (["colocate=true", "ref_model.parallelism.tensor_parallel_degree=2"], 3,
     "all roles share 3 ranks, which services.ref_model.parallelism.tensor_parallel_degree=2 does not divide; start a multiple of 2 "
     "(--nproc 4), or lower the degrees to a product that divides 3"),
    (["colocate=true", "generator.procs=2"], 3,
     "services.generator.procs=2 does not divide the 3 ranks that all roles share; start a multiple of 2 (--nproc 4), or set "
     "services.generator.procs to a divisor of 3"),
    (["trainer.parallelism.tensor_parallel_degree=2"], 3,
     "services.trainer.parallelism: only ref_model has degrees of its own here; remove it and set the top-level parallelism"),
    (["generator.parallelism.tensor_parallel_degree=2"], 3,
     "services.generator.parallelism: only ref_model has degrees of its own here; remove it and set generator.procs, the tensor-parallel "
     "ranks of an engine"),
])  # fmt: skip
def test_degrees_that_do_not_fit_are_told_with_need_have_and_two_remedies(arguments, ranks, message, planned):
    with pytest.raises(ValueError) as error:
        planned(GUIDE / "grpo_math.yaml", *arguments, f"--plan={ranks}")
    assert message in str(error.value)


MODEL_LIMITS = [  # of 4 attention heads, 2 key-value heads, 2 layers and 192 columns of the MLP
    (["parallelism.tensor_parallel_degree=4"], 4, "parallelism.tensor_parallel_degree=4 does not divide the model's 2 key-value heads; set "
     "it to 1 or 2, and use more ranks with data_parallel_shard_degree, which any number of ranks may have, or with "
     "pipeline_parallel_degree"),
    (["parallelism.context_parallel_degree=3"], 3,
     "parallelism.context_parallel_degree=3 must divide a rank's 4 attention heads, and divide or be a multiple of its 2 key-value heads; "
     "set it to 1, 2 or 4, or use more ranks with data_parallel_shard_degree, which any number of ranks may have"),
    (["parallelism.pipeline_parallel_degree=3"], 3, "parallelism.pipeline_parallel_degree=3 exceeds the model's 2 layers: lower it to 2 at "
     "most, or set it to 1 and spread the weights with data_parallel_shard_degree"),
    (["colocate=true", "services.generator.procs=3"], 3, "services.generator.procs=3 does not divide the model's 4 attention heads, which "
     "vLLM asks of an engine's ranks; set it to 1, 2 or 4, and use more ranks with services.generator.num_replicas"),
    (["colocate=true", "grpo.beta=0.1", "services.ref_model.parallelism.tensor_parallel_degree=4"], 4,
     "services.ref_model.parallelism.tensor_parallel_degree=4 does not divide the model's 2 key-value heads"),
    (["training.compile=true", "parallelism.tensor_parallel_degree=2"], 2, "training.compile=true with "
     "parallelism.tensor_parallel_degree=2: "),
    (["colocate=true", "grpo.beta=0.1", "training.compile=true", "services.ref_model.parallelism.tensor_parallel_degree=2"], 2,
     "training.compile=true with services.ref_model.parallelism.tensor_parallel_degree=2: "),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "ranks", "message"), MODEL_LIMITS)
def test_what_a_model_at_hand_cannot_be_cut_into_is_told_by_the_plan(arguments, ranks, message, planned, tiny_qwen3):
    with pytest.raises(ValueError) as error:
        planned(f"model={tiny_qwen3}", *GIVEN, *arguments, f"--plan={ranks}")
    assert str(error.value).startswith(message)


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64}
ROPE = {"rope_theta": 1e4, "factor": 4.0}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("kind", "sizes", "message"), [
    ("gpt2", {}, "model family 'gpt2' (GPT2LMHeadModel) has no blocks at 'model.layers'"),
    ("gemma3", {}, "model family 'gemma3' (Gemma3ForConditionalGeneration) reads more than text"),
    ("granite", SIZES | {"logits_scaling": 8.0}, "model family 'granite' (GraniteForCausalLM) scales its logits"),
    ("llama", SIZES | {"max_position_embeddings": 64, "rope_parameters": ROPE | {"rope_type": "dynamic"}},
     "training.seq_len=65: the model's rotary embeddings (dynamic) change for a whole row of sequences when one of them has more than 64"),
    ("phi3", SIZES | {"pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
     "training.seq_len=65: the model's rotary embeddings (longrope) change for a whole row of sequences when one of them has more than 64"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_told_by_the_plan(kind, sizes, message, planned, tmp_path):
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        planned(f"model={tmp_path}", *GIVEN, "training.seq_len=65", "--plan")
    assert str(error.value).startswith(message)
    if "seq_len" in message:  # the remedy
        assert "1 ranks" in planned(f"model={tmp_path}", *GIVEN, "training.seq_len=64", "--plan")


def test_the_plan_of_fine_tuning_has_no_other_role_than_the_trainers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_sft.py", "model=m", "dataset.path=x.jsonl", "--plan=2"])
    train_sft.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "role", "trainer"]


@pytest.mark.parametrize(("sizes", "procs", "why"), [
    ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "neither divides the model's 4 key-value heads nor is a multiple of them"),
    ({"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 100}, 3, "does not divide the 100 columns of the model's"),
])  # fmt: skip
def test_an_engine_that_vllm_would_refuse_is_refused_with_what_it_takes(sizes, procs, why):
    config = LlamaConfig(hidden_size=96, **sizes)
    with pytest.raises(ValueError, match=rf"^services.generator.procs={procs} {why}.*; set it to 1, 2[, or]+ 4"):
        check_engine(config, procs)
    check_engine(config, 4)


def test_an_engine_may_have_more_ranks_than_key_value_heads_and_any_vocabulary():
    check_engine(LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, vocab_size=17, intermediate_size=64), 8)


def test_a_host_with_fewer_gpus_than_ranks_is_refused_with_what_can_be_given_up():
    check_gpus(4, 4)
    with pytest.raises(ValueError) as error:
        check_gpus(4, 2)
    assert str(error.value).startswith("this host has 4 ranks and 2 GPUs, and each rank needs one: start 2 here (--nproc 2) with fewer ")
    for remedy in ("colocate: true", "services.ref_model.with_gpus: false", "grpo.beta: 0"):
        assert remedy in str(error.value)


def test_ranks_without_work_are_a_warning_that_says_how_many(planned):
    table = planned("model=m", *GIVEN, "training.batch_size=2", "grpo.n_samples=3", "--plan=8")
    assert table.count("warning: ") == 2
    assert "warning: an update has 6 sequences for 8 trainer replicas, 2 of which are idle: raise training.batch_size, " in table
    assert "warning: a rollout has 2 prompts for 8 engine replicas, 6 of which are idle: raise training.batch_size, start fewer " in table
    assert "warning: " not in planned("model=m", *GIVEN, "training.batch_size=8", "--plan=8")


def test_without_a_reference_beta_must_be_0(planned, tmp_path):
    # What the guide advises against too few GPUs, as a file of its own.
    file = tmp_path / "fewer.yaml"
    text = (GUIDE / "grpo_math.yaml").read_text()
    file.write_text(text[: text.index("  ref_model:")])
    with pytest.raises(ValueError) as error:
        planned(file, "--plan")
    assert str(error.value) == (
        "the loss needs a reference model (grpo.beta or grpo.kl_in_reward above 0, or a loss that asks for ref_logprobs) and "
        "services.ref_model is absent: add services.ref_model: {procs: 1}, or set grpo.beta: 0 and grpo.kl_in_reward: 0"
    )
    assert "ref_model   none" in planned(file, "grpo.beta=0", "--plan")


def test_the_guides_other_snippets_are_keys_that_parse(planned, tmp_path):
    file = tmp_path / "guide.yaml"
    snippets = ["grpo:\n  n_samples: 4  # Reduce from 8", "training:\n  seq_len: 2048", "ref_model:\n  with_gpus: false"]
    for text in (
        *snippets,
        "training:\n  sync_interval: 10  # Sync every 10 steps",
        "grpo:\n  beta: 0.2  # Increase from 0.1",
        "training:\n  entropy_coef: 0.01",
    ):
        assert text in (GUIDE / "guide.txt").read_text()
        file.write_text(f"model: m\n{text}\n")
        assert "ranks\n" in planned(file, "--plan", "colocate=true")


def test_what_trains_needs_data_and_rewards(planned):
    alone = ["--config", GUIDE / "distributed.yaml", "--trainer.procs", "4", "--generator.procs", "4"]
    with pytest.raises(ValueError, match=r"^missing: dataset\.path, what to train on: a file, a folder of files, or a dataset's name"):
        planned(*alone, ranks=8)
    with pytest.raises(ValueError, match=r"^rewards is empty: nothing to train for; add one, such as rewards: \{math: \{fn: rollout"):
        planned(*alone, "dataset.path=x.jsonl", ranks=8)


@pytest.mark.parametrize("number", ["--plan=two", "--plan=-1", "--plan=0"])
def test_a_plan_for_no_number_of_ranks_is_refused(number, planned):
    with pytest.raises(ValueError, match=rf"^{number}: must be a number of ranks"):
        planned(GUIDE / "grpo_math.yaml", number)


@pytest.mark.parametrize(("arguments", "message"), [
    (["grpo.n_samples=1"], "grpo.n_samples=1 with grpo.advantage=losses.advantages.group_zscore: it compares the samples of a prompt with "
                           "each other and gives a lone one 0; set grpo.n_samples to at least 2, or grpo.advantage: "
                           "losses.advantages.batch_zscore"),
    (["loss=losses.SimpleGRPOLoss"], "grpo.clip_low=0.2 and loss.fn=losses.SimpleGRPOLoss are both set: remove grpo.clip_low and give "
                                     "losses.SimpleGRPOLoss its options under loss"),
    (["generator.with_gpus=false"], "services.generator.with_gpus=false: only ref_model can leave the run's device; for a run without "
                                    "GPUs set device: cpu"),
    (["trainer.num_replicas=2"], "services.trainer.num_replicas=2: only the generator has replicas; give trainer more ranks with "
                                 "trainer.procs and spread them with parallelism.data_parallel_shard_degree"),
    (["parallelism.pipeline_parallel_degree=0"], "parallelism.pipeline_parallel_degree=0: must be at least 1"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_key_the_value_and_the_reason(arguments, message, planned):
    with pytest.raises(ValueError) as error:
        planned(GUIDE / "grpo_math.yaml", *GIVEN, *arguments, "--plan")
    assert str(error.value) == message


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.stem)
def test_every_config_that_trains_a_policy_can_be_planned(file, planned):
    first = file.read_text().partition("\n")[0]
    if "train_grpo.py" not in file.read_text():
        pytest.skip("not for train_grpo.py")
    assert first.startswith("#")
    assert "generator " in planned(file, "--plan")


def test_the_qwen_config_is_a_plan_for_eight_ranks(planned):
    assert planned(ROOT / "configs/qwen.yaml", "--plan=8").startswith("8 ranks\n")
