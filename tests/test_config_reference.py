"""What a reader is told about the keys, and that the project's own keys keep to it."""

import ast
import dataclasses
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import config
from config import Call, ConfigError
from config.reference import DOCUMENT, SCRIPTS, current_document

ROOT = Path(__file__).parent.parent


@dataclass(kw_only=True)
class Service:
    procs: int = 1  # ranks


@dataclass(kw_only=True)
class Services:
    """The ranks of each role."""

    trainer: Service = field(default_factory=Service)  # the policy
    ref_model: Service | None = None  # the reference; null: none


@dataclass(kw_only=True)
class Training:
    steps: int | None = None  # optimizer steps; null: one pass
    # of the compute,
    # not of the weights
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(kw_only=True)
class Tree:
    model: str  # hub id or folder
    training: Training
    # a heading, with a gap below

    # how rewards
    # become advantages
    advantage: Call = field(default_factory=lambda: Call("tests.no_such.zscore", {"eps": 1e-6}))
    rewards: dict[str, Call] = field(  # by
        default_factory=dict,
    )  # name
    services: Services | None = None
    seed: int = 0  # of the run
    output: Path | None = None  # folder


def test_every_key_is_told_once_with_its_type_default_and_meaning():
    assert config.describe(Tree) == [
        ("model", "str", "required", "hub id or folder"),
        ("training", "section", "", ""),
        ("training.steps", "int | null", "null", "optimizer steps; null: one pass"),
        ("training.dtype", "bfloat16 | float32", "bfloat16", "of the compute, not of the weights"),
        ("advantage", "call", '{"fn": "tests.no_such.zscore", "eps": 1e-06}', "how rewards become advantages"),
        ("rewards", "dict[str, call]", "{}", "by name"),
        ("services", "section | null", "null", "The ranks of each role."),
        ("services.trainer", "section", "", "the policy"),
        ("services.trainer.procs", "int", "1", "ranks"),
        ("services.ref_model", "section | null", "null", "the reference; null: none (keys: see services.trainer)"),
        ("seed", "int", "0", "of the run"),
        ("output", "path | null", "null", "folder"),
    ]


def test_help_prints_every_key_and_ends_the_program(capsys):
    with pytest.raises(SystemExit) as caught:
        config.load(Tree, ["x.yaml", "--help"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0 and printed.startswith((__doc__ or "").strip())
    for key, kind, _, meaning in config.describe(Tree):
        assert kind == "section" and not meaning or f"  {key}: {kind}" in printed and meaning in printed


def test_the_reference_shows_a_shared_key_once_and_says_who_reads_it():
    @dataclass(kw_only=True)
    class Small:
        model: str  # hub id or folder
        extra: str = "a|b"  # only here

    lines = config.document({"a.py": Tree, "b.py": Small}).splitlines()
    assert "| `model` | `str` | required | hub id or folder | all |" in lines
    assert "| `extra` | `str` | `a\\|b` | only here | b.py |" in lines
    assert "| `seed` | `int` | `0` | of the run | a.py |" in lines
    assert "## services" in lines and "| `training` |" not in "".join(lines)


# The project's own keys -------------------------------------------------------------------------------------------


def scripts() -> list[type]:
    return [importlib.import_module(name).Config for name in SCRIPTS]


def test_every_key_has_a_meaning():
    options = [o for cls in scripts() for o in config.describe(cls)]
    silent = {o.key for o in options if not o.meaning and o.type != "section"}
    assert not silent, f"write a comment beside the field: {sorted(silent)}"


def test_every_key_is_read_by_some_code():
    folders = [
        p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in ("tests", "runs")
    ]
    files = [*ROOT.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    trees = [ast.parse(p.read_text()) for p in files]
    read = {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    dead = {o.key for cls in scripts() for o in config.describe(cls) if o.key.rpartition(".")[2] not in read}
    assert not dead, f"nothing reads {sorted(dead)}; delete them"


def test_the_reference_is_up_to_date():
    assert DOCUMENT.read_text() == current_document(), "run `python -m config`"


def test_every_shipped_configuration_loads_survives_a_dump_and_its_calls_resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    grpo, sft = scripts()
    files = sorted(Path("configs").glob("*.yaml"))
    assert files
    for path in files:
        cls = sft if "sft" in path.stem else grpo
        cfg: Any = config.load(cls, [str(path)])
        copy = tmp_path / path.name
        copy.write_text(config.dump(cfg))
        assert config.load(cls, [str(copy)]) == cfg, path
        for call in calls_in(cfg):
            kwargs = {k: v for k, v in call.kwargs.items() if not (k == "weight" and call.key.startswith("rewards."))}
            dataclasses.replace(call, kwargs=kwargs).resolve()


def calls_in(value: Any) -> list[Call]:
    if isinstance(value, Call):
        return [value]
    inner = vars(value) if dataclasses.is_dataclass(value) else value if isinstance(value, dict) else {}
    return [call for v in inner.values() for call in calls_in(v)]


GRPO = "{model: m, dataset: {path: p.jsonl}, rewards: {math: rollout.rewards.MathReward}}"
MISTAKES = {
    "training.learning_rate=fast": 'training.learning_rate should be a number, got "fast".',
    "training.batch_size=true": "training.batch_size should be a whole number, got true.",
    "training.batch_size=-1": "training.batch_size=-1: must be at least 1",
    "training.learning_rate=-1e-6": "training.learning_rate=-1e-06: must be 0 or more",
    "training.dtype=bf16": 'training.dtype should be bfloat16 or float32, got "bf16". Did you mean bfloat16?',
    "device=gpu": 'device should be one of auto, cpu, cuda, got "gpu". Did you mean cpu?',
    "grpo.n_samples=0": "grpo.n_samples=0: must be at least 1",
    "grpo.stop=END": 'grpo.stop should be a list, such as [a, b], got "END".',
    "services.trainer.procs=0": "services.trainer.procs=0: must be at least 1",
    "rewards=5": "rewards should be a section of `key: value` lines, got 5.",
    "model=null": "model should be text, got null.",
    "dataset={split: train}": "missing: dataset.path (",
    "training.lerning_rate=1": "unknown key training.lerning_rate. Did you mean learning_rate? Keys of training: ",
    "n_samples=8": "unknown key n_samples. Did you mean grpo.n_samples? Top-level keys: model, dataset, ",
    "loss={fn: losses.grpo.GRPOLoss}": "grpo.clip_low=0.1 and loss.fn=losses.grpo.GRPOLoss are both set: remove "
    "grpo.clip_low and give losses.grpo.GRPOLoss its options under loss",
}


def loaded(folder: Path, *overrides: str) -> Any:
    (folder / "x.yaml").write_text(GRPO)
    return config.load(scripts()[0], [str(folder / "x.yaml"), *overrides])


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_in_a_grpo_configuration_is_explained(tmp_path, override):
    message = MISTAKES[override]
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, override, "grpo.clip_low=0.1")
    whole = not message.endswith((" ", "("))  # the keys and meanings that follow are not this test's
    assert str(caught.value) == message if whole else str(caught.value).startswith(message)


def test_a_configuration_without_a_model_says_what_a_model_is():
    with pytest.raises(ConfigError, match=r"^missing: model \(hub id"):
        config.load(scripts()[0], ["seed=1"])


def test_the_command_line_of_the_guide_reaches_services(tmp_path):
    services = loaded(tmp_path, "--trainer.procs", "4", "--generator.procs", "4").services
    assert (services.trainer.procs, services.generator.procs) == (4, 4)
