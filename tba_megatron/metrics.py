"""Where numbers go: TensorBoard, ``metrics.jsonl`` and the console, all behind one ``MetricLog`` on rank 0.

A metric's name is ``section/name``. Steps never run backwards in any writer: an attempt says at its start
which step is its first, and what an earlier attempt wrote from there on is removed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TextIO

from tba_megatron.config_sections import MetricsConfig
from tba_megatron.errors import RunFolderError

_log = logging.getLogger(__name__)

CONSOLE_METRICS = {
    "reward": "reward/train_mean",
    "accuracy": "eval/accuracy",
    "age": "age/p50",
    "loss": "optim/loss",
    "nll": "sft/nll",
    "held-out nll": "sft/held_out_nll",
    "grad": "optim/grad_norm",
    "tok/s": "throughput/train_tok_s",
}

# Curves of one run share a colour in a custom chart: few in each.
CHARTS = {
    "RL health": {
        "reward": ["Multiline", ["reward/train_mean", "eval/accuracy"]],
        "loss": ["Multiline", ["optim/loss", "optim/grad_norm"]],
        "KL to the reference (nats)": ["Multiline", ["policy/kl_ref", "policy/kl_ref_std"]],
        "drift from the searchers (nats)": ["Multiline", ["policy/drift", "policy/drift_std"]],
        "a token (nats)": ["Multiline", ["policy/entropy", "policy/kl_ref_per_token", "policy/drift_per_token"]],
        "log Z (nats)": ["Multiline", ["policy/log_z", "policy/log_z_std"]],
        "shares": ["Multiline", ["policy/ess_frac", "reward/equal_groups_frac"]],
        "age (steps)": ["Multiline", ["age/p50", "age/p95", "age/max"]],
        "completion length": ["Multiline", ["rollout/len_mean"]],
    },
    "Throughput": {
        "tokens per second": ["Multiline", ["throughput/rollout_tok_s", "throughput/train_tok_s"]],
        "seconds": ["Multiline", ["time/step_s", "time/wait_rollout_s", "time/weight_sync_s"]],
        "searchers": ["Multiline", ["fleet/searchers_live", "fleet/lost_total"]],
        "buffer": ["Multiline", ["buffer/rollouts", "buffer/prompts", "buffer/fresh_prompts"]],
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts in bins: of n bins, n + 1 edges that rise. An edge belongs to the bin above it."""

    edges: Sequence[float]
    counts: Sequence[float]


class Writer(Protocol):
    """One place that metrics are written to."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None: ...

    def histogram(self, tag: str, step: int, histogram: Histogram) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Hands everything to each of its writers, and keeps steps in order."""

    def __init__(self, writers: Sequence[Writer], histograms_every_steps: int = 1) -> None:
        self._writers, self._every = tuple(writers), histograms_every_steps
        self._last_step = -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of ``step``. ValueError when the step lies before one already logged."""
        self._advance(step)
        for writer in self._writers:
            writer.scalars(step, values)

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table of text, one sequence of cells a row."""
        self._advance(step)
        for writer in self._writers:
            writer.table(tag, step, headers, rows)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Those of every so many steps are written, the others are not; with 0 none are."""
        self._advance(step)
        if not self._every or step % self._every:
            return
        for writer in self._writers:
            for tag, histogram in histograms.items():
                writer.histogram(tag, step, histogram)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _advance(self, step: int) -> None:
        if step < self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        self._last_step = step


def open_metric_log(
    config: MetricsConfig, folder: Path, *, first_step: int, total_steps: int, stream: TextIO
) -> MetricLog:
    """The writers of a run folder. ``first_step`` is the first that this attempt will log: 0 for a new run.

    Records of earlier steps are kept; later ones, of an abandoned attempt, are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [JsonlWriter(folder / "metrics.jsonl", first_step)]
    if config.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", first_step))
    writers.append(console_writer(stream, total_steps=total_steps, log_every_steps=config.log_every_steps))
    return MetricLog(writers, config.histograms_every_steps)


class JsonlWriter:
    """One JSON object a line.

    ``{"kind": "scalars", "step", "time_s", <metric>: value, ...}``, or for a table
    ``{"kind": "table", "step", "time_s", "tag", "headers", "rows"}``, for a histogram
    ``{"kind": "histogram", "step", "time_s", "tag", "edges", "counts"}``.
    ``time_s`` is Unix time. A value that is not finite is written as null.
    """

    def __init__(self, path: Path, first_step: int, now: Callable[[], float] = time.time) -> None:
        if path.exists():
            _cut(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._now = now

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
        self._write({"kind": "scalars", "step": step, "time_s": self._now(), **finite})

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        cells = [[str(cell) for cell in row] for row in rows]
        self._write(
            {
                "kind": "table",
                "step": step,
                "time_s": self._now(),
                "tag": tag,
                "headers": list(headers),
                "rows": cells,
            }
        )

    def histogram(self, tag: str, step: int, histogram: Histogram) -> None:
        edges, counts = list(histogram.edges), list(histogram.counts)
        head = {"kind": "histogram", "step": step, "time_s": self._now(), "tag": tag}
        self._write({**head, "edges": edges, "counts": counts})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunFolderError(f"{self._file.name} cannot be written ({error.strerror}); make room") from None


def _cut(path: Path, first_step: int) -> None:
    """Keep the records of steps before ``first_step``; a last line that a crash cut short goes too."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with path.open(encoding="utf-8", errors="replace") as old, staged.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                keep = json.loads(line)["step"] < first_step
            except (ValueError, KeyError, TypeError):
                continue
            if keep:
                new.write(line)
    staged.replace(path)


class TensorBoardWriter:
    """An event file with two pages of custom charts. A table becomes markdown text."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # Some seconds of import, which searchers and the console script must not pay.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        self._writer.add_custom_scalars(CHARTS)
        self._failed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(lambda name=name, value=value: self._writer.add_scalar(name, value, step))

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self._write(lambda: self._writer.add_text(tag, markdown_table(headers, rows), step))

    def histogram(self, tag: str, step: int, histogram: Histogram) -> None:
        """Only the bins around what was counted. Sums, which its pages do not show, are those of the bins' middles."""
        full = [i for i, count in enumerate(histogram.counts) if count]
        if not full:
            return
        counts = histogram.counts[full[0] : full[-1] + 1]
        edges = histogram.edges[full[0] : full[-1] + 2]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._write(
            lambda: self._writer.add_histogram_raw(
                tag,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(n * x for n, x in zip(counts, middles, strict=True)),
                sum_squares=sum(n * x * x for n, x in zip(counts, middles, strict=True)),
                bucket_limits=list(edges[1:]),
                bucket_counts=list(counts),
                global_step=step,
            )
        )

    def close(self) -> None:
        self._write(self._writer.close)

    def _write(self, write: Callable[[], None]) -> None:
        """A disk that is full ends TensorBoard's log, once and with a line, and not the run."""
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            _log.warning("TensorBoard's log ends here: %s", error.strerror or error)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in which every cell shows its text as it is; a line break shows as \\n."""
    head, *body = [[_escape(str(cell)) for cell in row] for row in (headers, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"([\\`*_|\[\]])", r"\\\1", text)
    return text.replace("\r", "").replace("\n", "\\\\n")


class PlainConsole:
    """A line for the first step, for every ``log_every_steps``-th and for the last."""

    def __init__(self, stream: TextIO, progress: Progress, log_every_steps: int) -> None:
        self._stream = stream
        self._progress = progress
        self._every = log_every_steps
        self._printed_step = -1

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        line = self._progress.line(step, values)
        due = step % self._every == 0 or step == self._progress.total_steps or self._printed_step < 0
        if line and due:
            print(line, file=self._stream, flush=True)
            self._printed_step = step

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        pass

    def histogram(self, tag: str, step: int, histogram: Histogram) -> None:
        pass

    def close(self) -> None:
        pass


class LiveConsole:
    """One line at the foot of a terminal, redrawn at every step; rich honours NO_COLOR and TERM=dumb."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._live = Live(console=Console(file=stream), auto_refresh=False)
        self._live.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from rich.text import Text

        if line := self._progress.line(step, values):
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def table(self, tag: str, step: int, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        pass

    def histogram(self, tag: str, step: int, histogram: Histogram) -> None:
        pass

    def close(self) -> None:
        self._live.stop()


class Progress:
    """Words a step: ``[12:30:01] step 12/500 reward 0.31 age 1 loss 2.5 eta 3m10s``."""

    def __init__(self, total_steps: int, now: Callable[[], float] = time.time) -> None:
        self.total_steps = total_steps
        self._now = now
        self._start: tuple[int, float] | None = None

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """Empty where ``values`` holds nothing that is shown."""
        shown = [f"{word} {values[name]:.3g}" for word, name in CONSOLE_METRICS.items() if name in values]
        if not shown:
            return ""
        now_s = self._now()
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        if self._start is None:
            self._start = (step, now_s)
        done, elapsed_s = step - self._start[0], now_s - self._start[1]
        if done and step < self.total_steps:
            shown.append("eta " + _duration(elapsed_s / done * (self.total_steps - step)))
        return f"[{clock}] step {step}/{self.total_steps} {' '.join(shown)}"


def console_writer(
    stream: TextIO, *, total_steps: int, log_every_steps: int, now: Callable[[], float] = time.time
) -> Writer:
    """A live line on a terminal, plain lines elsewhere (a file, a batch job)."""
    progress = Progress(total_steps, now)
    if stream.isatty():
        return LiveConsole(stream, progress)
    return PlainConsole(stream, progress, log_every_steps)


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
