"""Run one function on several forked ranks: imports are paid once, a case costs a fraction of a second.

The parent never joins a process group, so a fork is safe; ranks meet in a file, so no port can be taken.
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_patches

megatron_patches.apply()
torch.set_num_threads(1)

import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.optimizer  # noqa: E402, F401

from tba_megatron.dist import STORE_FILE, Groups  # noqa: E402
from tba_megatron.trainer.parallel import close_process_groups, open_process_groups  # noqa: E402


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    vpp: int = 1,
    limit_s: float = 120.0,
) -> list[Any]:
    """``function(groups, *args)`` on tp x pp x dp ranks, stages in ``vpp`` chunks; what each returned, by rank.

    AssertionError with the traceback of the first rank that failed; all others are ended by id.
    """
    size = tp * pp * dp
    with tempfile.TemporaryDirectory() as folder:
        pids = [_start(function, args, Path(folder), rank, (tp, pp, dp, vpp)) for rank in range(size)]
        failure = _wait(dict(zip(pids, range(size), strict=True)), Path(folder), limit_s)
        if failure:
            raise AssertionError(failure)
        return [pickle.loads((Path(folder) / f"out{rank}").read_bytes()) for rank in range(size)]


def _start(function, args, folder: Path, rank: int, sizes: tuple[int, int, int, int]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    # As multiprocessing's own forks do: the parent's children and clean-ups are not this process's.
    multiprocessing.process._children = set()
    multiprocessing.util._finalizer_registry.clear()
    try:
        size = sizes[0] * sizes[1] * sizes[2]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ[STORE_FILE] = str(folder / "store")
        groups: Groups = open_process_groups(
            tensor_parallel=sizes[0],
            pipeline_parallel=sizes[1],
            data_parallel=sizes[2],
            virtual_pipeline=sizes[3],
            seed=0,
            timeout_s=60.0,
        )
        (folder / f"out{rank}").write_bytes(pickle.dumps(function(groups, *args)))
        torch.distributed.barrier(group=groups.world)
        close_process_groups()
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        try:
            multiprocessing.util._exit_function()
        finally:
            os._exit(code)  # whatever happens: a fork that returned would run the rest of the tests


def _wait(ranks: dict[int, int], folder: Path, limit_s: float) -> str | None:
    deadline = time.monotonic() + limit_s
    failed: int | None = None
    while ranks and failed is None and time.monotonic() < deadline:
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = ranks.pop(pid)
                if status:
                    failed = rank
                    break
        time.sleep(0.01)
    if failed is not None:
        time.sleep(0.5)  # the rank that failed first may have taken another with it: let both write why
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    errors = sorted(folder.glob("error*"))
    if errors:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in errors)
    if failed is not None:
        return f"rank {failed} died without a traceback"
    return f"ranks {sorted(ranks.values())} did not end within {limit_s} s" if ranks else None
