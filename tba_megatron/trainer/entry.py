"""Build one rank of the trainer from a configuration and run its loop."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack
from pathlib import Path

from tba_megatron.buffer.sampler import make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import REPLAY, StoredShard, generations
from tba_megatron.config import Config
from tba_megatron.config_search import AddressRendezvous, VllmEngineConfig
from tba_megatron.config_sections import SearcherData, SegmentsConfig
from tba_megatron.dist import Groups, prepare_weight_groups
from tba_megatron.errors import TransportError
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.build import begin_attempt, build_model, export_policy, open_run_log
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.chief import Chief
from tba_megatron.trainer.coordinator import Coordinator, VersionFiles
from tba_megatron.trainer.exchange import from_rank_0, gather_on_all
from tba_megatron.trainer.loop import TrainLoop
from tba_megatron.trainer.model import Policy
from tba_megatron.trainer.probe import ProbeDesk, Prober, probe_tokens
from tba_megatron.trainer.publish import PublishDesk, Publisher
from tba_megatron.trainer.recording import FOLDER as RECORDING
from tba_megatron.trainer.recording import Recorder
from tba_megatron.trainer.result import write_result
from tba_megatron.trainer.run_state import RunState
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.fleet import FleetSettings
from tba_megatron.transport.registry import PromptLeases
from tba_megatron.transport.rendezvous import Rendezvous, remove_held, withdraw_rendezvous, write_rendezvous
from tba_megatron.transport.rollouts import RolloutReceiver, owner_of
from tba_megatron.transport.sockets import listen_at, new_secret, read_secret, remove_sockets
from tba_megatron.transport.weight_files import remove_old, version_folder, write_marker
from tba_megatron.types import PolicyVersion

_log = logging.getLogger(__name__)


def train(config: Config, groups: Groups) -> int:
    """Run this rank until the run is complete or a signal stops it; the exit code."""
    model = build_model(config, groups)
    shard = _build_shard(config, groups, model.shape.vocab_size)
    state = _restore(config, model.policy, shard, groups)
    if model.reference is not None:
        model.reference.restore(state.step)
    start = PolicyVersion(state.history.attempt, state.step)
    weights = config.run.folder / "weights"
    export_policy(config, model.policy.chunks, groups, version_folder(weights, start))
    if groups.rank == 0:
        write_marker(weights, start)
        remove_old(weights, keep=1)
    prepare_weight_groups()
    with ExitStack() as stack:
        token = _secret(config, groups)
        receiver = _open_receiver(config, groups, token, shard, stack) if shard is not None else None
        addresses = gather_on_all(receiver.address if receiver else "", groups)
        control = _open_control(config, groups, addresses, token, state)
        files = VersionFiles(weights=weights, template=config.start_model, dtype=_wire_dtype(config))
        probe = probe_tokens(config.probe_length, model.shape.vocab_size, config.run.seed)
        publisher = Publisher(
            config=config.weights,
            groups=groups,
            architecture=model.architecture,
            shape=model.shape,
            files=files,
        )
        stack.callback(publisher.close)
        sampler = make_sampler(config.buffer.sampler)
        chief = None
        if control is not None:
            stack.callback(control.close)
            log = open_run_log(config, state.step)
            stack.callback(log.close)
            desk = _open_desk(config, groups, control, files, probe)
            stack.callback(desk.close)
            probes = ProbeDesk(config.weights, control)
            chief = Chief(
                config=config, control=control, desk=desk, probes=probes, sampler=sampler, log=log, state=state
            )
            if config.transport.rendezvous.kind == "folder":
                _announce(config, control, token, state, weights)
                stack.callback(withdraw_rendezvous, config.run.folder, token)
        loop = TrainLoop(
            config=config,
            groups=groups,
            policy=model.policy,
            reference=model.reference,
            loss_at=model.loss_at,
            head=model.head,
            sampler=sampler,
            shard=shard,
            receiver=receiver,
            publisher=publisher,
            prober=Prober(probe, model.head, groups, config.trainer.sequence_parallel),
            chief=chief,
            recorder=_open_recorder(config, groups, state, stack),
            writer=CheckpointWriter(config.run.folder / "checkpoints", groups, config.trainer.keep_checkpoints),
            history=state.history,
            step=state.step,
        )
        code = loop.run()
        if loop.complete:
            export_policy(config, model.policy.chunks, groups, config.run.folder / "hf")
            if groups.rank == 0:
                remove_held(weights)
        if chief is not None:
            write_result(config.run.folder, chief.result(loop.version.step))
    return code


def _build_shard(config: Config, groups: Groups, vocab_size: int) -> StoredShard | None:
    """On DP leaders: this replica's share of the buffer."""
    if not groups.is_leader:
        return None
    buffer, me, n_shards = config.buffer, groups.dp_rank, groups.dp_size
    files = buffer.segments if isinstance(buffer.segments, SegmentsConfig) else None
    return StoredShard(
        ReplayShard(
            max(1, buffer.capacity_rollouts // n_shards),
            buffer.per_prompt_rollouts,
            capacity_bytes=max(1, buffer.capacity_bytes // n_shards),
            drop_truncated=config.objective.truncated == "drop",
            needs_behaviour=config.objective.needs_behaviour,
            needs_reference=config.objective.needs_reference,
            vocab_size=vocab_size,
            max_reuse=buffer.max_reuse,
        ),
        replay=config.run.folder / REPLAY if files else None,
        segment_bytes=files.segment_bytes if files else 0,
        index=me,
        n_shards=n_shards,
        owns=lambda prompt_id: owner_of(prompt_id, n_shards) == me,
    )


def _secret(config: Config, groups: Groups) -> str:
    """Of this run: from the file that searchers read too, or a new one for each attempt. Checks who can be reached."""
    hosts = dict.fromkeys(gather_on_all(socket.gethostname(), groups))
    secret: str | None = None
    with AllOrNone("", groups.world):
        if config.transport.sockets == "ipc" and len(hosts) > 1:
            raise TransportError(
                f"transport.sockets: ipc reaches one host only, but the trainer runs on {', '.join(hosts)}; set it to "
                f"tcp and transport.host to the address of {next(iter(hosts))}"
            )
        if groups.rank == 0:
            remove_sockets(config.run.folder)  # of an attempt that was killed
            where = config.transport.rendezvous
            secret = read_secret(where.key_file) if isinstance(where, AddressRendezvous) else new_secret()
    return from_rank_0(secret, groups)


def _open_receiver(
    config: Config, groups: Groups, secret: str, shard: StoredShard, stack: ExitStack
) -> RolloutReceiver:
    files = config.buffer.segments
    receiver = RolloutReceiver(
        listen_at(config.transport, config.run.folder, secret),
        secret,
        name=f"shard-{groups.dp_rank}",
        most_bytes=config.most_message_bytes,
        log=shard.log,
        delivered=shard.delivered,
        window_bytes=config.transport.window_bytes,
        fsync_every_s=files.fsync_every_s if isinstance(files, SegmentsConfig) else 0.0,
    )
    stack.callback(shard.close)
    stack.callback(receiver.close)  # its thread writes to the log
    return receiver


def _open_recorder(config: Config, groups: Groups, state: RunState, stack: ExitStack) -> Recorder | None:
    """On DP leaders of a run that records."""
    data = config.trainer.data
    if not groups.is_leader or not isinstance(data, SearcherData) or not data.record:
        return None
    recorder = Recorder(config.run.folder / RECORDING, groups.dp_rank, groups.dp_size, state.step + 1)
    stack.callback(recorder.close)
    return recorder


def _wire_dtype(config: Config) -> str:
    """What the searchers' engines compute in."""
    engine = config.search.engine
    return engine.dtype if isinstance(engine, VllmEngineConfig) else config.trainer.dtype


def _open_desk(
    config: Config, groups: Groups, control: ControlServer, files: VersionFiles, probe: tuple[int, ...]
) -> PublishDesk:
    coordinator = Coordinator(
        config=config.weights,
        control=control,
        n_stages=groups.pp_size,
        backend=groups.backend,
        probe=probe,
        files=files,
    )
    return PublishDesk(
        config=config.weights,
        host=config.transport.host,
        replicas=groups.dp_size,
        control=control,
        coordinator=coordinator,
    )


def _announce(config: Config, control: ControlServer, token: str, state: RunState, weights: Path) -> None:
    """Let searchers find this attempt."""
    write_rendezvous(
        config.run.folder,
        Rendezvous(
            address=control.address,
            host=socket.gethostname(),
            token=token,
            attempt=state.history.attempt,
            weights=str(weights.resolve()),
        ),
    )


def _restore(config: Config, policy: Policy, shard: StoredShard | None, groups: Groups) -> RunState:
    """The newest checkpoint's state as a new attempt, or a new run's; the same on every rank."""
    folder = config.run.folder
    logs = from_rank_0(generations(folder / REPLAY) if groups.rank == 0 else None, groups)
    state, path = checkpoint.load_newest(folder / "checkpoints", policy, shard, groups, logs)
    attempts: tuple[int, ...] | None = None
    with AllOrNone("", groups.world):
        if groups.rank == 0:
            attempts = begin_attempt(folder, state.step, state.base_steps)
    attempts = from_rank_0(attempts, groups)
    if path is not None and groups.rank == 0:
        _log.info("attempt %d resumes at step %d from %s", len(attempts) - 1, state.step, path)
    return checkpoint.as_attempt(state, attempts)


def _open_control(
    config: Config,
    groups: Groups,
    addresses: list[str],
    token: str,
    state: RunState,
) -> ControlServer | None:
    if groups.rank != 0:
        return None
    attempt = state.history.attempt
    return ControlServer(
        listen_at(config.transport, config.run.folder, token),
        token,
        FleetSettings(
            lease_s=config.transport.lease_s,
            silent_s=config.transport.silent_s,
            max_ahead_groups=config.max_ahead_groups,
            shards=tuple(addresses[rank] for rank in groups.leader_ranks),
            epochs=config.search.epochs,
        ),
        port=config.transport.control_port,
        newest=PolicyVersion(attempt, state.step),
        leases=PromptLeases(state.next_position, list(state.unfinished_prompts), attempt=attempt),
    )
