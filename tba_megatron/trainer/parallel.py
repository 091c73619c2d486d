"""The trainer's process groups: Megatron's parallel state beside the gloo groups that carry control traffic."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tba_megatron.dist import Groups, device_and_backend, join_world, rank_from_environment
from tba_megatron.errors import ConfigError


def open_process_groups(
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    data_parallel: int,
    seed: int,
    timeout_s: float,
    virtual_pipeline: int = 1,
) -> Groups:
    """Join the trainer's world and build its groups. ConfigError when the world has another size than tp x pp x dp."""
    info = rank_from_environment()
    wanted = tensor_parallel * pipeline_parallel * data_parallel
    if info.world_size != wanted:
        raise ConfigError(
            [
                f"the world has {info.world_size} ranks ({info.launcher}), but trainer.tensor_parallel x "
                f"pipeline_parallel x data_parallel is {tensor_parallel} x {pipeline_parallel} x {data_parallel} = "
                f"{wanted}; start {wanted} ranks or change the sizes"
            ]
        )
    device, backend = device_and_backend(info.local_rank)
    timeout = timedelta(seconds=timeout_s)
    join_world(info, backend, timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(seed)

    world = _gloo_group(None, timeout)
    dp_rank = parallel_state.get_data_parallel_rank()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    everyone: list[tuple[int, int, int]] = [(-1, -1, -1)] * info.world_size
    dist.all_gather_object(everyone, (dp_rank, pp_rank, tp_rank), group=world)
    replicas = [tuple(r for r, (dp, _, _) in enumerate(everyone) if dp == replica) for replica in range(data_parallel)]
    leader_ranks = tuple(
        next(r for r, at in enumerate(everyone) if at == (replica, pipeline_parallel - 1, 0))
        for replica in range(data_parallel)
    )
    replica_groups = [_gloo_group(ranks, timeout) for ranks in replicas]
    leaders = _gloo_group(leader_ranks, timeout)
    return Groups(
        info=info,
        device=device,
        backend=backend,
        tp_rank=tp_rank,
        tp_size=tensor_parallel,
        pp_rank=pp_rank,
        pp_size=pipeline_parallel,
        dp_rank=dp_rank,
        dp_size=data_parallel,
        world=world,
        replica=replica_groups[dp_rank],
        leaders=leaders,
        replica_ranks=replicas[dp_rank],
        leader_ranks=leader_ranks,
    )


def _gloo_group(ranks: tuple[int, ...] | None, timeout: timedelta) -> dist.ProcessGroup:
    """A collective over the world, also for the ranks that are no members."""
    group = dist.new_group(None if ranks is None else list(ranks), backend="gloo", timeout=timeout)
    return cast(dist.ProcessGroup, group)


def close_process_groups() -> None:
    """Leave the world; harmless when it was never joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
