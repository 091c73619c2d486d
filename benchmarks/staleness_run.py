"""One training run at an exact policy lag, with the trainer, the buffer and the engine of a real run, in turn.

The step from version t - 1 to t trains on what version t - 1 - lag wrote (the start's, while there is none so old), and
on nothing else. Accuracy is exact: the probability of the right answer, in the mean over held-out problems.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.staleness_engine import EngineProcess
from tba_megatron.config import Config
from tba_megatron.config_load import load_config
from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.types import PolicyHistory, PolicyVersion

if TYPE_CHECKING:
    from tba_megatron.loss.base import Loss
    from tba_megatron.packing import Pack
    from tba_megatron.tasks.exact_answer import ExactAnswerTask

CONFIG = "configs/quickstart.yaml"
WARM_UP, DECAY = 20, 0.1  # of the learning rate: steps, and what is left of the peak at the end
RESET_EVERY = 50  # steps; of the one objective that is held to a reference of a while ago
CHOICE, HELD_OUT = 1000, 2000  # held-out problems: to choose a learning rate by, and other ones to report
CURVE = 4  # times that accuracy is measured on the way
DIAGNOSTICS = ("abs_drift", "lost_push", "ess_frac", "clipped", "kl", "reward", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What a run is. ``loss`` is ``objective.loss``, ``guards`` ``objective.guards``, in the configuration's words.

    ``control``: in the place of what the mask of ``lost_negative_ratio`` drops, as many negative pushes at random.
    ``recent`` is m: prompts are drawn from the newest version's with this probability, else from all of the run;
    below 0 each rollout is trained on once, in order.
    """

    loss: str
    guards: str = "{}"
    control: bool = False
    lag: int = 0
    learning_rate: float = 4e-4
    seed: int = 0
    recent: float = -1.0
    steps: int = 240

    @property
    def name(self) -> str:
        text = "-".join(f"{value}" for value in asdict(self).values())
        return "".join(c if c.isalnum() or c in ".-_" else "_" for c in text)

    def config(self, start: Path) -> Config:
        """The quickstart's configuration but for what the cell says; ``start`` is the run folder of a warm start."""
        sampler = f"{{kind: reward_recency, recent_probability: {self.recent}, recent_age_steps: 0}}"
        schedule = f"{{kind: linear, warmup_steps: {WARM_UP}, decay_steps: {self.steps}, final_fraction: {DECAY}}}"
        return load_config(
            Path(CONFIG),
            [
                f"run.folder={start}",
                f"run.seed={self.seed}",
                f"objective.loss={self.loss}",
                f"objective.guards={self.guards}",
                f"objective.reference.reset_every_steps={RESET_EVERY if 'kimi_k15' in self.loss else 0}",
                f"trainer.steps={self.steps}",
                f"trainer.optimizer.learning_rate={self.learning_rate}",
                f"trainer.optimizer.schedule={schedule}",
                "buffer.sampler=" + ("{kind: fifo}" if self.recent < 0 else sampler),
                "buffer.max_reuse=0",
                "search.behaviour_logprobs=true",
                "search.in_flight=recompute",
            ],
        )


@dataclass(kw_only=True, slots=True)
class Outcome:
    """``accuracy`` on the held-out problems that are reported, ``choice`` on the others, at the end."""

    cell: dict[str, Any]
    start: float = 0.0
    accuracy: float = 0.0
    choice: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, on the problems of ``choice``)
    skipped: int = 0
    age_mean: float = 0.0  # of what was trained on, in steps
    diagnostics: dict[str, float] = field(default_factory=dict)  # means over the second half of the run
    seconds: float = 0.0


def run_cells(groups: Groups, trainer: TrainerConfig, cells: Sequence[Cell], out: Path) -> None:
    """Each cell that has no file in ``out`` yet, in turn; one engine for all."""
    del trainer  # each cell has its own
    missing = [cell for cell in cells if not (out / f"{cell.name}.json").exists()]
    if not missing:
        return
    first = missing[0].config(start_of(out, missing[0].seed))
    engine = EngineProcess(first, first.start_model)
    for cell in missing:
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as weights:
            outcome = _Run(cell, cell.config(start_of(out, cell.seed)), groups, engine, Path(weights)).run()
        outcome.seconds = time.monotonic() - started_s
        partial = out / f".{cell.name}.partial"
        partial.write_text(json.dumps(asdict(outcome), indent=1))
        partial.rename(out / f"{cell.name}.json")
    engine.close()


def start_of(out: Path, seed: int) -> Path:
    """The run folder of the warm start of ``seed``."""
    return out / f"start-{seed}"


class _Run:
    def __init__(self, cell: Cell, config: Config, groups: Groups, engine: EngineProcess, weights: Path) -> None:
        from tba_megatron.buffer.sampler import make_sampler
        from tba_megatron.buffer.shard import ReplayShard
        from tba_megatron.models.tokenizer import HfTokenizer
        from tba_megatron.search.rollout_maker import RolloutMaker
        from tba_megatron.search.source import sampling_of
        from tba_megatron.tasks.registry import make_task
        from tba_megatron.trainer.build import build_model
        from tba_megatron.trainer.model import DTYPES
        from tba_megatron.trainer.snapshot import Snapshotter

        self._cell, self._config, self._groups, self._engine = cell, config, groups, engine
        self._model = build_model(config, groups)
        tokenizer = HfTokenizer(config.start_model)
        task: Any = make_task(config.task, tokenizer, config.run.seed, config.model.max_length)
        self._task: ExactAnswerTask = task
        self._maker = RolloutMaker(config.objective, task, tokenizer, f"run-{cell.name}"[:200], "searcher")
        self._sampling = sampling_of(config, tokenizer.eos_ids, step=1)
        buffer = config.buffer
        self._shard = ReplayShard(buffer.capacity_rollouts, buffer.per_prompt_rollouts, needs_behaviour=True)
        self._sampler = make_sampler(buffer.sampler)
        self._versions = _Versions(
            Snapshotter(
                architecture=self._model.architecture,
                shape=self._model.shape,
                groups=groups,
                dtype=DTYPES[config.trainer.dtype],
                bucket_bytes=config.weights.bucket_bytes,
            ),
            config.start_model,
            weights,
            keep=cell.lag + 1,
        )
        self._history = PolicyHistory(base_steps=(0,))
        self._visits = 0
        self._choice = self._problems(0, CHOICE)
        self._held_out = self._problems(CHOICE, CHOICE + HELD_OUT)

    def run(self) -> Outcome:
        cell, outcome = self._cell, Outcome(cell=asdict(self._cell))
        outcome.start = self._accuracy(self._held_out)
        rows: list[dict[str, float]] = []
        ages: list[float] = []
        for step in range(1, cell.steps + 1):
            self._versions.cut(self._model.policy.chunks, step - 1)
            self._engine.load(self._versions.offer(max(0, step - 1 - cell.lag)))
            self._search(step - 1)
            done, age = self._train(step)
            ages.append(age)
            outcome.skipped += done.skipped
            rows.append({**done.statistics, **_shares(done.statistics), "grad_norm": done.grad_norm})
            if step % (cell.steps // CURVE) == 0:
                outcome.curve.append((step, self._accuracy(self._choice)))
        outcome.choice, outcome.accuracy = self._accuracy(self._choice), self._accuracy(self._held_out)
        outcome.age_mean = statistics.mean(ages)
        second_half = rows[len(rows) // 2 :]
        for name in DIAGNOSTICS:
            known = [row[name] for row in second_half if name in row]
            if known:
                outcome.diagnostics[name] = statistics.mean(known)
        return outcome

    def _search(self, newest: int) -> None:
        """As many prompts as a step takes, each once in the run, into the buffer."""
        from tba_megatron.rollout_batch import RolloutBatch
        from tba_megatron.search.rollout_maker import Visit

        n = self._config.trainer.prompts_per_step
        positions = range(self._visits, self._visits + n)
        self._visits += n
        prompts = [self._task.train_prompt(position) for position in positions]
        completions = self._engine.complete(prompts, self._sampling)
        version = PolicyVersion(0, newest)
        made = [
            self._maker.make(Visit(lease=position, position=position, prompt=prompt), found, version)
            for position, prompt, found in zip(positions, prompts, completions, strict=True)
        ]
        self._shard.add(RolloutBatch.of_groups(made))

    def _train(self, step: int) -> tuple[Any, float]:
        """The optimizer step, and the mean age of its rollouts."""
        from tba_megatron.buffer.choice import alone
        from tba_megatron.packing import pack
        from tba_megatron.trainer.model import to_device
        from tba_megatron.trainer.step import update

        trainer, model = self._config.trainer, self._model
        n, k = trainer.prompts_per_step, trainer.rollouts_per_prompt
        draw = self._sampler.draw(self._shard, alone(), n, k, _seed_of(self._cell, step), self._history, step - 1)
        self._shard.mark_trained(draw.rows)
        train_groups = draw.batch.train_groups()
        ages = [
            copies * (step - 1 - rollout.version.step)
            for group in train_groups
            for rollout, copies in zip(group.rollouts, group.copies, strict=True)
        ]
        loss, by_token = self._loss(step), ()
        packs = pack(train_groups, trainer.microbatch_tokens)
        if model.reference is not None:
            read = model.reference.read(packs, loss.needs.reference)
            packs, by_token = read.packs, read.by_token
        batches = [to_device(each.microbatch, self._groups.device) for each in packs]
        done = update(model.policy, batches, loss, float(n * k), model.head, self._groups, reference_logprobs=by_token)
        if model.reference is not None:
            model.reference.step_made(step)
        return done, sum(ages) / (n * k)

    def _loss(self, step: int) -> Loss:
        if not self._cell.control:
            return self._model.loss_at(step)
        from benchmarks.staleness_control import scattered_loss

        return scattered_loss(self._config, seed=_seed_of(self._cell, step))

    def _problems(self, start: int, end: int) -> list[Pack]:
        from tba_megatron.packing import pack_demonstrations

        pairs = self._task.held_out_demonstrations(end)[start:]
        return pack_demonstrations(pairs, self._config.trainer.microbatch_tokens)

    def _accuracy(self, problems: Sequence[Pack]) -> float:
        """The mean probability of the right answer, its end included, at temperature 1."""
        from tba_megatron.trainer.model import to_device
        from tba_megatron.trainer.step import sequence_logprobs

        model = self._model
        batches = [to_device(each.microbatch, self._groups.device) for each in problems]
        sums = sequence_logprobs(model.policy.chunks, batches, model.head, self._groups)
        probabilities = [p for part in sums for p in part.exp().tolist()]
        return sum(probabilities) / len(probabilities)


def _shares(found: Mapping[str, float]) -> dict[str, float]:
    """The effective sample size over the number of rollouts; of the negative pushes, the share on lost completions."""
    ratio_square, negative = found["ratio_square"], found["negative_push"]
    return {
        "ess_frac": found["ratio"] ** 2 / ratio_square if ratio_square else 0.0,
        "lost_push": found["lost_push"] / negative if negative else 0.0,
    }


def _seed_of(cell: Cell, step: int) -> int:
    return 1_000_003 * cell.seed + step


class _Versions:
    """The policy's last versions as files, for the engine to read."""

    def __init__(self, snapshotter: Any, template: Path, folder: Path, keep: int) -> None:
        self._snapshotter, self._template, self._folder, self._keep = snapshotter, template, folder, keep
        self._offers: dict[int, Any] = {}

    def cut(self, chunks: Any, step: int) -> None:
        from tba_megatron.models.hf_writer import begin_folder
        from tba_megatron.transport import weight_files as files
        from tba_megatron.transport.manifest import describe, encode_manifest
        from tba_megatron.transport.messages import Offer

        version = PolicyVersion(0, step)
        snapshot = self._snapshotter.take(chunks, version)
        manifest = describe(version, snapshot.layout, snapshot.buckets, owner=0)
        folder, partial = files.version_folder(self._folder, version), files.partial_of(self._folder, version)
        begin_folder(partial, self._template, "float32")
        files.write_stage(partial, files.stage_file(0, 1), snapshot.layout, snapshot.buckets)
        files.finish_version(partial, folder, manifest, 1)
        self._offers[step] = Offer(
            version=str(version), manifest=encode_manifest(manifest), round=step, folder=str(folder.resolve())
        )
        old = step - self._keep
        if self._offers.pop(old, None) is not None:
            shutil.rmtree(files.version_folder(self._folder, PolicyVersion(0, old)))

    def offer(self, step: int) -> Any:
        return self._offers[step]
