"""Half an hour of a whole run with real engines and searchers that come and go: no process may grow.

``make test-soak``, which gives a test more time than the others have; ``TBA_SOAK_MINUTES`` is another length. What was
measured is printed, and kept in ``soak.json`` of the test's folder.
"""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from chaos import ChaosRun, Role, chaos_run, start_model
from launching import ledger_gap

pytestmark = pytest.mark.soak

MINUTES = float(os.environ.get("TBA_SOAK_MINUTES", "30"))
SAMPLE_S = 5.0
WARM_UP_S = min(600.0, 60.0 * MINUTES / 2)  # of the run
LEAST_MINUTES = 10.0  # in a shorter run caches still fill; it shows what it measures and judges nothing
SETTLED_S = 30.0  # of a process: buffers, caches and imports that come with its first work
LEAST_SAMPLES = 12  # for a slope; who stays for a shorter time is only shown
VISIT_S = min(240.0, 60.0 * MINUTES / 5)  # of a searcher that goes again
MOST_MB_PER_100_STEPS = 1.0

SETTINGS = (
    "search.engine={kind: vllm, kv_cache_bytes: 67108864, max_sequences: 128}",
    "sft.steps=0",
    "evaluation.problems=64",
    "buffer.capacity_rollouts=4000",  # full before the measurement begins: what it holds is no leak
    "trainer.save_every_steps=200",
    "transport.heartbeat_s=0.5",
    "transport.lease_s=5",
    "weights.timeout_s=10",
)


@dataclass
class Memory:
    """Of one process: (seconds since the beginning, step, MB of its own: see ``_own_mb``)."""

    name: str
    samples: list[tuple[float, int, float]] = field(default_factory=list)

    def measured(self) -> list[tuple[float, int, float]]:
        """Those after both warm-ups."""
        begin_s = max(WARM_UP_S, self.samples[0][0] + SETTLED_S)
        return [sample for sample in self.samples if sample[0] >= begin_s]

    def slope(self) -> tuple[float, float] | None:
        """MB in 100 steps and its standard error; None where there is too little to say."""
        measured = self.measured()
        if len(measured) < LEAST_SAMPLES or measured[0][1] == measured[-1][1]:
            return None
        _, steps, megabytes = np.array(measured).T
        (slope, _), covariance = np.polyfit(steps, megabytes, 1, cov=True)
        return 100.0 * float(slope), 100.0 * float(covariance[0, 0] ** 0.5)

    def row(self) -> dict[str, object]:
        megabytes = [sample[2] for sample in self.samples]
        return {
            "name": self.name,
            "samples": len(self.measured()),
            "first_mb": round(megabytes[0], 1),
            "last_mb": round(megabytes[-1], 1),
            "most_mb": round(max(megabytes), 1),
            "mb_per_100_steps": None if (found := self.slope()) is None else f"{found[0]:.3f} +- {found[1]:.3f}",
        }


class Soak:
    """Samples the memory of all processes of a run, and lets searchers come and go meanwhile."""

    def __init__(self, run: ChaosRun, stays: tuple[Role, ...]) -> None:
        self._run, self._stays = run, stays
        self._began_s = time.monotonic()
        self._guest: Role | None = None
        self._joined_s: float | None = None  # the guest
        self.visits = 0
        self.memory: dict[int, Memory] = {}

    def go_on(self, seconds: float) -> None:
        while (now_s := time.monotonic()) - self._began_s < seconds:
            self._host(now_s)
            self._sample(now_s - self._began_s)
            next_s = now_s + SAMPLE_S
            self._run.until(lambda next_s=next_s: time.monotonic() >= next_s, "time passes", *self._stays)
        if self._guest is not None:
            self._run.until_joined(self._guest, *self._stays)  # one that still starts could not leave well

    def _host(self, now_s: float) -> None:
        """A guest that was here for long enough goes, each second one without a word, and another comes."""
        if self._guest is not None:
            if self._joined_s is None and self._run.has_joined(self._guest):
                self._joined_s = now_s
            if self._joined_s is None or now_s - self._joined_s < VISIT_S:
                return
            self._guest.send_signal(signal.SIGKILL if self.visits % 2 else signal.SIGTERM)
            assert self._guest.wait() == (-signal.SIGKILL if self.visits % 2 else 0), self._run.told()
        self._guest = self._run.search()
        self.visits += 1
        self._joined_s = None

    def _sample(self, at_s: float) -> None:
        names = {role.pid: role.name for role in self._run.roles}
        for pid in self._run.processes():
            megabytes = _own_mb(pid)
            if megabytes is not None:
                memory = self.memory.setdefault(pid, Memory(names.get(pid, f"child {pid}")))
                memory.samples.append((at_s, self._run.step, megabytes))


def _own_mb(pid: int) -> float | None:
    """Resident memory that no file backs; None when the process has ended.

    The proportional share (PSS) would jump whenever another searcher comes or goes, with whom the pages of libraries
    are shared, and fall by half while a fork writes a checkpoint.
    """
    try:
        words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return None
    if "RssAnon" not in words:
        return None  # a zombie
    return sum(int(words[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 / 1e6


def test_no_process_grows_while_searchers_come_and_go(tmp_path, capsys):
    start = start_model(tmp_path)
    with chaos_run(tmp_path / "run", *SETTINGS, *start, n_steps=10_000_000) as run:
        trainer, searcher = run.train(), run.search()
        run.until_searchers(1, trainer, searcher)
        soak = Soak(run, (trainer, searcher))
        soak.go_on(60.0 * MINUTES)
        n_steps = run.step
        # Searchers would wait for the next trainer, so they are dismissed first.
        for role in run.roles[::-1]:
            if role.alive:
                role.send_signal(signal.SIGTERM)
                assert role.wait() == 0, run.told()
        result = json.loads((run.folder / "result.json").read_text())
        run.check_nothing_left()

    rows = [memory.row() for memory in soak.memory.values()]
    report = {"minutes": MINUTES, "steps": n_steps, "visits": soak.visits, "processes": rows}
    report["samples"] = {memory.name: memory.samples for memory in soak.memory.values()}
    (tmp_path / "soak.json").write_text(json.dumps(report))
    with capsys.disabled():
        print(f"\n{n_steps} steps in {MINUTES:g} minutes, {soak.visits} visits; {tmp_path / 'soak.json'}")
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    assert (ledger_gap(result), result["rollouts_in_flight"]) == (0, 0), result
    slopes = {memory.name: slope for memory in soak.memory.values() if (slope := memory.slope()) is not None}
    assert {trainer.name, searcher.name} <= slopes.keys(), "too few samples"
    if MINUTES < LEAST_MINUTES:
        pytest.skip(f"{MINUTES:g} minutes are too short to judge: caches still fill")
    # Guests leave before their engines have touched all of their memory.
    too_steep = {role.name: slopes[role.name] for role in (trainer, searcher)}
    too_steep = {name: slope for name, slope in too_steep.items() if slope[0] >= MOST_MB_PER_100_STEPS}
    assert not too_steep, too_steep
