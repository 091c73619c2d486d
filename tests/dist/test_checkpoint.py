"""A resumed run is the run that was never stopped, at whatever parallel sizes, and a damaged checkpoint says so."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.buffer.ledger import combine
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.config_sections import CosineSchedule, WsdSchedule
from tba_megatron.errors import CheckpointError
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.checkpoint import RunState
from tba_megatron.transport.rollouts import owner_of

BATCHES = [tiny.train_groups(4, seed=seed) for seed in range(6)]
SCHEDULE = CosineSchedule(warmup_steps=2, decay_steps=8, final_fraction=0.1)
OPTIMIZER = tiny.OPTIMIZER.model_copy(update={"schedule": SCHEDULE})

SLOW = pytest.mark.slow


def config(**sizes):
    extra = {"sequence_parallel": True} if sizes.get("tp", 1) > 1 else {}
    return tiny.trainer_config(optimizer=OPTIMIZER, **(extra | sizes))


def run_state(step: int, **fields) -> RunState:
    return RunState(
        step=step,
        base_steps=(0,),
        **({"data_parallel": 1, "next_position": 7, "unfinished_prompts": [(2, 3)], "generated": {"s": 5}} | fields),
    )


def empty_shard(groups) -> StoredShard:
    def owns(prompt_id):
        return owner_of(prompt_id, groups.dp_size) == groups.dp_rank

    return StoredShard(ReplayShard(100, 10), index=groups.dp_rank, n_shards=groups.dp_size, owns=owns)


def shard_with(
    n: int, seed: int = 0, owns: Callable[[str], bool] = lambda prompt_id: True, index: int = 0, n_shards: int = 1
) -> StoredShard:
    """Those of ``n`` prompts that the shard ``owns``; the first of all has been trained on."""
    stored = StoredShard(ReplayShard(100, 10), index=index, n_shards=n_shards)
    groups = [group for group in tiny.train_groups(n, seed=seed) if owns(group.prompt_id)]
    stored.take(RolloutBatch.of_train_groups(groups), "s", 0, None)
    first = stored.shard.prompts.number(tiny.train_groups(1, seed=seed)[0].prompt_id)
    if first >= 0:
        stored.shard.mark_trained(stored.shard.rows_of(np.array([first]))[0])
    return stored


def train_and_save(groups, trainer, folder, path, first: int, last: int, resume: bool):
    """Steps ``first`` to ``last``, from the newest checkpoint if ``resume``, and a checkpoint after the last one."""
    rank = tiny.Rank(groups, trainer, folder)
    if resume:
        assert checkpoint.load(checkpoint.checkpoints(path)[-1][1], rank.policy, None, groups).step == first
    trained = rank.train(BATCHES[first:last])
    checkpoint.save(path, rank.policy, None, run_state(last, data_parallel=groups.dp_size), groups, keep=2)
    return trained


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, layers=2, seed=1)


# The same layout: exactly


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 2},
        pytest.param({"dp": 2}, marks=SLOW),
        *(pytest.param(s, marks=SLOW) for s in ({"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2})),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(sizes, model, tmp_path):
    trainer = config(**sizes)
    whole = run_ranks(train_and_save, trainer, model, tmp_path / "whole", 0, 6, False, **sizes)
    parts = [
        run_ranks(train_and_save, trainer, model, tmp_path / "parts", first, last, first > 0, **sizes)
        for first, last in ((0, 2), (2, 3), (3, 4), (4, 6))
    ]
    assert_same_run(parts, whole)
    # Two steps of warm-up and a cosine to a tenth at step 8: a schedule that a resume advances twice would be ahead.
    decayed = [0.001 + 0.009 * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(5)]
    assert whole[0].rates == pytest.approx([0.005, *decayed])


def test_a_rate_warms_up_stays_and_decays(model):
    schedule = WsdSchedule(warmup_steps=2, decay_steps=8, anneal_steps=4, final_fraction=0.1)
    trainer = tiny.trainer_config(optimizer=tiny.OPTIMIZER.model_copy(update={"schedule": schedule}))
    (trained,) = run_ranks(tiny.train_on_rank, trainer, model, model, [tiny.train_groups(1)] * 9)
    peak = tiny.OPTIMIZER.learning_rate
    annealed = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(1, 5)]
    assert trained.rates == pytest.approx([peak * share for share in (0.5, 1, 1, 1, *annealed, 0.1)])


@pytest.mark.parametrize(
    "sizes", [{"dp": 2}, *(pytest.param(s, marks=SLOW) for s in ({}, {"tp": 2, "pp": 2}))], ids=str
)
def test_bfloat16_with_its_float32_masters_resumes_exactly(sizes, model, tmp_path):
    trainer = config(dtype="bfloat16", **sizes)
    whole = run_ranks(train_and_save, trainer, model, tmp_path / "whole", 0, 6, False, **sizes)
    parts = [
        run_ranks(train_and_save, trainer, model, tmp_path / "parts", first, last, first > 0, **sizes)
        for first, last in ((0, 3), (3, 6))
    ]
    assert_same_run(parts, whole)


def assert_same_run(parts, whole) -> None:
    for rank in range(len(whole)):
        for values in ("norms", "rates"):
            assert [v for part in parts for v in getattr(part[rank], values)] == getattr(whole[rank], values)
        tiny.assert_same_weights(parts[-1][rank].weights[-1], whole[rank].weights[-1], 0.0)
    assert [loss for part in parts for loss in part[0].losses] == whole[0].losses


def state_of(rank) -> tuple[list[bytes], bytes, dict[str, bytes]]:
    """Parameters, and what random numbers will come."""
    tracker = rng_tracker().get_states()
    parameters = [p.detach().numpy().tobytes() for chunk in rank.policy.chunks for p in chunk.parameters()]
    streams = {name: state.numpy().tobytes() for name, state in tracker.items()}
    return parameters, torch.get_rng_state().numpy().tobytes(), streams


def rng_tracker():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, pytest.param({"tp": 2, "dp": 2}, marks=SLOW)], ids=str)
def test_replicas_agree_after_a_load_and_each_rank_has_its_own_random_state(sizes, model, tmp_path):
    def save(groups):
        rank = tiny.Rank(groups, config(**sizes), model)
        rank.train(BATCHES[:1])
        torch.manual_seed(1000 + 10 * groups.pp_rank + groups.tp_rank)
        torch.rand(3)
        with rng_tracker().fork():
            torch.rand(3 + groups.tp_rank)
        checkpoint.save(tmp_path, rank.policy, None, run_state(1, data_parallel=groups.dp_size), groups, keep=2)
        return groups.dp_rank, (groups.pp_rank, groups.tp_rank), state_of(rank)

    def load(groups):
        rank = tiny.Rank(groups, config(**sizes), model)
        torch.manual_seed(groups.rank)
        checkpoint.load(tmp_path / "step-00000001", rank.policy, None, groups)
        return groups.dp_rank, (groups.pp_rank, groups.tp_rank), state_of(rank)

    saved, loaded = run_ranks(save, **sizes), run_ranks(load, **sizes)
    assert loaded == saved
    places: dict = {}
    for _, place, state in loaded:
        places.setdefault(place, []).append(state)
    assert [len(replicas) for replicas in places.values()] == [2, 2]
    assert all(one == other for one, other in places.values())
    assert len({state[1] for state, _ in places.values()}) == 2


# Other layouts: within 1e-5 of the run that was never stopped


def train_through(groups, trainer, folder, path):
    """Six steps without a stop, and a checkpoint after the third, written while the others are trained."""
    rank = tiny.Rank(groups, trainer, folder)
    before = rank.train(BATCHES[:3])
    writer = checkpoint.CheckpointWriter(path, groups, 2)
    writer.begin(rank.policy, None, run_state(3, data_parallel=groups.dp_size))
    after = rank.train(BATCHES[3:])
    writer.finish()
    assert before.rates[-1] != after.rates[0]
    return after


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(model folder, checkpoint of step 3, steps 3 to 6 of every rank) of the run at ``sizes``; each is run once."""
    runs: dict = {}

    def run(tied: bool, sizes: dict[str, int]):
        key = (tied, *sorted(sizes.items()))
        if key not in runs:
            folder = tmp_path_factory.mktemp("unbroken")
            source = tiny.save_model(folder / "model", "qwen2", tied=tied, layers=4, seed=1)
            ranks = run_ranks(train_through, config(**sizes), source, folder / "checkpoints", **sizes)
            runs[key] = source, folder / "checkpoints" / "step-00000003", ranks
        return runs[key]

    return run


def resumed(groups, trainer, folder, path):
    rank = tiny.Rank(groups, trainer, folder)
    checkpoint.load_policy(path, rank.policy)
    return rank.train(BATCHES[3:])


WHOLE, SPLIT, CHUNKS = {}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}
LAYOUTS = [
    (WHOLE, {"tp": 2}),
    (WHOLE, {"pp": 2}),
    (WHOLE, {"tp": 2, "pp": 2}),
    (WHOLE, {"dp": 2}),
    (WHOLE, {"dp": 2, "tp": 2}),
    (WHOLE, CHUNKS),
    (SPLIT, WHOLE),
    (SPLIT, {"dp": 2}),
    (SPLIT, CHUNKS),
    (CHUNKS, WHOLE),
    (CHUNKS, {"pp": 2}),
    ({"dp": 2}, WHOLE),
]
FAST = [(True, WHOLE, {"tp": 2, "pp": 2}), (False, CHUNKS, WHOLE)]


@pytest.mark.parametrize(
    ("tied", "saved", "loaded"),
    [
        pytest.param(tied, saved, loaded, marks=() if (tied, saved, loaded) in FAST else SLOW)
        for tied in (True, False)
        for saved, loaded in LAYOUTS
    ],
    ids=lambda value: ("untied", "tied")[value] if isinstance(value, bool) else str(value or "one"),
)
def test_a_run_goes_on_at_other_parallel_sizes_as_if_it_had_not_been_stopped(tied, saved, loaded, unbroken):
    source, path, expected = unbroken(tied, saved)
    ranks = run_ranks(resumed, config(**loaded), source, path, **loaded)
    assert ranks[0].losses == pytest.approx(expected[0].losses, rel=1e-5)
    assert ranks[0].norms == pytest.approx(expected[0].norms, rel=1e-5)
    assert ranks[0].rates == expected[0].rates
    found, wanted = (tiny.whole([r.weights[-1] for r in run]) for run in (ranks, expected))
    tiny.assert_same_weights(found, wanted, 1e-5)


# Replay shards


def test_shards_come_back_with_their_ledgers(model, tmp_path):
    def save(groups):
        rank = tiny.Rank(groups, config(dp=2), model)
        shard = shard_with(3 + groups.dp_rank, seed=groups.dp_rank, index=groups.dp_rank, n_shards=2)
        checkpoint.save(tmp_path, rank.policy, shard, run_state(4, data_parallel=2), groups, keep=1)
        return shard.shard.counts(), shard.state_columns()

    def load(groups):
        rank = tiny.Rank(groups, config(dp=2), model)
        shard = StoredShard(ReplayShard(100, 10), index=groups.dp_rank, n_shards=2)
        state = checkpoint.load(tmp_path / "step-00000004", rank.policy, shard, groups)
        assert state == run_state(4, data_parallel=2)
        return shard.shard.counts(), shard.state_columns()

    saved, loaded = run_ranks(save, dp=2), run_ranks(load, dp=2)
    assert saved[0][0].trained == 3 and saved[0][0] != saved[1][0]
    for (counts, arrays), (counts_again, arrays_again) in zip(saved, loaded, strict=True):
        assert counts == counts_again
        assert arrays.keys() == arrays_again.keys()
        for name in arrays.keys() - {"delivered"}:  # it says what a log holds, and here is none
            np.testing.assert_array_equal(arrays[name], arrays_again[name])


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), pytest.param(2, 1, marks=SLOW), pytest.param(2, 4, marks=SLOW)], ids=str
)
def test_another_number_of_replicas_deals_the_prompts_anew(before, after, model, tmp_path):
    def owner(groups):
        return lambda prompt_id: owner_of(prompt_id, groups.dp_size) == groups.dp_rank

    def save(groups):
        rank = tiny.Rank(groups, config(dp=before), model)
        shard = shard_with(9, owns=owner(groups), index=groups.dp_rank, n_shards=before)
        checkpoint.save(tmp_path, rank.policy, shard, run_state(4, data_parallel=before), groups, keep=1)
        return shard.shard.counts(), list(shard.shard.prompts)

    def load(groups):
        rank = tiny.Rank(groups, config(dp=after), model)
        shard = empty_shard(groups)
        checkpoint.load(tmp_path / "step-00000004", rank.policy, shard, groups)
        assert all(map(owner(groups), shard.shard.prompts))
        return shard.shard.counts(), list(shard.shard.prompts)

    saved, loaded = run_ranks(save, dp=before), run_ranks(load, dp=after)
    for ranks in (saved, loaded):
        assert sorted(p for _, prompts in ranks for p in prompts) == [f"p{i}" for i in range(9)]
    ledgers = [combine({"s": 40}, set(), [counts for counts, _ in ranks]) for ranks in (saved, loaded)]
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].trained == 3 and ledgers[0].gap == 0


# Damage


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def spoil(path: Path) -> None:
    path.write_bytes(b"{")


DAMAGE = {
    "run.json": (remove, spoil),
    "model/metadata.json": (remove, spoil),
    "model/.metadata": (remove, truncate, spoil),
    "model/common.pt": (remove, truncate, spoil),
    "model/__0_0.distcp": (remove, truncate, spoil),
    "model/__1_0.distcp": (remove,),
    "shard-0.npz": (remove, truncate, spoil),
}


def test_a_damaged_checkpoint_is_one_line_on_every_rank_that_names_the_file_and_what_to_do(model, tmp_path):
    good = tmp_path / "good" / "step-00000001"

    def save(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        shard = shard_with(3) if groups.is_leader else None
        checkpoint.save(good.parent, rank.policy, shard, run_state(1), groups, keep=1)

    def load_damaged(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        messages = []
        for i, (file, damage) in enumerate((f, d) for f, damages in DAMAGE.items() for d in damages):
            path = tmp_path / str(i) / good.name
            if groups.rank == 0:
                shutil.copytree(good, path)
                damage(path / file)
            torch.distributed.barrier(group=groups.world)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(path, rank.policy, empty_shard(groups) if groups.is_leader else None, groups)
            messages.append((str(caught.value), path, path / file))
        checkpoint.load(good, rank.policy, None, groups)
        return messages

    run_ranks(save, pp=2)
    first, second = run_ranks(load_damaged, pp=2)
    assert first == second
    for message, path, file in first:
        assert message.startswith(f"cannot load {path}: ") and "\n" not in message
        assert f"{file} cannot be read (" in message
        assert message.endswith(f"; remove {path} to resume earlier")


def test_what_only_one_rank_cannot_read_is_an_error_on_all(model, tmp_path, monkeypatch):
    def body(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        checkpoint.save(tmp_path, rank.policy, None, run_state(1), groups, keep=1)
        if groups.rank == 1:
            monkeypatch.setattr(checkpoint, "_check_model", lambda model: int("no number"))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path / "step-00000001", rank.policy, None, groups)
        return str(caught.value)

    first, second = run_ranks(body, pp=2)
    assert first == second
    assert ": ValueError: invalid literal" in first and "(rank 1); remove" in first


@pytest.mark.parametrize("content", [None, b"{", b'{"step": 1}'])
def test_an_unreadable_state_is_one_line_that_says_what_to_do(content, tmp_path):
    path = tmp_path / "step-00000001"
    path.mkdir()
    if content is not None:
        (path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_state(path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(f"; remove {path} to resume earlier")


# The folder


def test_a_save_leaves_no_process_behind(model, tmp_path):
    """A signal to all processes of a job must not take away what the last save needs."""

    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        checkpoint.save(tmp_path, rank.policy, None, run_state(1), groups, keep=2)
        children = psutil.Process().children(recursive=True)
        return [child.cmdline() for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    assert run_ranks(body) == [[]]


def test_a_second_signal_during_a_save_changes_nothing(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        pid, stop = os.getpid(), threading.Event()

        def shower():
            while not stop.wait(0.002):
                for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()

        thread = threading.Thread(target=shower)
        thread.start()
        checkpoint.save(tmp_path, rank.policy, None, run_state(1), groups, keep=2)
        stop.set()
        thread.join()
        checkpoint.load(tmp_path / "step-00000001", rank.policy, None, groups)
        return len(seen)

    assert run_ranks(body)[0] > 0


def test_only_complete_checkpoints_count_and_the_oldest_leave(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        for step in (1, 2, 3, 10):
            checkpoint.save(tmp_path, rank.policy, None, run_state(step), groups, keep=2)

    run_ranks(body)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000011.partial")
    (tmp_path / "step-0000012.old").mkdir()
    assert checkpoint.checkpoints(tmp_path) == [
        (3, tmp_path / "step-00000003"),
        (10, tmp_path / "step-00000010"),
    ]
    assert checkpoint.checkpoints(tmp_path / "no such folder") == []


def test_a_leftover_of_a_killed_save_is_no_obstacle(model, tmp_path):
    (tmp_path / ".step-00000003.partial" / "model").mkdir(parents=True)
    (tmp_path / ".step-00000003.partial" / "model" / "junk").write_text("junk")
    run_ranks(train_and_save, config(), model, tmp_path, 0, 3, False)
    ((step, path),) = checkpoint.checkpoints(tmp_path)
    assert step == 3 and not (path / "model" / "junk").exists()
    assert not list(tmp_path.glob(".*"))
