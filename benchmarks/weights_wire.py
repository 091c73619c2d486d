"""Weights from a trainer's rank to receivers in processes of their own, by the real path and by two others beside it.

``raw`` broadcasts the bytes of the same buckets over gloo and does nothing else. ``one tensor at a time`` is the
straightforward way: each tensor copied to the host in float32 and broadcast on its own, between two barriers. Receivers
take commands from a pipe and answer with the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ranks import Model, build_model
from tba_megatron.config_sections import TrainerConfig, WeightsConfig
from tba_megatron.dist import Groups
from tba_megatron.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

Expected = Mapping[str, tuple[tuple[int, ...], str]]

HOST, TOKEN = "127.0.0.1", "benchmark"
BUCKET_BYTES = 64 << 20
TENSORS = 300  # of the way that sends them one at a time
LIMIT_S = 120.0  # only against a hang
POLL_S = 0.002
RAW, OURS, SINGLY = "raw", "ours", "one tensor at a time"


# ---- receivers


@contextmanager
def receivers(n: int, target: Callable[..., None], *args: Any, method: str = "fork") -> Iterator[list[Connection]]:
    """``target(connection, *args)`` in ``n`` processes; our ends of the connections. None is left at the end."""
    context: Any = multiprocessing.get_context(method)
    ours, processes = [], []
    for _ in range(n):
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        ours.append(mine)
        processes.append(process)
    try:
        yield ours
    finally:
        for process in processes:
            process.kill()  # it has nothing to save
            process.join()
        for connection in ours:
            connection.close()


def receive(connection: Connection, expected: Expected) -> None:
    """A receiver without an engine; obeys commands until it is killed."""
    import torch

    torch.set_num_threads(1)
    end = _BareReceiver(connection, expected)
    while True:
        while connection.poll(0.0 if end.control else POLL_S):
            command, *args = connection.recv()
            {"join": end.join, "raw group": end.join_raw, RAW: end.raw, SINGLY: end.singly}[command](*args)
        if end.control is not None:
            end.serve()


class _BareReceiver:
    """A member of the run once told to join it, and of a raw group beside it."""

    def __init__(self, connection: Connection, expected: Expected) -> None:
        import torch

        from tba_megatron.search.receiver import Receiver

        self.control: Any = None
        self._connection, self._receiver = connection, Receiver(torch.device("cpu"), expected)
        self._offered = ""
        self._raw: Any = None
        self._warm: list[Tensor] = []

    def join(self, address: str, name: str) -> None:
        self.control = join(address, name)

    def join_raw(self, port: int, name: str, rank: int, size: int) -> None:
        self._raw = raw_group(port, name, rank, size)

    def raw(self, sizes: list[int]) -> None:
        import torch

        if [len(bucket) for bucket in self._warm] != sizes:
            self._warm = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        self._connection.send("ready")
        for bucket in self._warm:
            self._raw.broadcast(bucket)
        self._connection.send(time.monotonic())

    def singly(self, sizes: list[int]) -> None:
        import torch

        self._connection.send("ready")
        self._raw.barrier()
        for size in sizes:
            self._raw.broadcast(torch.empty(size))
        self._raw.barrier()
        self._connection.send(time.monotonic())

    def serve(self) -> None:
        """Take in what is offered; say when it lies in staging."""
        from tba_megatron.search.engine import ReceiveState
        from tba_megatron.transport.messages import Applied, Offer

        for message in self.control.poll(POLL_S):
            if isinstance(message, Offer):
                self._offered = message.version
                self._receiver.begin(message, 0, LIMIT_S)
        status = self._receiver.poll()
        if self._offered and status.state in (ReceiveState.STAGED, ReceiveState.FAILED):
            self._connection.send((time.monotonic(), status.reason))
            if status.state is ReceiveState.STAGED:
                self._receiver.take()
                self.control.send(Applied(version=self._offered, pause_s=0.0))
            self._offered = ""


def join(address: str, name: str) -> Any:
    """A member of the run, in no group yet."""
    from tba_megatron.transport.control_client import ControlClient
    from tba_megatron.transport.messages import Hello

    control = ControlClient(address, TOKEN, name)
    control.send(Hello(token=TOKEN, searcher=name, host=HOST, workers=1, version="0.0"))
    return control


class RawGroup:
    """Gloo, and nothing around it; rank 0 sends."""

    def __init__(self, process_group: Any) -> None:
        import torch.distributed as dist

        self._group, self._options = process_group, dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=LIMIT_S)

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], self._options).wait()

    def barrier(self) -> None:
        self._group.barrier().wait()


def raw_group(port: int, name: str, rank: int, size: int) -> RawGroup:
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    limit = timedelta(seconds=LIMIT_S)
    store = PrefixStore(name, TCPStore(HOST, port, is_master=False, timeout=limit))
    return RawGroup(ProcessGroupGloo(store, rank, size, limit))


# ---- the trainer's end


class Desk:
    """Publishes as a run does: rank 0's desk and coordinator, and a publisher, over a control server."""

    def __init__(self, groups: Groups, model: Model) -> None:
        from tba_megatron.trainer.coordinator import Coordinator, VersionFiles
        from tba_megatron.trainer.publish import PublishDesk, Publisher
        from tba_megatron.transport.control import ControlServer
        from tba_megatron.transport.fleet import FleetSettings
        from tba_megatron.transport.registry import PromptLeases
        from tba_megatron.transport.sockets import Listen

        self.policy, self._step = model.policy, 0
        config = WeightsConfig(timeout_s=LIMIT_S, bucket_bytes=BUCKET_BYTES)
        files = VersionFiles(weights=Path("unused"), template=Path("unused"), dtype="float32")
        self.control = ControlServer(
            Listen(sockets="tcp", host=HOST, folder=Path("unused")),
            TOKEN,
            FleetSettings(lease_s=10 * LIMIT_S, silent_s=10 * LIMIT_S, max_ahead_groups=1, shards=()),
            newest=PolicyVersion(0, 0),
            leases=PromptLeases(),
        )
        self.publisher = Publisher(
            config=config, groups=groups, architecture=model.architecture, shape=model.shape, files=files
        )
        coordinator = Coordinator(
            config=config, control=self.control, n_stages=1, backend=groups.backend, probe=(), files=files
        )
        self.desk = PublishDesk(config=config, host=HOST, replicas=1, control=self.control, coordinator=coordinator)

    def admit(self, connections: Sequence[Connection]) -> None:
        """Have more receivers join the run."""
        known = len(self.control.members())
        for i, connection in enumerate(connections):
            connection.send(("join", self.control.address, f"searcher-{known + i}"))
        if not self.control.wait_until(lambda members: len(members) == known + len(connections), LIMIT_S):
            raise RuntimeError("the receivers did not join")

    def publish(self, connections: Sequence[Connection]) -> tuple[float, float]:
        """Seconds until the next version lies verified in staging everywhere, those of its snapshot apart."""
        self._step += 1
        version, plan, deadline_s = PolicyVersion(0, self._step), None, time.monotonic() + LIMIT_S
        started_s = 0.0
        while plan is None and started_s < deadline_s:
            started_s = time.monotonic()
            plan = self.desk.plan(self.control.members(), version, sending=self.publisher.sending)
            if plan is None:
                time.sleep(POLL_S)
        if plan is None:
            raise RuntimeError(f"version {version} could not be published")
        self.publisher.publish(self.policy, version, plan)
        answers = [hear(connection) for connection in connections]
        failures = [reason for _, reason in answers if reason]
        if failures or not self.control.wait_until(lambda members: all(m.version == version for m in members), LIMIT_S):
            raise RuntimeError(f"version {version} did not arrive: {failures}")
        snapshot_s = self.publisher.take_snapshot_s()
        return max(arrived_s for arrived_s, _ in answers) - started_s - snapshot_s, snapshot_s

    def close(self) -> None:
        self.publisher.close()
        self.desk.close()
        self.control.close()


def hear(connection: Connection) -> Any:
    if not wait([connection], LIMIT_S):
        raise RuntimeError(f"a receiver was silent for {LIMIT_S:g} s")
    return connection.recv()


def trainer_side(
    groups: Groups, _trainer: TrainerConfig, hf_config: Mapping[str, Any], connections: list[Connection], repeats: int
) -> dict[str, Any]:
    """Everything of one model: the pause, then each way to one receiver, then to all."""
    import torch

    model = build_model(groups, TrainerConfig(), hf_config)
    n_bytes = 4 * model.n_parameters
    report: dict[str, Any] = {"bytes": n_bytes, "pause": pause(groups, model, repeats), "receivers": {}}
    store, port = _store()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.policy.chunks[0].parameters()])
    buckets = list(flat[: n_bytes // 4].view(torch.uint8).split(BUCKET_BYTES))
    tensors = list(flat[: n_bytes // 4].chunk(TENSORS))
    desk = Desk(groups, model)
    for n in range(1, len(connections) + 1):
        desk.admit([connections[n - 1]])
        some = connections[:n]
        for i, connection in enumerate(some):
            connection.send(("raw group", port, f"raw-{n}", i + 1, n + 1))
        group = raw_group(port, f"raw-{n}", 0, n + 1)
        ways = {
            RAW: lambda some=some, group=group: (_raw(group, buckets, some), 0.0),
            OURS: lambda some=some: desk.publish(some),
            SINGLY: lambda some=some, group=group: (_singly(group, tensors, some), 0.0),
        }
        report["receivers"][str(n)] = _in_turn(ways, n_bytes, repeats)
    desk.close()
    del store
    return report


def _store() -> tuple[Any, int]:
    from tba_megatron.transport.round import host_store

    return host_store(HOST, LIMIT_S)


def _in_turn(ways: Mapping[str, Callable[[], tuple[float, float]]], n_bytes: int, repeats: int) -> dict[str, Any]:
    """Each way in turn, over and over; the first round, in which groups and memory are new, does not count.

    A way returns its seconds and those of the snapshot before it. Rates are of the seconds alone; a ratio is that of
    two ways of one round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    snapshots: list[float] = []
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken_s, snapshot_s = way()
            if repeat:
                seconds[name].append(taken_s)
                snapshots += [snapshot_s] * (name == OURS)
    with_snapshot = [sum(both) for both in zip(seconds[OURS], snapshots, strict=True)]
    return {
        **{name: rates(n_bytes, values) for name, values in seconds.items()},
        "publish_of_raw": quotients(seconds[RAW], seconds[OURS]),
        "publish_and_snapshot_of_raw": quotients(seconds[RAW], with_snapshot),
        "publish_of_one_tensor_at_a_time": quotients(seconds[SINGLY], seconds[OURS]),
    }


def quotients(seconds: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """How many times as fast ours is, round by round."""
    all_ = sorted(other_s / our_s for other_s, our_s in zip(seconds, ours, strict=True))
    return {"median": round(statistics.median(all_), 3), "all": [round(value, 3) for value in all_]}


def rates(n_bytes: int, seconds: Sequence[float]) -> dict[str, Any]:
    """MB/s of the median, and of all from the slowest to the fastest."""
    return {
        "mb_s": round(n_bytes / 1e6 / statistics.median(seconds), 1),
        "all_mb_s": [round(n_bytes / 1e6 / value, 1) for value in sorted(seconds, reverse=True)],
    }


def _raw(group: RawGroup, buckets: Sequence[Tensor], connections: Sequence[Connection]) -> float:
    for connection in connections:
        connection.send((RAW, [len(bucket) for bucket in buckets]))
    for connection in connections:
        hear(connection)
    started_s = time.monotonic()
    for bucket in buckets:
        group.broadcast(bucket)
    return max(hear(connection) for connection in connections) - started_s


def _singly(group: RawGroup, tensors: Sequence[Tensor], connections: Sequence[Connection]) -> float:
    import torch

    for connection in connections:
        connection.send((SINGLY, [len(tensor) for tensor in tensors]))
    for connection in connections:
        hear(connection)
    started_s = time.monotonic()
    group.barrier()
    for tensor in tensors:
        group.broadcast(tensor.to(torch.float32).cpu())
    group.barrier()
    return max(hear(connection) for connection in connections) - started_s


def pause(groups: Groups, model: Model, repeats: int) -> dict[str, Any]:
    """What training waits for, and a copy of as many bytes between buffers that are as warm."""
    import torch

    from tba_megatron.trainer.snapshot import Snapshotter

    snapshotter = Snapshotter(
        architecture=model.architecture,
        shape=model.shape,
        groups=groups,
        dtype=torch.float32,
        bucket_bytes=BUCKET_BYTES,
    )
    version, chunks = PolicyVersion(0, 0), model.policy.chunks
    snapshot = snapshotter.take(chunks, version)
    assert snapshot is not None
    sources = [bucket.clone() for bucket in snapshot.buckets]

    def copy() -> None:
        for target, source in zip(snapshot.buckets, sources, strict=True):
            target.copy_(source)

    taken, copied = [], []
    for _ in range(2 * repeats + 1):
        for found, run in ((taken, lambda: snapshotter.take(chunks, version)), (copied, copy)):
            started_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - started_s)
    return {
        "snapshot_ms": milliseconds(taken),
        "plain_copy_ms": milliseconds(copied),
        "ratio": round(statistics.median(taken) / statistics.median(copied), 3),
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(1e3 * statistics.median(seconds), 2),
        "least": round(1e3 * min(seconds), 2),
        "most": round(1e3 * max(seconds), 2),
    }
