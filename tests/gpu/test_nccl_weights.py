"""Broadcast groups over NCCL: a test for each fact that gloo cannot show. None of those marked ``gpu`` has run.

What members tell each other before they connect is tested without a GPU. Ranks are processes of their own, started
anew, since CUDA does not outlive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import allocate, build_buckets, layout_of, unpack
from tba_megatron.transport.nccl import BLOCKING_WAIT, CUMEM, MemberFacts, check_blocking_wait, check_members, exchange
from tba_megatron.transport.round import connect, host_store
from tba_megatron.transport.weights import Group, join_group, receive_version, send_version
from tba_megatron.types import PolicyVersion

HOST = "127.0.0.1"
TIMEOUT_S = 5.0
START_S = 60.0  # a process imports torch and finds its GPU
LIMIT_S = 180.0  # only against a hang
needs_gpu = pytest.mark.gpu


def facts(gpu: str, cumem: str = "unset") -> MemberFacts:
    return MemberFacts(gpu=gpu, cumem=cumem)


# ---- without a GPU


def test_members_that_fit_together_are_let_through():
    check_members([facts("GPU a", "1"), facts("GPU b", "1"), facts("GPU c", "1")])


def test_two_members_on_one_gpu_are_named_with_it():
    with pytest.raises(WeightTransferError, match=r"ranks 0 and 2 are both on GPU a, which NCCL refuses"):
        check_members([facts("GPU a"), facts("GPU b"), facts("GPU a")])


def test_members_that_map_memory_differently_are_named_with_both_values():
    with pytest.raises(WeightTransferError, match=rf"{CUMEM} is unset on rank 0 and 0 on rank 1"):
        check_members([facts("GPU a"), facts("GPU b", "0")])


def test_every_member_hears_the_same_about_the_others():
    _store, port = host_store(HOST, START_S)

    def member(rank: int) -> str:
        with pytest.raises(WeightTransferError) as caught:
            exchange(connect(HOST, port, START_S), rank, 3, facts("GPU a" if rank != 1 else "GPU b"), START_S)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        (told,) = set(pool.map(member, range(3)))
    assert told.startswith("ranks 0 and 2 are both on GPU a")


def test_a_member_that_says_nothing_is_waited_for_until_the_deadline():
    _store, port = host_store(HOST, 1.0)
    with pytest.raises(RuntimeError):
        exchange(connect(HOST, port, 1.0), 0, 2, facts("GPU a"), 1.0)


@pytest.mark.parametrize("environment", [{}, {BLOCKING_WAIT: "0"}], ids=str)
def test_a_process_whose_groups_torch_watches_forms_no_group_for_weights(environment):
    with pytest.raises(WeightTransferError, match=f"{BLOCKING_WAIT} is (0|unset) in this process"):
        check_blocking_wait(environment)
    check_blocking_wait({**environment, BLOCKING_WAIT: "1"})


# ---- with GPUs


def named(gpu: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"w{i}", torch.randn(1 << 18, generator=generator).cuda(gpu)) for i in range(8)]


def rank_main(
    act: Callable[[Group, int], Any], rank: int, gpu: int, port: int, variables: Mapping[str, str], out: Any
) -> None:
    os.environ.update(variables)
    torch.cuda.set_device(gpu)
    try:
        group = join_group(host=HOST, port=port, epoch=0, rank=rank, world_size=2, backend="nccl", timeout_s=START_S)
    except WeightTransferError as error:
        out.put((rank, str(error)))
        return
    out.put((rank, act(group, gpu)))
    group.close()


def on_two_ranks(
    act: Callable[[Group, int], Any],
    gpus: tuple[int, int] = (0, 1),
    variables: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    killed: tuple[int, ...] = (),
) -> dict[int, Any]:
    """What ``act(group, gpu)`` returned on each rank that was not to be killed."""
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip(f"needs {max(gpus) + 1} CUDA devices")
    _store, port = host_store(HOST, START_S)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [
        context.Process(
            target=rank_main,
            args=(act, rank, gpus[rank], port, {BLOCKING_WAIT: "1", **variables[rank]}, out),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(out.get(timeout=LIMIT_S) for _ in range(2 - len(killed)))
        for rank, process in enumerate(ranks):
            process.join(LIMIT_S)
            assert process.exitcode == (-signal.SIGKILL if rank in killed else 0), f"rank {rank} was ended"
        return found
    finally:
        for process in ranks:
            process.kill()


def bring(group: Group, gpu: int) -> bool:
    manifest, buckets = build_buckets(PolicyVersion(0, 1), named(gpu), 1 << 21, owner=0)
    if group.rank == 0:
        send_version(group, manifest, buckets)
        return True
    staging = allocate(layout_of(manifest), torch.device("cuda", gpu))
    receive_version(group, manifest, staging)
    pairs = zip(unpack(manifest.entries, staging), named(gpu), strict=True)
    return all(torch.equal(got, sent) for (_, got), (_, sent) in pairs)


@needs_gpu
def test_a_version_arrives_on_another_gpu():
    assert on_two_ranks(bring) == {0: True, 1: True}


@needs_gpu
def test_a_checksum_and_the_finite_test_are_those_of_the_host():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    host = [(name, tensor.cpu()) for name, tensor in named(0)]
    version = PolicyVersion(0, 1)
    assert build_buckets(version, named(0), 1 << 21, 0)[0] == build_buckets(version, host, 1 << 21, 0)[0]
    tensors = named(0)
    tensors[3][1][5] = float("nan")
    with pytest.raises(WeightTransferError, match=r"version 0\.1: w3 is not finite"):
        build_buckets(version, tensors, 1 << 21, 0)


def stall(group: Group, gpu: int) -> str:
    """Rank 0 never sends; rank 1's wait ends by itself, and its process goes on."""
    own = Group(group.store, group._process_group, group.rank, TIMEOUT_S)
    if group.rank == 0:
        group.store.wait(["out"])
        return ""
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{gpu}")
    try:
        own.broadcast(tensor, 0)
    except RuntimeError as error:
        found = type(error).__name__
    else:
        found = "arrived"
    group.abort()
    group.store.set("out", "")
    works = torch.ones(4, device=f"cuda:{gpu}").sum().item()
    return f"{found}, then {works:g}"


@needs_gpu
def test_a_timeout_raises_and_leaves_the_process_and_its_gpu_alive():
    assert on_two_ranks(stall)[1] == "DistBackendError, then 4"


def die(group: Group, gpu: int) -> str:
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    own = Group(group.store, group._process_group, group.rank, TIMEOUT_S)
    try:
        own.broadcast(torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{gpu}"), 0)
    except RuntimeError:
        group.abort()
        return f"alive, {torch.ones(4, device=f'cuda:{gpu}').sum().item():g}"
    return "arrived"


@needs_gpu
def test_a_peer_that_dies_does_not_end_this_process():
    assert on_two_ranks(die, killed=(0,)) == {1: "alive, 4"}


def train_beside_a_waiting_broadcast(group: Group, gpu: int) -> bool:
    """Kernels of another stream get through although a broadcast waits for its peer."""
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{gpu}")
    if group.rank == 0:
        group.store.wait(["trained"])
        group.broadcast(tensor, 0)
        return True
    transfer = group.start_broadcast(tensor, 0)
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        weights = torch.ones(256, 256, device=f"cuda:{gpu}")
        product = weights @ weights
    stream.synchronize()
    group.store.set("trained", "")
    transfer.wait()
    return bool((product == 256).all())


@needs_gpu
@pytest.mark.parametrize("connections", ["1", "8"])
def test_kernels_that_were_enqueued_after_a_waiting_broadcast_run(connections):
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    found = on_two_ranks(train_beside_a_waiting_broadcast, variables=(variables, variables))
    assert found == {0: True, 1: True}


@needs_gpu
def test_two_ranks_on_one_gpu_are_refused_before_nccl_can_hang():
    for error in on_two_ranks(bring, gpus=(0, 0)).values():
        assert "ranks 0 and 1 are both on GPU" in error


@needs_gpu
def test_ranks_that_map_memory_differently_are_refused():
    for error in on_two_ranks(bring, variables=({CUMEM: "1"}, {CUMEM: "0"})).values():
        assert f"{CUMEM} is 1 on rank 0 and 0 on rank 1" in error


def two_groups(group: Group, gpu: int) -> bool:
    """One after another in one process, as a stage leader serves its cohorts."""
    host_and_port = group.store.get("second").decode() if group.rank else ""
    if group.rank == 0:
        _store, port = host_store(HOST, START_S)
        group.store.set("second", str(port))
    else:
        port = int(host_and_port)
    second = join_group(host=HOST, port=port, epoch=1, rank=group.rank, world_size=2, backend="nccl", timeout_s=START_S)
    arrived = [bring(group, gpu), bring(second, gpu), bring(group, gpu)]
    second.close()
    return all(arrived)


@needs_gpu
def test_two_communicators_of_a_process_serve_in_turn():
    assert on_two_ranks(two_groups) == {0: True, 1: True}
