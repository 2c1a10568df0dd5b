"""Where a run's numbers go: one line a step on the console, one object a step in metrics.jsonl, TensorBoard, sample tables."""

import html
import json
import math
import os
import re
import statistics
import warnings
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from batch import Group
from metrics import Clock, MetricsConfig


def _number(x: float) -> str:
    """At most 7 characters."""
    size = abs(x)
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    if not 1e-3 <= size < 1e6:
        return f"{x:.1e}" if x > 0 else f"{x:.0e}"
    return f"{x:.{0 if size >= 1000 else 1 if size >= 10 else 3 if size >= 1 else 4}f}"


def _seconds(x: float) -> str:
    return f"{x:.1f}s" if x < 99.95 else f"{x:.0f}s"


def _duration(s: int) -> str:
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s < 36_000 else f"{s // 3600}h{s // 60 % 60:02d}m"


# Columns of the console's line, by title.
QUALITY = {"reward": "reward/mean", "len": "len/mean", "loss": "loss/policy", "entropy": "entropy/mean"}
REFERENCE = {"kl": "kl/ref_k3", "ref": "time/logp_ref"}
TIMES = {"gen": "time/generate", "train": "time/train", "sync": "time/sync", "all": "time/step"}
LEARNING = {"loss": "loss/policy", "grad": "grad/norm", "lr": "optim/lr", "tokens": "data/tokens"}


def console_cells(step: int, total_steps: int | None, values: dict[str, float], eta_s: float | None) -> list[list[str]]:
    """[title, cell] of each column of the console's line, padded to a width that does not depend on the values."""
    total = "" if total_steps is None else f"/{total_steps}"
    left = "-" if eta_s is None else _duration(int(eta_s))
    columns = [("step", max(2 * len(total) - 1, 6), f"{step}{total}")]
    if "reward/mean" in values:
        names = QUALITY | (REFERENCE if "kl/ref_k3" in values else {}) | TIMES | {"tok/s": "perf/tok_s_generate"}
    else:
        names = LEARNING | {"train": "time/train", "all": "time/step", "tok/s": "perf/tok_s_train"}
    for title, name in names.items():
        width, form = (6, _seconds) if name.startswith("time/") else (7, _number)
        columns.append((title, width, form(values[name]) if name in values else "-"))
    columns.append(("eta", 7, left))
    return [[title.rjust(width), cell.rjust(width)] for title, width, cell in columns]


def _cell(text: str, limit: int = 2000) -> str:
    """`text` as it stands, inside one cell of a Markdown table; the middle of a longer text is left out."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written to a file
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    text = re.sub(r"[\x00-\x08\x0e-\x1f\x7f]", "\ufffd", text)
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]", "<br>", text)


def _reward(value: float | None) -> str:
    return "missing" if value is None else f"{value:.4g}"


def samples_table(groups: list[Group], limit: int = 8) -> str:
    """A Markdown table of at most `limit` samples: of each group in turn its best and its worst, if they are two."""
    rows = ["| prompt | response | target | reward | parts | stop | tokens |", "|---|---|---|---|---|---|---|"]
    picked: list[tuple[Group, int]] = []
    for g in groups:
        ranked = sorted(range(len(g.rewards)), key=lambda i: (g.rewards[i] is not None, g.rewards[i] or 0.0))
        picked += [(g, i) for i in dict.fromkeys((ranked[-1], ranked[0]))]
    for g, i in picked[:limit]:
        c = g.completions[i]
        parts = ", ".join(f"{name} {_reward(values[i])}" for name, values in g.reward_parts.items())
        cells = (g.prompt.text, c.text, g.prompt.target, _reward(g.rewards[i]), parts, c.stop_reason)
        rows.append(f"| {' | '.join(map(_cell, cells))} | {len(c.token_ids)} |")
    return "\n".join(rows) + "\n"


class Log:
    """Writes a run's numbers to console, metrics.jsonl and TensorBoard on the `enabled` rank; does nothing elsewhere.

    Steps count from 1 and only grow. What an earlier run left in `output` for the first step written here, and later,
    is dropped: a step has one line.
    """

    def __init__(
        self,
        cfg: MetricsConfig,
        output: Path,
        enabled: bool,
        total_steps: int | None,
        clock: Clock | None = None,
        resumed_after: int | None = None,
    ):
        """clock: counts what writing takes as the phase "log", of the step that follows. resumed_after: steps done by earlier runs."""
        self.cfg, self.output, self.enabled, self.total_steps, self._clock = cfg, output, enabled, total_steps, clock
        self._opened = False
        self._last: int | None = None  # step written
        self._file: IO[str] | None = None
        self._board: Any = None  # SummaryWriter
        self._titles = ""
        self._lines = 0  # on the console since the titles
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._warned: set[str] = set()
        if resumed_after is not None:
            self.resume_at(resumed_after + 1 if resumed_after else 0)
        if enabled and resumed_after and total_steps is not None and resumed_after >= total_steps:
            print(f"all {total_steps} steps are done: raise training.steps to go on, or set resume=never to start over", flush=True)

    def resume_at(self, step: int) -> None:
        """Drop what was written for `step` and later: the run takes these steps again. Before anything is written."""
        assert not self._opened, "Log.resume_at after the first line"
        if not self.enabled:
            return
        self._opened = True
        self.output.mkdir(parents=True, exist_ok=True)
        lines = self.output / "metrics.jsonl"
        if lines.exists():
            _drop_lines(lines, step)
        for table in (self.output / "samples").glob("step_*.md"):
            if int(table.stem.removeprefix("step_")) >= step:
                table.unlink()
        if self.cfg.jsonl:
            self._file = open(lines, "a")
        if self.cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only the rank that writes pays for this import

            self._board = SummaryWriter(str(self.output / "tensorboard"), purge_step=step)

    def step(self, step: int, values: dict[str, float], groups: list[Group] | None = None) -> None:
        """One line everywhere. A value that is not finite becomes null in the JSON, with one warning a name.

        An evaluation before the first step, or after the last one where the end of the data came unforeseen, is an object of its own.
        """
        if self.enabled and values:
            with self._clock.phase("log") if self._clock else nullcontext():
                self._write(step, values, groups)

    def _write(self, step: int, values: dict[str, float], groups: list[Group] | None) -> None:
        if not self._opened:
            self.resume_at(step)
        assert self._last is None or step >= self._last, f"step {step} is written after step {self._last}"
        self._last = step
        for name in sorted(n for n, v in values.items() if not math.isfinite(v)):
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} is {values[name]} at step {step}; metrics.jsonl holds null for it", stacklevel=3)
        if self._file:
            finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
            print(json.dumps({"step": step, **finite}, allow_nan=False), file=self._file, flush=True)
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        self._print(step, values)
        if groups:
            self.samples(step, groups)

    def _print(self, step: int, values: dict[str, float]) -> None:
        if "time/step" in values:
            self._step_seconds.append(values["time/step"])
        eta_s = None
        if self.total_steps is not None and self._step_seconds:
            typical = list(self._step_seconds)[1:] or self._step_seconds  # the first step also warms up
            eta_s = max(self.total_steps - step, 0) * statistics.fmean(typical)
        if "reward/mean" in values or "loss/policy" in values:
            cells = console_cells(step, self.total_steps, values, eta_s)
            titles = " ".join(title for title, _ in cells)
            if titles != self._titles or self._lines == 20:
                print(titles, flush=True)
                self._titles, self._lines = titles, 0
            self._lines += 1
            print(" ".join(cell for _, cell in cells), flush=True)
        scores = [f"{name} {_number(value)}" for name, value in values.items() if name.startswith("eval/")]
        if scores:
            print(f"step {step}: " + "  ".join(scores), flush=True)

    def samples(self, step: int, groups: list[Group], limit: int = 8) -> None:
        """A table to <output>/samples and TensorBoard: on the first, the last and every `samples_every`-th step."""
        every = self.cfg.samples_every
        if not self.enabled or every == 0 or not (step % every == 0 or step in (1, self.total_steps)):
            return
        if not self._opened:
            self.resume_at(step)
        table = samples_table(groups, limit)
        folder = self.output / "samples"
        folder.mkdir(exist_ok=True)
        (folder / f"step_{step:06d}.md").write_text(f"# Step {step}\n\n{table}", encoding="utf-8")
        if self._board:
            self._board.add_text("samples", table, step)
            self._board.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()


def _drop_lines(path: Path, step: int) -> None:
    """Rewrite a metrics.jsonl without the lines of `step` and later, and without a last line that a kill cut short."""
    text = path.read_text(encoding="utf-8")
    kept = [line for line in text.split("\n")[:-1] if json.loads(line)["step"] < step]
    new = path.with_suffix(".jsonl.new")
    new.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(new, path)
