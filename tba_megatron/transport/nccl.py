"""What is NCCL's alone in a broadcast group. None of it has run: it needs two GPUs (tests/gpu/test_nccl_weights.py).

- A group that torch watches may end the process: on a lost peer or a timeout the watchdog thread of the group raises,
  which nobody can catch. With TORCH_NCCL_BLOCKING_WAIT=1, read when a group is made, the group has no such thread:
  ``wait(timeout)`` polls, aborts the communicator when a peer is lost or the deadline passes, and raises. It must not
  be set while a trainer makes its training groups, each of whose waits would then stop the host.
- NCCL_CUMEM_ENABLE decides how members map each other's memory, and vLLM sets it by itself: all must agree.
- NCCL refuses two ranks on one GPU, some versions by hanging. There gloo serves, through host memory.
- Kernels of two communicators that run at once can wait for each other for ever: one group after another.
- With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's tensor parallelism asks for, a broadcast that waits for a peer
  can hold up training kernels that were enqueued after it: so it is enqueued only when all receivers have posted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Store

from tba_megatron.dist import run_environment
from tba_megatron.errors import WeightTransferError

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
CUMEM = "NCCL_CUMEM_ENABLE"
_UNSET = "unset"
_ON = ("1", "y", "yes", "t", "true")  # as torch reads it
_WATCHDOG_S = 7 * 24 * 3600.0  # deadlines are those of wait()


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What members of a group must agree on (``cumem``) or differ in (``gpu``)."""

    gpu: str
    cumem: str


def nccl_group(store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """A ProcessGroupNCCL on this process's current GPU, connected; its broadcasts end by ``wait(timeout)`` alone.

    WeightTransferError when the members do not fit together; RuntimeError when one does not come in time.
    """
    environment = run_environment()
    check_blocking_wait(environment)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = f"GPU {torch.cuda.get_device_properties(device).uuid}"
    exchange(store, rank, world_size, MemberFacts(gpu=gpu, cumem=environment.get(CUMEM, _UNSET)), timeout_s)
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_WATCHDOG_S)
    group = ProcessGroupNCCL(store, rank, world_size, options)
    group.eager_connect_single_device(device)  # type: ignore[attr-defined]
    return group


def check_blocking_wait(environment: Mapping[str, str]) -> None:
    """WeightTransferError unless this process's next groups have no watchdog."""
    if environment.get(BLOCKING_WAIT, "").lower() not in _ON:
        raise WeightTransferError(
            f"{BLOCKING_WAIT} is {environment.get(BLOCKING_WAIT, _UNSET)} in this process, so that torch would end it "
            "when a peer is lost; it must be 1 when a group for weights is formed, after all other groups"
        )


def exchange(store: Store, rank: int, world_size: int, facts: MemberFacts, timeout_s: float) -> None:
    """Tell the others about this member; WeightTransferError when they do not fit together, the same on every member.

    RuntimeError when one says nothing within ``timeout_s``.
    """
    store.set(f"facts-{rank}", msgspec.json.encode(facts))  # type: ignore[arg-type]
    keys = [f"facts-{member}" for member in range(world_size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    check_members([msgspec.json.decode(store.get(key), type=MemberFacts) for key in keys])


def check_members(members: list[MemberFacts]) -> None:
    """WeightTransferError with both values where two members, in order of rank, do not fit together."""
    first_on: dict[str, int] = {}
    for rank, member in enumerate(members):
        other = first_on.setdefault(member.gpu, rank)
        if other != rank:
            raise WeightTransferError(
                f"ranks {other} and {rank} are both on {member.gpu}, which NCCL refuses; give each a GPU of its own"
            )
        if member.cumem != members[0].cumem:
            raise WeightTransferError(
                f"{CUMEM} is {members[0].cumem} on rank 0 and {member.cumem} on rank {rank}; set it to one value for "
                "trainer and searchers"
            )
