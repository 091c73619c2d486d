"""A run of shards and their logs without a trainer, and its twin: one shard in memory that lived the same life."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from list_shard import plain_rollout
from rollout_factory import RolloutFactory, as_group
from sampler_steps import draw_all
from shard_lives import Add, Event, Refer, Train
from test_shard_twin import contents_of, in_any_order, referred

from tba_megatron import config_sections
from tba_megatron.buffer.sampler import make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard, generations
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.transport.rollouts import owner_of

SAMPLERS = (
    make_sampler(config_sections.RewardRecencySampler(recent_age_steps=2)),
    make_sampler(config_sections.UniformSampler()),
    make_sampler(config_sections.PrioritisedSampler()),
    make_sampler(config_sections.FifoSampler()),
)
SENDER = "incarnation"
LARGE: dict[str, Any] = {"capacity_rollouts": 10_000, "per_prompt_rollouts": 10_000}
ROOMY: dict[str, Any] = {"capacity_rollouts": 10_000, "per_prompt_rollouts": 4}


class Run:
    """``n`` shards that live, save, are killed and begin again in ``folder``; the twin of them is one in memory.

    ``history`` is the life that the twin has to have lived: a restart takes everything out of it that was trained
    after the checkpoint.
    """

    def __init__(self, folder: Path, n: int = 1, *, logged: bool = True, segment_bytes: int = 1 << 20, **limits: Any):
        self.folder, self.logged, self.segment_bytes = folder, logged, segment_bytes
        self.replay, self.limits = folder / "replay", limits or ROOMY
        self.history: list[Event] = []
        self.checkpoints: list[tuple[Path, int]] = []  # and what the history was then, by its length
        self.shards: list[StoredShard] = []
        self.begin(n, None)

    def begin(self, n: int, checkpoint: Path | None) -> None:
        """What the leaders of a run do, one after another."""
        found = generations(self.replay) if self.logged else []
        saved = [dict(np.load(file)) for file in sorted(checkpoint.glob("*.npz"))] if checkpoint else []
        self.shards = []
        for i in range(n):
            parts = {i: saved[i]} if len(saved) == n else dict(enumerate(saved))
            self.shards.append(
                StoredShard(
                    ReplayShard(**self.limits),
                    replay=self.replay if self.logged else None,
                    segment_bytes=self.segment_bytes,
                    index=i,
                    n_shards=n,
                    owns=lambda prompt_id, i=i: owner_of(prompt_id, n) == i,
                )
            )
            self.shards[-1].restore(parts, found)

    def crash(self) -> None:
        """Nothing is written that was not written before."""
        for shard in self.shards:
            shard.close()

    def restart(self, n: int, number: int | None) -> None:
        """From the checkpoint with this number, from the end; None: from none."""
        self.crash()
        if number is None or not self.checkpoints:
            self.history = [event for event in self.history if isinstance(event, Add) and self.logged]
            self.checkpoints = [] if number is None else self.checkpoints
            self.begin(n, None)
            return
        self.checkpoints = self.checkpoints[: max(1, len(self.checkpoints) - number)]
        path, length = self.checkpoints[-1]
        later = [event for event in self.history[length:] if isinstance(event, Add) and self.logged]
        self.history = self.history[:length] + later
        self.begin(n, path)

    def live(self, event: Event) -> None:
        self.history.append(event)
        if isinstance(event, Add):
            self.take(RolloutBatch.of_groups(event.groups))
        else:
            for shard, rows in self.picked([stored.shard for stored in self.shards], event):
                change(shard, rows, event)

    def take(self, batch: RolloutBatch) -> None:
        """As a receiver does, from a sender that goes on where this shard stands."""
        for i, stored in enumerate(self.shards):
            mine = [g for g, p in enumerate(batch.prompt_ids) if owner_of(p, len(self.shards)) == i]
            payload, end = encode(batch.select(mine)), None
            sequence = stored.delivered.get(SENDER, 0)
            if stored.log is not None:
                end = stored.log.append(SENDER, sequence, payload, xxhash.xxh3_64_intdigest(payload))
            stored.take(decode(payload), SENDER, sequence, end)

    @staticmethod
    def picked(shards: Sequence[ReplayShard], event: Train | Refer) -> list[tuple[ReplayShard, np.ndarray]]:
        """Rows of each shard: the rollouts of all are counted off by prompt and arrival."""
        held: list[tuple[str, int, ReplayShard, int]] = []
        for shard in shards:
            rows = shard.rows.living()
            ids = shard.prompts.ids(shard.rows.prompt[rows])
            held += zip(ids, shard.rows.arrival[rows].tolist(), [shard] * len(rows), rows.tolist(), strict=True)
        held.sort(key=lambda one: one[:2])
        chosen = [held[pick % len(held)] for pick in event.picks] if held else []
        by_shard = [(shard, [row for *_, owner, row in chosen if owner is shard]) for shard in shards]
        return [(shard, np.unique(rows).astype(np.int64)) for shard, rows in by_shard if rows]

    def checkpoint(self) -> Path:
        path = self.folder / f"step-{len(list(self.folder.glob('step-*')))}"
        path.mkdir()
        for i, shard in enumerate(self.shards):
            np.savez(path / f"shard-{i}.npz", **shard.state_columns())  # type: ignore[arg-type]
            shard.sync()
        self.checkpoints.append((path, len(self.history)))
        return path

    def twin(self) -> ReplayShard:
        twin = ReplayShard(**self.limits)
        for event in self.history:
            if isinstance(event, Add):
                twin.add(RolloutBatch.of_groups(event.groups))
            else:
                for _, rows in self.picked([twin], event):
                    change(twin, rows, event)
        return twin

    def assert_like_the_twin(self) -> None:
        """Contents, books and draws; arrivals count by their order within a prompt."""
        shards, twin = [stored.shard for stored in self.shards], self.twin()
        assert in_any_order(shards) == in_any_order([twin])
        assert books(shards) == books([twin])
        assert sum(shard.bytes for shard in shards) == twin.bytes
        for i, stored in enumerate(self.shards):
            assert all(owner_of(prompt_id, len(shards)) == i for prompt_id in stored.shard.prompts)
        for sampler in range(len(SAMPLERS)):
            assert drawn(sampler, shards) == drawn(sampler, [twin])

    def assert_the_twin(self) -> None:
        """And every number: of one shard that was always alone."""
        self.assert_like_the_twin()
        (stored,), twin = self.shards, self.twin()
        assert contents_of(stored.shard) == contents_of(twin)
        assert stored.shard.counts() == twin.counts()
        assert stored.shard.next_arrival == twin.next_arrival


def change(shard: ReplayShard, rows: np.ndarray, event: Train | Refer) -> None:
    if isinstance(event, Train):
        shard.mark_trained(rows)
    else:
        values = [referred(int(shard.rows.content[row] % np.uint64(997)), event.version) for row in rows]
        shard.set_reference(rows, np.array(values), event.version)


def books(shards: Sequence[ReplayShard]) -> list[Counter]:
    counts = [shard.counts() for shard in shards]
    states = ("held_untrained", "trained", "duplicate", "evicted_untrained", "invalid")
    total = Counter({state: sum(getattr(c, state) for c in counts) for state in states})
    received, reasons = Counter(), Counter()
    for c in counts:
        received.update(c.received)
        reasons.update(c.invalid_reasons)
        assert sum(c.received.values()) == sum(getattr(c, state) for state in states)
    return [+total, +received, +reasons]


def drawn(sampler: int, shards: Sequence[ReplayShard]) -> list[Any] | str:
    """The groups of two prompts and three rollouts, in order."""
    try:
        draws = draw_all(SAMPLERS[sampler], shards, 2, 3, seed=5, step=3)
    except ValueError as error:
        return str(error)
    groups = [
        (place, group.prompt_id, [plain_rollout(rollout) for rollout in group.rollouts], group.copies)
        for draw in draws
        for place, group in zip(draw.places.tolist(), draw.batch.train_groups(), strict=True)
    ]
    return sorted(groups, key=lambda group: group[0])


@contextmanager
def new_run(n: int = 1, **options: Any) -> Iterator[Run]:
    """For hypothesis, whose examples share a test's folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), n, **options)
        try:
            yield run
        finally:
            run.crash()


def distinct(n_groups: int, name: str = "first", first: int = 0) -> list[Add]:
    """A group of two a message; no two completions are equal."""
    make = RolloutFactory(name)
    extra: dict[str, Any] = {"behaviour_logprobs": np.full(3, -0.5, np.float32)}
    return [
        Add(groups=(as_group(f"p{g % 11}", [make.rollout([first + g, i, 7], step=g % 3, **extra) for i in range(2)]),))
        for g in range(n_groups)
    ]
