"""The guide's trainer.train_step(inputs, targets): dictionaries in, the step's loss out, and nothing that update() does not do."""

import copy
import pickle

import numpy as np
import pytest
import torch

from batch import Episode, pad
from losses import DAPOLoss, GRPOLoss, NLLLoss, SimpleGRPOLoss
from tests.steps import CustomLoss, assert_same_gradient, each_objective, gradient, place, some_episodes, trainer_of
from tests.world import run_script

__all__ = ["place", "trainer_of"]  # fixtures


def dictionaries(episodes: list[Episode], rows: int, *, attention_mask: bool = False):
    """The guide's lists: left-padded prompts and right-padded responses, `rows` of them in each entry."""
    inputs, targets = [], []
    for start in range(0, len(episodes), rows):
        part = episodes[start : start + rows]
        left = max(e.num_prompt_tokens for e in part)
        width = max(e.num_response_tokens for e in part)
        tokens, here = torch.zeros(len(part), left + width, dtype=torch.int64), torch.zeros(len(part), left + width)
        for i, e in enumerate(part):
            begin = left - e.num_prompt_tokens
            tokens[i, begin : begin + len(e.token_ids)] = torch.tensor(e.token_ids)
            here[i, begin : begin + len(e.token_ids)] = 1
        cpu = torch.device("cpu")
        grids = {n: pad([vars(e)[n] for e in part], cpu) for n in ("ref_logprobs", "advantages", "loss_mask", "old_logprobs")}
        grids["padding_mask"] = grids.pop("loss_mask")
        inputs.append({"tokens": tokens} | ({"attention_mask": here} if attention_mask else {}))
        targets.append({"response": tokens[:, left:].clone(), **grids})
    return inputs, targets


@each_objective
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_train_step_returns_the_steps_loss_as_a_float_and_is_update_however_its_lists_are_cut(loss, reference, rows, trainer_of):
    episodes = some_episodes()
    by_step, by_update = trainer_of(loss()), trainer_of(loss(), max_tokens=60)
    value = by_step.train_step(*dictionaries(episodes, rows))
    assert isinstance(value, float)
    assert value == pytest.approx(by_update.update(episodes, 0)["loss/policy"], rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient(by_step), gradient(by_update))
    assert by_step.updates == 1


@pytest.mark.parametrize("grouped", [False, True])
def test_averaging_over_prompts_does_not_depend_on_how_the_lists_are_cut(grouped, trainer_of):
    episodes = some_episodes()
    whole, cut = trainer_of(DAPOLoss(averaging="prompt")), trainer_of(DAPOLoss(averaging="prompt"))
    prompts = torch.arange(len(episodes)) // 2 if grouped else torch.arange(len(episodes))
    for trainer, rows in ((whole, 7), (cut, 2)):
        inputs, targets = dictionaries(episodes, rows)
        if grouped:
            for target, of_rows in zip(targets, prompts.split(rows), strict=True):
                target["groups"] = of_rows
        trainer.train_step(inputs, targets)
    by_update = trainer_of(DAPOLoss(averaging="prompt"))
    for e, prompt in zip(episodes, prompts.tolist(), strict=True):
        e.group = prompt
    by_update.update(episodes, 0)
    assert_same_gradient(gradient(whole), gradient(cut))
    assert_same_gradient(gradient(whole), gradient(by_update))


def test_train_step_takes_the_guides_keys_alone_with_one_advantage_a_row(trainer_of):
    inputs, targets = dictionaries(some_episodes(), 7)
    for target in targets:
        del target["old_logprobs"]
        target["advantages"] = target["advantages"][:, :1]
    wide = copy.deepcopy(targets)
    wide[0]["advantages"] = wide[0]["advantages"].expand(-1, wide[0]["response"].shape[1])
    one, all_tokens = trainer_of(SimpleGRPOLoss(beta=0.1)), trainer_of(SimpleGRPOLoss(beta=0.1))
    assert one.train_step(inputs, targets) == all_tokens.train_step(inputs, wide)
    assert_same_gradient(gradient(one), gradient(all_tokens))


def test_a_pad_token_inside_a_prompt_is_kept_and_one_in_front_needs_an_attention_mask(trainer_of):
    episodes = some_episodes(1)
    episodes[0].token_ids = np.array([3, 0, 5, 7, 8, 9])
    episodes[0].num_prompt_tokens = 3
    for name in ("loss_mask", "advantages", "gen_logprobs", "ref_logprobs", "old_logprobs"):
        vars(episodes[0])[name] = np.full(3, -1.0 if "logprobs" in name else 1.0, np.float32)
    inside, want = trainer_of(NLLLoss()), trainer_of(NLLLoss())
    assert inside.train_step(*dictionaries(episodes, 1)) == want.update(episodes, 0)["loss/policy"]
    episodes[0].token_ids = np.array([0, 4, 5, 7, 8, 9])
    masked, want = trainer_of(NLLLoss()), trainer_of(NLLLoss())
    assert masked.train_step(*dictionaries(episodes, 1, attention_mask=True)) == want.update(episodes, 0)["loss/policy"]


def broken(key: str, change):
    def apply(inputs, targets):
        where = inputs if key in inputs[0] else targets
        where[0][key] = change(where[0][key])

    return apply


MISTAKES = {
    "no tokens": (lambda i, t: i[0].pop("tokens"), "inputs lack tokens; their keys: attention_mask, tokens"),
    "no response": (lambda i, t: t[0].pop("response"), "targets lack response"),
    "no mask": (lambda i, t: t[0].pop("padding_mask"), "targets lack padding_mask"),
    "no advantages": (lambda i, t: t[0].pop("advantages"), "targets lack advantages"),
    "no reference": (lambda i, t: t[0].pop("ref_logprobs"), "beta=0.1 needs a reference, and there are no ref_logprobs"),
    "an unknown key": (lambda i, t: t[0].update(refs=1), "targets have an unknown refs; their keys: advantages, gen_logprobs,"),
    "a list too long": (lambda i, t: t.append(t[0]), "as many targets as inputs, at least one; got 1 and 2"),
    "nothing": (lambda i, t: (i.clear(), t.clear()), "as many targets as inputs, at least one; got 0 and 0"),
    "the prompt alone": (broken("tokens", lambda x: x[:, :2]), "tokens [7, 2] must be [B, P + T] with P >= 1, and response [7, 12]"),
    "one row": (broken("response", lambda x: x[0]), "and response [12] [B, T]"),
    "fewer rows": (broken("tokens", lambda x: x[:3]), "tokens [3, 22] must be [B, P + T] with P >= 1, and response [7, 12]"),
    "a mask of another width": (broken("padding_mask", lambda x: x[:, 1:]), "padding_mask [7, 11] must be [7, 12]"),
    "a reference of another width": (broken("ref_logprobs", lambda x: x[:, 1:]), "ref_logprobs [7, 11] must be [7, 12]"),
    "flat advantages": (broken("advantages", lambda x: x[:, 0]), "advantages [7] must be [7, 12] or [7, 1]"),
    "another response": (broken("response", lambda x: x + 1), "the last T columns of tokens must be the response"),
    "no prompt": (broken("tokens", lambda x: torch.cat([0 * x[:, :-12], x[:, -12:]], 1)), "row 0 has no prompt token"),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_train_step_refuses_a_mistake_in_words(mistake, message, trainer_of):
    inputs, targets = dictionaries(some_episodes(), 7)
    mistake(inputs, targets)
    with pytest.raises(ValueError) as error:
        trainer_of(SimpleGRPOLoss()).train_step(inputs, targets)
    assert message in str(error.value)


TWO_RANKS = """
import pickle, sys
from losses import GRPOLoss
from config import Call
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan
from tests.steps import gradient, some_episodes
from tests.test_train_step import dictionaries
from trainer import Trainer, TrainingConfig

def main():
    tp = int(sys.argv[3])
    place = Placement.build(
        Plan.make(None, ParallelismConfig(tensor_parallel_degree=tp), colocate=False, wants_reference=False, world_size=2), "cpu"
    )
    results = {}
    losses = {"grpo": GRPOLoss(beta=0.1), "custom": Call("tests/data/guide/custom_loss.py:CustomLoss").resolve()}
    for name, loss in losses.items():
        model = Model(ModelSource(sys.argv[1]), place.trainer, dtype="float32", temperature=0.7, max_tokens=60, trainable=True)
        trainer = Trainer(model, TrainingConfig(dtype="float32", max_grad_norm=0.0, adam_beta1=0.0), loss)
        value = trainer.train_step(*dictionaries(some_episodes(), 3))
        results[name] = value, gradient(trainer)
    pickle.dump(results, open(f"{sys.argv[2]}/{place.is_root}.pkl", "wb"))

launch(main)
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_train_step_on_two_ranks_is_train_step_on_one(tp, tiny_qwen3, tmp_path, trainer_of):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    run_script(2, script, str(tiny_qwen3), str(tmp_path), str(tp))
    root, other = (pickle.loads((tmp_path / f"{is_root}.pkl").read_bytes()) for is_root in (True, False))
    for name, loss in {"grpo": GRPOLoss(beta=0.1), "custom": CustomLoss.resolve()}.items():
        alone = trainer_of(loss)
        value = alone.train_step(*dictionaries(some_episodes(), 3))
        assert root[name][0] == other[name][0] == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert_same_gradient(root[name][1], gradient(alone))
