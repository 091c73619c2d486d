"""Rank 0's part in bringing a version to searchers: offers, the go, deadlines, and who was late.

A thread for each data-parallel replica that serves a cohort; it waits and names culprits, and sends no weights itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.errors import WeightTransferError
from tba_megatron.models.hf_writer import begin_folder
from tba_megatron.trainer.sender import NotFitError, decode_part
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.manifest import Manifest, encode_manifest, merge_manifests
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.round import Round, connect
from tba_megatron.transport.weight_files import (
    finish_version,
    partial_of,
    remove_old,
    version_folder,
    write_marker,
)
from tba_megatron.types import CohortPlan, PolicyVersion, PublishPlan

_log = logging.getLogger(__name__)

_POLL_S = 0.001
_KEPT_VERSIONS = 3  # as files: who starts may still read the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """How one cohort's round ended; ``error`` is empty when everything has left."""

    epoch: int
    version: PolicyVersion
    error: str
    seconds: float
    not_fit: bool = False  # the version itself is bad
    culprits: tuple[str, ...] = ()  # searchers because of whom it was called off


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionFiles:
    """Where versions are written as files, and what lies beside the weights in each folder."""

    weights: Path
    template: Path
    dtype: str


class _NotReadyError(WeightTransferError):
    """Some searchers were not ready, or not in the group."""

    def __init__(self, message: str, culprits: tuple[str, ...]) -> None:
        super().__init__(message)
        self.culprits = culprits


class Coordinator:
    """``begin`` returns at once; ``take_deliveries`` says how each cohort's round ended."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        control: ControlServer,
        n_stages: int,
        backend: str,
        probe: tuple[int, ...],
        files: VersionFiles,
    ) -> None:
        self._config, self._control, self._files = config, control, files
        self._n_stages, self._backend, self._probe = n_stages, backend, probe
        self._threads: list[threading.Thread] = []
        self._deliveries: deque[Delivery] = deque()
        self._faults: deque[BaseException] = deque()
        self._stores: dict[int, TCPStore] = {}  # by replica; kept: a dial can wait some seconds for a name server
        self._said: deque[tuple[int, CohortPlan]] = deque()  # rounds of which the store still holds what was said

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def begin(self, plan: PublishPlan, version: PolicyVersion) -> None:
        self.wait()
        self._threads = []
        said, self._said = self._said, deque()
        for replica in sorted({cohort.replica for cohort in plan.cohorts}):
            cohorts = [cohort for cohort in plan.cohorts if cohort.replica == replica]
            thread = threading.Thread(
                target=self._run, args=(plan, version, cohorts, said), name=f"publish-{replica}", daemon=True
            )
            said = deque()
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Until all threads are done. RuntimeError when one has failed by a fault of its own."""
        for thread in self._threads:
            thread.join()
        if self._faults:
            raise RuntimeError("the thread that publishes weights has failed") from self._faults[0]

    def take_deliveries(self) -> list[Delivery]:
        done = []
        while self._deliveries:
            done.append(self._deliveries.popleft())
        return done

    # ---- the thread of a replica

    def _run(
        self,
        plan: PublishPlan,
        version: PolicyVersion,
        cohorts: Sequence[CohortPlan],
        said: Sequence[tuple[int, CohortPlan]],
    ) -> None:
        replica = cohorts[0].replica
        try:
            store = self._stores[replica] = self._stores.get(replica) or connect(
                plan.host, plan.port, self._config.timeout_s
            )
            # Whoever was in an earlier round is done, or this one would not have been planned.
            for number, cohort in said:
                self._round(store, number, cohort).forget(cohort.replica, self._n_stages, self._ranks(cohort))
            self._bring(store, plan, version, cohorts)
        except WeightTransferError as error:
            self._stores.pop(replica, None)
            for cohort in cohorts:
                self._deliveries.append(Delivery(epoch=cohort.epoch, version=version, error=str(error), seconds=0.0))
        except BaseException as error:
            self._faults.append(error)  # the main thread raises it: a fault here must not end in silence
            raise

    def _round(self, store: TCPStore, number: int, cohort: CohortPlan) -> Round:
        return Round(store, number, cohort.epoch, self._config.timeout_s)

    def _bring(self, store: TCPStore, plan: PublishPlan, version: PolicyVersion, cohorts: Sequence[CohortPlan]) -> None:
        """Offer to all cohorts, and serve each as soon as its searchers are ready: none waits for another's."""
        started_s = time.monotonic()
        rounds = {cohort.epoch: self._round(store, plan.round, cohort) for cohort in cohorts}
        waiting = {cohort.epoch: cohort for cohort in cohorts}
        self._said.extend((plan.round, cohort) for cohort in cohorts)

        def end(cohort: CohortPlan, error: WeightTransferError | None) -> None:
            del waiting[cohort.epoch]
            if error is not None:
                rounds[cohort.epoch].call_off()
                self._control.set_epoch(cohort.searchers, -1)
                _log.warning("version %s was not published: %s", version, error)
            self._deliveries.append(
                Delivery(
                    epoch=cohort.epoch,
                    version=version,
                    error=str(error or ""),
                    not_fit=isinstance(error, NotFitError),
                    culprits=error.culprits if isinstance(error, _NotReadyError) else (),
                    seconds=time.monotonic() - started_s,
                )
            )

        try:
            manifest = self._manifest(rounds[cohorts[0].epoch], cohorts[0].replica, version)
            if self._config.transport == "files":
                for cohort in cohorts:  # the first writes the files, and the others read the same
                    self._deliver_files(rounds[cohort.epoch], plan, cohort, manifest, version)
                    end(cohort, None)
                return
            self._control.published(version)
            for cohort in cohorts:
                self._control.set_epoch(cohort.searchers, cohort.epoch)
                self._offer(plan, cohort, manifest)
        except WeightTransferError as error:
            for cohort in list(waiting.values()):
                end(cohort, error)
            return
        deadline_s = time.monotonic() + self._config.timeout_s
        while waiting:
            for cohort in list(waiting.values()):
                try:
                    if self._is_ready(rounds[cohort.epoch], cohort, late=time.monotonic() > deadline_s):
                        self._serve(rounds[cohort.epoch], cohort, manifest)
                        end(cohort, None)
                except WeightTransferError as error:
                    end(cohort, error)
            time.sleep(_POLL_S)

    def _manifest(self, round_: Round, replica: int, version: PolicyVersion) -> Manifest:
        """What all stages are going to send."""
        stages = range(self._n_stages)
        self._until(lambda: all(round_.part(replica, s) is not None for s in stages), self._config.timeout_s)
        parts = [round_.part(replica, stage) for stage in stages]
        late = [stage for stage in stages if parts[stage] is None]
        if late:
            raise WeightTransferError(
                f"stages {late} did not check version {version} within {self._config.timeout_s:g} s"
            )
        return merge_manifests([decode_part(part) for part in parts if part is not None])

    def _is_ready(self, round_: Round, cohort: CohortPlan, *, late: bool) -> bool:
        """Whether all of ``cohort`` can take what they were offered; ``late``: they have had their time."""
        pending = [
            searcher for searcher, ranks in self._ranks_of(cohort) if not all(round_.is_ready(rank) for rank in ranks)
        ]
        culprits = [searcher for searcher in cohort.searchers if self._trouble(searcher)] or (pending if late else [])
        if culprits:
            raise _NotReadyError(f"not ready to receive: {self._named(culprits)}", tuple(culprits))
        return not pending

    def _serve(self, round_: Round, cohort: CohortPlan, manifest: Manifest) -> None:
        round_.open()
        self._wait_for_posts(round_, cohort)
        round_.give_go()
        deadline_s = self._config.timeout_s * (1 + len(manifest.buckets))  # one each, as the senders have
        errors = self._outcomes(round_, deadline_s)
        if errors:
            raise WeightTransferError(f"{'; '.join(errors)}{self._behind(round_, cohort, manifest)}")

    def _deliver_files(
        self, round_: Round, plan: PublishPlan, cohort: CohortPlan, manifest: Manifest, version: PolicyVersion
    ) -> None:
        files = self._files
        folder = version_folder(files.weights, version)
        # Who could not read it would not the second time either.
        if folder.exists() and not any(self._trouble(searcher) for searcher in cohort.searchers):
            round_.call_off()
        else:
            self._write_version(round_, manifest, version)
        write_marker(files.weights, version)
        self._control.published(version)
        self._control.set_epoch(cohort.searchers, cohort.epoch)
        for searcher in cohort.searchers:
            self._control.send(
                searcher,
                Offer(
                    version=manifest.version,
                    manifest=encode_manifest(manifest),
                    round=plan.round,
                    probe=self._probe,
                    folder=str(folder.resolve()),
                ),
            )

    def _write_version(self, round_: Round, manifest: Manifest, version: PolicyVersion) -> None:
        """All stages write their files; the folder appears whole."""
        files = self._files
        folder, partial = version_folder(files.weights, version), partial_of(files.weights, version)
        try:
            begin_folder(partial, files.template, files.dtype)
            round_.open()
            errors = self._outcomes(round_, self._config.timeout_s * (1 + len(manifest.buckets)))
            if errors:
                raise WeightTransferError("; ".join(errors))
            finish_version(partial, folder, manifest, self._n_stages)
        except OSError as error:
            raise WeightTransferError(f"{partial} cannot be written to: {error}") from None
        finally:
            remove_old(files.weights, _KEPT_VERSIONS)  # and what is not whole, which may hold the space that is lacking

    def _offer(self, plan: PublishPlan, cohort: CohortPlan, manifest: Manifest) -> None:
        encoded, rank = encode_manifest(manifest), self._n_stages
        for searcher, workers in zip(cohort.searchers, cohort.workers, strict=True):
            self._control.send(
                searcher,
                Offer(
                    version=manifest.version,
                    manifest=encoded,
                    round=plan.round,
                    probe=self._probe,
                    epoch=cohort.epoch,
                    host=plan.host,
                    port=plan.port,
                    rank=rank,
                    world_size=self._n_stages + sum(cohort.workers),
                    backend=self._backend,
                ),
            )
            rank += workers

    def _wait_for_posts(self, round_: Round, cohort: CohortPlan) -> None:
        """A broadcast is enqueued only after every receiver has said that it posted."""
        waiting = {rank: searcher for searcher, ranks in self._ranks_of(cohort) for rank in ranks}

        def settled() -> bool:
            for rank in [rank for rank in waiting if round_.has_posted(rank)]:
                del waiting[rank]
            failed = any(self._trouble(searcher) for searcher in cohort.searchers)
            return not waiting or failed or any(round_.outcome(stage) for stage in range(self._n_stages))

        self._until(settled, self._config.timeout_s)
        if waiting:
            errors = [text for stage in range(self._n_stages) if (text := round_.outcome(stage))]
            late = list(dict.fromkeys(waiting.values()))
            # Who waits in the group for a member that is gone cannot post either: then that one alone is named.
            culprits = [searcher for searcher in late if self._trouble(searcher)] or late
            text = f"not in the group: {self._named(culprits)}"
            raise _NotReadyError("; ".join([text, *errors]), tuple(culprits))

    def _outcomes(self, round_: Round, timeout_s: float) -> list[str]:
        """What went wrong with each stage; empty when everything has left."""
        stages = range(self._n_stages)
        self._until(lambda: all(round_.outcome(stage) is not None for stage in stages), timeout_s)
        outcomes = [round_.outcome(stage) for stage in stages]
        silent = [f"stage {stage} was silent for {timeout_s:g} s" for stage in stages if outcomes[stage] is None]
        return list(dict.fromkeys(text for text in outcomes if text)) + silent

    def _behind(self, round_: Round, cohort: CohortPlan, manifest: Manifest) -> str:
        """Which receivers had not all buckets, the furthest behind first."""
        reached = [
            (min(round_.reached(rank) for rank in ranks), searcher) for searcher, ranks in self._ranks_of(cohort)
        ]
        behind = [
            f"{self._describe(searcher)} has {n} of {len(manifest.buckets)} buckets"
            for n, searcher in sorted(reached)
            if n < len(manifest.buckets)
        ]
        return f"; {', '.join(behind)}" if behind else ""

    # ---- who

    def _ranks_of(self, cohort: CohortPlan) -> list[tuple[str, range]]:
        """(searcher, the ranks of its workers in the group)."""
        found, rank = [], self._n_stages
        for searcher, workers in zip(cohort.searchers, cohort.workers, strict=True):
            found.append((searcher, range(rank, rank + workers)))
            rank += workers
        return found

    def _ranks(self, cohort: CohortPlan) -> range:
        return range(self._n_stages, self._n_stages + sum(cohort.workers))

    def _trouble(self, searcher: str) -> str:
        member = self._control.member(searcher)
        if member is None:
            return "unknown"
        return str(member.gone or member.failure or "")

    def _named(self, searchers: Sequence[str]) -> str:
        return ", ".join(self._describe(searcher) for searcher in searchers)

    def _describe(self, searcher: str) -> str:
        member = self._control.member(searcher)
        heard = f"last heard {time.monotonic() - member.heard_s:.1f} s ago" if member is not None else ""
        return f"searcher {searcher} ({', '.join(word for word in (self._trouble(searcher), heard) if word)})"

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
