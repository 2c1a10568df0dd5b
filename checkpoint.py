"""Save and resume everything a run needs, with a mark that says "whole"."""

import os
import pickle
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from batch import Group
from best import Best, Mode
from metrics import Clock
from model import Model
from parallel.exchange import from_each, from_root
from parallel.placement import Placement
from parallel.sub_world import random_state, set_random_state
from trainer import Trainer

REFERENCE = "reference"  # folder of a moved reference's weights, inside the checkpoint's
MARK = "WHOLE"  # written last: a folder without it is never resumed from
LINK = "best"  # beside the checkpoints' folders: a symbolic link to the best one


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int = 0  # steps between checkpoints, rounded up to a step that syncs the weights; 0: none but the last
    keep: int = 2  # newest checkpoints to keep; 0: all
    # metric of evaluations, such as eval/loss: the checkpoint that is best by it is kept as well (<output>/checkpoints/best); null: none
    best: str | None = None
    best_mode: Mode = "auto"  # is less or more of it better? auto: less of a loss or a perplexity, more of anything else
    # true: write the final model to <output>/hf as a Hugging Face checkpoint, and the best one, where `best` is set, to <output>/hf_best
    export_hf: bool = False

    def check(self) -> None:
        for key, value in (("every", self.every), ("keep", self.keep)):
            if value < 0:
                raise ValueError(f"{key}={value}: must be 0 or more")
        if self.best is None and self.best_mode != "auto":
            raise ValueError(f"best_mode={self.best_mode} without best: name the metric, such as best: eval/loss, or remove best_mode")


def is_due(step: int, cfg: CheckpointConfig, sync_interval: int) -> bool:
    """Whether a checkpoint falls after `step` steps. Only steps that sync are eligible: a resumed engine gets the saved policy.

    >>> [s for s in range(1, 13) if is_due(s, CheckpointConfig(every=4), sync_interval=3)]
    [6, 9, 12]
    """
    if not cfg.every or step % sync_interval:
        return False
    return step // cfg.every > (step - sync_interval) // cfg.every


@dataclass(frozen=True)
class Saved:
    """Where a run goes on; the defaults are its beginning."""

    step: int = 0  # steps done
    updates: int = 0  # optimizer steps done
    position: int = 0  # of the data
    cut: tuple[tuple[str, int], ...] = ()  # of SFT: sequences that were cut or left out so far, by what was done with them
    waiting: list[list[Group]] = field(default_factory=list)  # rollouts sampled and not yet trained on
    random: list[tuple] = field(default_factory=list)  # state of each rank's random number generators
    engine_random: list[tuple | None] = field(default_factory=list)  # and of its engine's, where it has one
    recent: list[float] = field(default_factory=list)  # losses of the last steps, for an early stop
    refreshes: int = 0  # how often the reference has moved to the policy
    best: Best | None = None  # by checkpoint.best
    stopping: Best | None = None  # by the metric of an early stop
    folder: Path | None = None  # of weights and moments


def save(
    output: Path,
    step: int,
    trainer: Trainer,
    place: Placement,
    cfg: CheckpointConfig,
    clock: Clock,
    *,
    position: int,
    cut: tuple[tuple[str, int], ...] = (),
    waiting: list[list[Group]] | None = None,
    recent: list[float] | None = None,
    engine_random: tuple | None = None,
    reference: Model | None = None,
    best: Best | None = None,
    stopping: Best | None = None,
) -> None:
    """Write `output/checkpoints/step_N`, with the mark last, then remove the oldest but the best. Collective over the world.

    engine_random: this rank's; all else is equal on all ranks. reference: kept where its weights have left the checkpoint they came from.

    Those of later steps are removed too: like the lines of metrics.jsonl, they are of a run that this one has taken the place of.
    """
    with clock.phase("ckpt"):
        saved = Saved(step, trainer.updates, position, cut, waiting or [], recent=recent or [], best=best, stopping=stopping)
        saved = replace(saved, refreshes=reference.refreshes if reference is not None else 0)
        _save(output, trainer, reference, place, cfg, saved, engine_random)


def _save(
    output: Path,
    trainer: Trainer,
    reference: Model | None,
    place: Placement,
    cfg: CheckpointConfig,
    saved: Saved,
    engine: tuple | None,
) -> None:
    folder = _at(output, saved.step)
    if place.is_root:
        _remove(folder)  # left by a save that was interrupted, or by a run that this one replaces
        folder.mkdir(parents=True)
    from_root(None, place)
    if trainer.model.is_local:
        dcp.save(trainer.state(), checkpoint_id=folder, process_group=place.trainer_group)
    if reference is not None and saved.refreshes and reference.is_local:
        with reference.resident():
            dcp.save(dict(reference.shards()), checkpoint_id=folder / REFERENCE, process_group=place.reference_group)
    random, engines = zip(*from_each((random_state(), engine), place), strict=True)
    if place.is_root:
        (folder / "run.pkl").write_bytes(pickle.dumps(replace(saved, random=list(random), engine_random=list(engines))))
        for later in whole(output):
            if _steps(later) > saved.step:
                _remove(later)  # of a run that this one replaces: `auto` must not go on from there
        (folder / MARK).touch()
        _link(output, saved.best)
        for old in whole(output)[: -cfg.keep] if cfg.keep else []:
            if saved.best is None or _steps(old) != saved.best.step:
                _remove(old)
    from_root(None, place)


def _at(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step_{step}"


def _link(output: Path, best: Best | None) -> None:
    """Let checkpoints/best name the best checkpoint; in one move, so that it never names none."""
    link = output / "checkpoints" / LINK
    if link.is_dir() and not link.is_symlink():
        _remove(link)  # a copy of the run's folder has the checkpoint itself there
    if best is None:
        link.unlink(missing_ok=True)
        return
    new = link.with_name(f"{LINK}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(f"step_{best.step}")
    os.replace(new, link)


def _remove(folder: Path) -> None:
    """The mark goes first: what a kill leaves of the folder is not taken for a checkpoint."""
    (folder / MARK).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _steps(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def whole(output: Path) -> list[Path]:
    """Checkpoints that can be resumed from, oldest first."""
    marks = (output / "checkpoints").glob(f"step_*/{MARK}")
    return sorted((m.parent for m in marks), key=_steps)


def find(resume: str, output: Path, place: Placement) -> Saved:
    """The newest whole checkpoint of `output` ("auto"), that of the named folder, or the beginning ("never", or none is there).

    Reads all but weights and moments. Collective over the world.
    """
    folder = None
    if resume == "auto":
        folder = next(reversed(whole(output)), None)
    elif resume == "never":
        for old in whole(output) if place.is_root else []:
            _remove(old)  # or `auto` would go on from it, should this run end before its first checkpoint
        if place.is_root:
            _link(output, None)
    else:
        folder = Path(resume)
        if not (folder / MARK).exists():
            raise ValueError(
                f"resume={resume} is not a whole checkpoint, a folder <output>/checkpoints/step_N with a file {MARK}; "
                f"name one, or set resume: auto or never"
            )
    folder = from_root(folder, place)
    if folder is None:
        return Saved()
    if place.is_root:
        print(f"resuming from {folder}", flush=True)
    saved = replace(pickle.loads((folder / "run.pkl").read_bytes()), folder=folder)
    is_ours = folder.resolve().parent == (output / "checkpoints").resolve()
    if saved.best is not None and not from_root(is_ours and (_at(output, saved.best.step) / MARK).exists(), place):
        if place.is_root:
            print(f"the best checkpoint so far, of step {saved.best.step}, is not in {output}: the best is sought anew", flush=True)
        saved = replace(saved, best=None)
    return saved


def restore(saved: Saved, trainer: Trainer, place: Placement, reference: Model | None = None) -> None:
    """Load weights, moments and random numbers. Any layout of ranks may resume. Collective over the meshes of trainer and reference."""
    if saved.folder is None:
        return
    if trainer.model.is_local:
        state = trainer.state()
        try:
            dcp.load(state, checkpoint_id=saved.folder, process_group=place.trainer_group)
        except dcp.CheckpointException as error:
            raise ValueError(f"{saved.folder} holds another model than this run's: set resume: never, or another output") from error
    trainer.resume_at(saved.updates)
    if reference is not None and saved.refreshes:
        if reference.is_local:
            with reference.changing():
                dcp.load(dict(reference.shards()), checkpoint_id=saved.folder / REFERENCE, process_group=place.reference_group)
        reference.refreshes = saved.refreshes
    if len(saved.random) == dist.get_world_size():
        set_random_state(saved.random[dist.get_rank()])


def export_best(output: Path, best: Best | None, trainer: Trainer, place: Placement) -> None:
    """Write the model of the best checkpoint to `output/hf_best`, where there is one. The trainer has its weights afterwards.

    For the end of a run. Collective over the trainer's mesh.
    """
    if best is None or not trainer.model.is_local:
        return
    weights = {name: tensor for name, tensor in trainer.state().items() if name.startswith("weight/")}
    dcp.load(weights, checkpoint_id=_at(output, best.step), process_group=place.trainer_group)
    trainer.model.export(output / "hf_best")
