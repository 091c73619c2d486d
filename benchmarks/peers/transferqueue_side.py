"""The package transferqueue at work: two senders put rollouts, one reader fetches them. Run by its own environment.

``python -m benchmarks.peers.transferqueue_side SETTINGS``, a JSON object, prints one JSON object. It uses the storage
and the sampler that the package has by default, and its native calls: put, get_meta and get_data. A rollout is a row of
two columns of T values, its reward and its number. Ray gets a small object store and a folder of its own, which is
gone with it.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.peers.rollouts import GROUP, make_rollouts

FIELDS = ["tokens", "logprobs", "reward", "number"]


class Sender:
    """A process that has rollouts and puts them, so many a call, each call acknowledged before the next."""

    def __init__(self, sender: int, n_groups: int, n_tokens: int, seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._queue = importlib.import_module("transfer_queue")
        self._table_of = importlib.import_module("tensordict").TensorDict
        self._queue.init()
        made = make_rollouts(n_groups, seed=seed, sender=sender, n_tokens=n_tokens)
        n = made.n_rollouts
        self._columns = {
            "tokens": torch.from_numpy(made.tokens.reshape(n, n_tokens)),
            "logprobs": torch.from_numpy(made.logprobs.reshape(n, n_tokens)),
            "reward": torch.from_numpy(made.rewards.reshape(n, 1)),
            "number": torch.arange(sender * n, (sender + 1) * n).reshape(n, 1),
        }

    def ready(self) -> None:
        """Returns once the process is up."""

    def put(self, partition: str, n_rollouts: int, n_a_call: int) -> None:
        client = self._queue.get_client()
        for start in range(0, n_rollouts, n_a_call):
            end = min(start + n_a_call, n_rollouts)
            rows = {name: column[start:end] for name, column in self._columns.items()}
            client.put(self._table_of(rows, batch_size=end - start), partition_id=partition)


def main(settings: Mapping[str, Any]) -> dict[str, Any]:
    ray = importlib.import_module("ray")
    # The paths of ray's sockets must be short, whatever the folder for temporary files is.
    folder = tempfile.mkdtemp(prefix="tba-ray-", dir="/tmp")
    try:
        # Actors of the package ask for a core each: what ray believes to have is not what the processes may use.
        ray.init(
            num_cpus=8,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            return _measure(ray, settings)
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(ray: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    queue = importlib.import_module("transfer_queue")
    conf = importlib.import_module("omegaconf").OmegaConf
    queue.init(conf.create({"backend": {"SimpleStorage": {"num_data_storage_units": settings["storage_units"]}}}))
    try:
        n_senders, n_rollouts = settings["senders"], settings["rollouts"] // settings["senders"]
        remote = ray.remote(num_cpus=0)(Sender)
        made = (-(-n_rollouts // GROUP), settings["tokens"], settings["seed"])
        senders = [remote.remote(sender, *made) for sender in range(n_senders)]
        ray.get([sender.ready.remote() for sender in senders])
        report: dict[str, Any] = {"in": {}, "out": {}}
        for n_a_call in settings["batches"]:
            _there_and_back(ray, queue, senders, min(n_rollouts, 2 * n_a_call), n_a_call)  # a warm-up
            rates = _there_and_back(ray, queue, senders, n_rollouts, n_a_call)
            report["in"][n_a_call], report["out"][n_a_call] = rates
        report["versions"] = {name: version(name) for name in ("transferqueue", "ray", "torch", "tensordict")}
        return report
    finally:
        queue.close()


def _there_and_back(ray: Any, queue: Any, senders: list[Any], n_rollouts: int, n_a_call: int) -> list[dict[str, float]]:
    """Puts ``n_rollouts`` of each sender and fetches them all: the measurements of both. The storage is empty after."""
    numbers: list[Any] = []

    def put() -> None:
        ray.get([sender.put.remote("train", n_rollouts, n_a_call) for sender in senders])

    def fetch() -> None:
        numbers.extend(_fetch(queue, "train", total, n_a_call))

    total = n_rollouts * len(senders)
    measured = [_timed(work) | {"rollouts": total} for work in (put, fetch)]
    if (distinct := len(np.unique(np.concatenate(numbers)))) != total:
        raise RuntimeError(f"{distinct} different rollouts came back of {total}")
    queue.get_client().clear_partition("train")
    return measured


def _fetch(queue: Any, partition: str, n_rollouts: int, n_a_call: int) -> list[Any]:
    """The numbers of the rollouts that came, ``n_a_call`` at a time."""
    client, numbers, left = queue.get_client(), [], n_rollouts
    while left > 0:
        wanted = {"data_fields": FIELDS, "batch_size": min(n_a_call, left), "partition_id": partition}
        rows = client.get_data(client.get_meta(**wanted, task_name="train"))
        column = rows["number"]
        numbers.append((column.values() if column.is_nested else column).numpy().ravel())
        left -= len(numbers[-1])
    return numbers


def _timed(work: Callable[[], None]) -> dict[str, float]:
    cpu_s, started = _cpu_s(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "cpu_s": _cpu_s() - cpu_s}


def _cpu_s() -> float:
    """Of this process and all that descend from it."""
    psutil = importlib.import_module("psutil")
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
