"""What a configuration may say, what it is turned into, and the exact words for what it may not say."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import config
from config import Call, ConfigError

ROOT = Path(__file__).parent.parent


# A tree with every kind of field --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Source:
    """Where rows come from."""

    path: str  # file or hub name
    split: str = "train"  # part of it
    streaming: bool = False  # read as needed


@dataclass(kw_only=True)
class Training:
    steps: int | None = None  # optimizer steps; null: one pass
    batch_size: int = 4  # prompts
    learning_rate: float = 1e-6  # peak
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the compute
    beta: float = 0.0  # weight of the KL term
    stop: list[str] = field(default_factory=list)  # strings that end a completion

    def check(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


@dataclass(kw_only=True)
class Service:
    procs: int = 1  # ranks
    with_gpus: bool = True  # on the run's device


@dataclass(kw_only=True)
class Services:
    trainer: Service = field(default_factory=Service)  # the policy
    ref_model: Service | None = None  # the reference; null: none
    generator: Service = field(default_factory=Service)  # the engine


@dataclass(kw_only=True)
class Generator:
    memory: float = 0.5  # share of the GPU
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments


@dataclass(kw_only=True)
class Eval:
    dataset: Source | None = None  # held-out rows; null: the run's
    every: int = 0  # steps


@dataclass(kw_only=True)
class Tree:
    model: str  # hub id or folder
    dataset: Source  # training rows
    training: Training = field(default_factory=Training)  # the optimizer
    loss: Call | None = None  # null: the default
    # how rewards
    # become advantages
    advantage: Call = field(default_factory=lambda: Call("tests.no_such.zscore", {"eps": 1e-6}))
    rewards: dict[str, Call] = field(default_factory=dict)  # by name
    services: Services | None = None  # null: all on all ranks
    generator: Generator = field(default_factory=Generator)
    eval: Eval = field(default_factory=Eval)  # held-out accuracy
    seed: int = 0  # of the run
    output: Path | None = None  # folder

    def check(self) -> None:
        if self.loss and self.training.beta:
            raise ValueError(f"training.beta={self.training.beta} and loss: options have one home")


BASE = """
model: org/name
dataset: {path: rows.jsonl}
training: {steps: 3}
loss: losses.grpo.GRPOLoss
rewards: {math: {fn: rollout.rewards.MathReward, weight: 1.0}, format: rollout.rewards.ThinkingReward}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(text, *overrides)`: a Tree from a file in the current folder."""
    monkeypatch.chdir(tmp_path)

    def load(text: str = BASE, *overrides: str, cls: type = Tree) -> Any:
        Path("x.yaml").write_text(text)
        return config.load(cls, ["x.yaml", *overrides])

    return load


def refusal(load, text: str, *overrides: str, cls: type = Tree) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, cls=cls)
    return str(caught.value)


# Values -----------------------------------------------------------------------------------------------------------


def test_exponents_are_numbers_in_a_file_and_on_the_command_line(load):  # CF-01
    file = load(
        "{model: m, dataset: {path: p}, training: {learning_rate: 1e-6, beta: 4e-5, steps: 1e3, batch_size: 8.0}}"
    )
    line = load(
        "{model: m, dataset: {path: p}}",
        *("training.learning_rate=1e-6", "--training.beta=4e-5", "--training.steps", "1e3", "training.batch_size=8.0"),
    )
    for training in (file.training, line.training):
        assert (training.learning_rate, training.beta, training.steps, training.batch_size) == (1e-6, 4e-5, 1000, 8)
        assert [type(v) for v in (training.learning_rate, training.steps)] == [float, int]
    assert load(BASE.replace("loss", "#"), "training.beta=1E-8").training.beta == 1e-8
    printed = config.dump(file)
    assert "learning_rate: 1.0e-06" in printed and "steps: 1000\n" in printed and "beta: 4.0e-05" in printed


@pytest.mark.parametrize("text, value", [("1", 1.0), ("+.5", 0.5), ("5.", 5.0), ("-1e3", -1000.0), ("0x10", 16.0)])
def test_a_number_may_be_written_in_any_yaml_way(load, text, value):
    assert load(BASE.replace("loss", "#"), f"training.beta={text}").training.beta == value


@pytest.mark.parametrize("text", ["no", "2024-01-01", "1:30", "1_000", "on", '"1e-6"', "'true'", "null_", "010x"])
def test_text_that_yaml_1_1_takes_for_something_else_stays_text_and_survives_a_dump(load, text):
    cfg = load(BASE, f"dataset.split={text}")
    assert cfg.dataset.split == text.strip("'\"")
    assert load(config.dump(cfg)).dataset.split == cfg.dataset.split


@pytest.mark.parametrize("text, value", [("true", True), ("no", False), ("yes", True), ("off", False)])
def test_a_switch_understands_yes_and_no(load, text, value):
    assert load(BASE, f"dataset.streaming={text}").dataset.streaming is value


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1e999"])
def test_a_number_is_finite_wherever_it_stands(load, text):
    for key in ("training.learning_rate", "generator.engine.x", "rewards.math.weight", "generator.engine.list"):
        value = f"[{text}]" if key.endswith("list") else text
        assert "should be a number, got" in refusal(load, BASE, f"{key}={value}")


def test_a_dumped_configuration_loads_as_an_equal_one(load):
    cfg = load(
        BASE,
        *('training.stop=["\\n", "a: b", "#", "1e5"]', "trainer.procs=2", "output=runs/x", "loss.clip_high=0.3"),
        *(
            'generator.engine={a: [1, {b: null}], "1": 1e-9}',
            "eval.dataset={path: held_out.jsonl}",
            "dataset.split=1e3x",
        ),
    )
    assert load(config.dump(cfg)) == cfg
    assert load(config.dump(load())) == load()


def test_a_section_whose_lines_are_all_commented_out_has_its_defaults(load):
    assert load(BASE + "generator:\n  # memory: 0.3\n").generator == Generator()


# Overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["x.yaml", "training.steps=7"],
        ["training.steps=7", "x.yaml"],
        ["x.yaml", "--training.steps", "7"],
        ["--config", "x.yaml", "--training.steps=7"],
        ["--training.steps", "7", "--config=x.yaml"],
        ["x.yaml", "training.steps=5", "training.steps=7"],
    ],
    ids=" ".join,
)
def test_every_form_of_an_override_means_the_same(load, argv):
    load()
    assert config.load(Tree, argv).training.steps == 7


def test_a_value_on_the_command_line_is_yaml(load):
    cfg = load(BASE, 'training.stop=["a", b]', "training.steps=null", "--training.beta", "0", "dataset.split=a=b")
    assert (cfg.training.stop, cfg.training.steps, cfg.dataset.split) == (["a", "b"], None, "a=b")


def test_a_role_stands_for_its_place_under_services_unless_another_section_has_the_key(load):
    cfg = load(
        BASE, "--trainer.procs", "4", "--generator.procs", "2", "generator.memory=0.3", "ref_model.with_gpus=false"
    )
    assert cfg.services.trainer.procs == 4 and cfg.services.generator.procs == 2 and cfg.generator.memory == 0.3
    assert cfg.services.ref_model == Service(with_gpus=False)
    assert load(BASE + "ref_model: {with_gpus: false}").services.ref_model == Service(with_gpus=False)


def test_an_override_reaches_into_a_call_and_makes_the_sections_above_it(load):
    cfg = load(BASE, "loss.clip_high=0.3", "rewards.format.weight=0.5", "rewards.new.fn=a.b", "advantage.eps=1e-4")
    assert cfg.loss == Call("losses.grpo.GRPOLoss", {"clip_high": 0.3})
    assert cfg.rewards["format"] == Call("rollout.rewards.ThinkingReward", {"weight": 0.5})
    assert cfg.rewards["new"] == Call("a.b")
    assert cfg.advantage == Call("tests.no_such.zscore", {"eps": 1e-4})
    assert load(BASE + "eval: null\nservices: null", "eval.every=5", "services.ref_model.procs=2").eval.every == 5


def test_an_override_does_not_change_what_shares_a_yaml_anchor(load):
    cfg = load(BASE + "services: {trainer: &x {procs: 1}, generator: *x}", "trainer.procs=4")
    assert (cfg.services.trainer.procs, cfg.services.generator.procs) == (4, 1)


def test_the_run_is_named_after_its_file():
    assert config.run_name(["--config", "configs/grpo_math.yaml", "seed=1"]) == "grpo_math"
    assert config.run_name(["seed=1"]) == "run"


# Mistakes ---------------------------------------------------------------------------------------------------------

TRAINING_KEYS = "Keys of training: steps, batch_size, learning_rate, dtype, beta, stop."
TOP_KEYS = (
    "Top-level keys: model, dataset, training, loss, advantage, rewards, services, generator, eval, seed, output."
)
MISTAKES = {
    "typo in a key": (
        BASE.replace("steps", "stpes"),
        [],
        f"unknown key training.stpes. Did you mean steps? {TRAINING_KEYS}",
    ),
    "typo in a section": (BASE + "trainig: {}", [], f"unknown key trainig. Did you mean training? {TOP_KEYS}"),
    "right key, wrong section": (
        BASE + "learning_rate: 1e-6",
        [],
        f"unknown key learning_rate. Did you mean training.learning_rate? {TOP_KEYS}",
    ),
    "text for a number": (
        BASE,
        ["training.learning_rate=fast"],
        'training.learning_rate should be a number, got "fast".',
    ),
    "bool for a whole number": (BASE, ["seed=true"], "seed should be a whole number, got true."),
    "half a step": (BASE, ["training.steps=3.5"], "training.steps should be a whole number or null, got 3.5."),
    "one for true": (BASE, ["dataset.streaming=1"], "dataset.streaming should be true or false, got 1."),
    "number for text": (
        BASE,
        ["dataset.split=7"],
        'dataset.split should be text, got 7. In quotes it is text: "7".',
    ),
    "nothing for text": (BASE, ["dataset.split="], "dataset.split should be text, got null."),
    "negative": (BASE, ["training.batch_size=-1"], "training.batch_size=-1 must be at least 1"),
    "two homes": (BASE, ["training.beta=0.1"], "training.beta=0.1 and loss: options have one home"),
    "wrong word": (
        BASE,
        ["training.dtype=float16"],
        'training.dtype should be bfloat16 or float32, got "float16". Did you mean bfloat16?',
    ),
    "text for a list": (BASE, ["training.stop=END"], 'training.stop should be a list, such as [a, b], got "END".'),
    "wrong type in a list": (
        BASE,
        ["training.stop=[a, 5]"],
        'training.stop[1] should be text, got 5. In quotes it is text: "5".',
    ),
    "value for a section": (BASE, ["training=5"], "training should be a section of `key: value` lines, got 5."),
    "key below a value": (
        BASE,
        ["training.steps.max=5"],
        "training.steps.max cannot be set: training.steps is 3, which has no keys.",
    ),
    "missing keys": ("seed: 1", [], "missing: model (hub id or folder)."),
    "missing key in a section": ("model: m", [], "missing: dataset.path (file or hub name)."),
    "empty file": ("# nothing yet\n", [], "x.yaml is empty."),
    "list for a mapping": ("- model: m\n", [], 'x.yaml should hold `key: value` lines, got [{"model": "m"}].'),
    "no space after the colon": ("model:m\n", [], 'x.yaml should hold `key: value` lines, got "model:m".'),
    "duplicate key": (
        BASE + "seed: 1\nseed: 2\n",
        [],
        "x.yaml, line 8: the key seed is given twice, first in line 7.",
    ),
    "tab": (
        "model: m\ntraining:\n\tsteps: 3\n",
        [],
        "x.yaml, line 3: found character '\\t' that cannot start any token (YAML is indented with spaces, not tabs).",
    ),
    "colon in text": (
        "model: m\ndataset:\n  path: a: b\n",
        [],
        'x.yaml, line 3: mapping values are not allowed here (text with ": " needs quotes).',
    ),
    "python object": (
        "model: !!python/object/apply:os.getcwd []\nseed: 1\n",
        [],
        "x.yaml, line 1: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'.",
    ),
    "number for a key": ("model: m\n3: x\n", [], "the file has the key 3, which is not text; put it in quotes."),
    "override without =": (BASE, ["seed"], '"seed" is not understood: an override is key=value or --key value.'),
    "unknown flag": (BASE, ["--trian"], f"unknown key trian. Did you mean training? {TOP_KEYS}"),
    "unknown role": (BASE, ["--trainr.procs", "4"], f"unknown key trainr. Did you mean training? {TOP_KEYS}"),
    "flag without a value": (BASE, ["--seed"], "--seed needs a value: --seed VALUE or seed=VALUE."),
    "single dash": (BASE, ["-seed=1"], '"-seed=1" is not understood: an override is key=value or --key value.'),
    "broken value": (
        BASE,
        ["training.stop=[a"],
        "training.stop=[a: expected ',' or ']', but got '<stream end>'.",
    ),
    "second file": (
        BASE,
        ["--config", "y.yaml"],
        "two configuration files, x.yaml and y.yaml: give one, and the rest as key=value.",
    ),
    "call without fn": (
        BASE.replace("loss", "#"),
        ["loss.clip_high=0.3"],
        'loss should be {fn: dotted.path or file.py:Name, arguments ...}, got {"clip_high": 0.3}.',
    ),
    "a role twice": (
        BASE + "services: {ref_model: {procs: 1}}\nref_model: {procs: 2}",
        [],
        "ref_model is given twice, at the top level and as services.ref_model.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(load, mistake):
    text, overrides, message = MISTAKES[mistake]
    assert refusal(load, text, *overrides) == message


def test_a_file_that_is_not_there_is_named_with_the_folder_that_was_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin.yaml").write_bytes(b"model: \xe9\n")
    for argv, message in [
        (["configs/x.yaml"], f"there is no configuration file configs/x.yaml (current folder: {tmp_path})."),
        (["--config", "."], ". cannot be read: Is a directory."),
        (["latin.yaml"], "latin.yaml is not UTF-8 text."),
        (["--config"], "--config needs the path of a YAML file."),
        ([], "no configuration: give a YAML file, then key=value for what differs (--help: all keys)."),
    ]:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            config.load(Tree, argv)


# The model key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, source",
    [
        ("Qwen/Qwen3-1.7B", ("Qwen/Qwen3-1.7B", None)),
        ("gpt2", ("gpt2", None)),
        ("hf://Qwen/Qwen3-1.7B", ("Qwen/Qwen3-1.7B", None)),
        ("hf://Qwen/Qwen3-1.7B@main", ("Qwen/Qwen3-1.7B", "main")),
        ("hf://org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("runs/demo/export", ("runs/demo/export", None)),
        ("/models/a@b", ("/models/a@b", None)),
    ],
)
def test_a_model_is_a_hub_id_with_a_revision_or_a_folder(model, source):
    assert config.model_source(model) == source


@pytest.mark.parametrize(
    "model", ["", " ", "hf://", "hf://a/b/c", "hf://org/name@", "hf:/org/name", "hf:org", "s3://x/y"]
)
def test_a_malformed_model_is_refused(model):
    message = f'model should be a hub id (Qwen/Qwen3-1.7B), hf://org/name[@revision] or a folder, got "{model}".'
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        config.model_source(model)


def test_reading_a_configuration_needs_no_torch():
    command = "import sys, config; assert not {'torch', 'vllm', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)
