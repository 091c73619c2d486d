"""How fast do rollouts go into the replay shard and out of it, what memory and what time of a step do they cost?

``python -m benchmarks.buffer`` measures this project's buffer at several numbers of rollouts held, and beside it the
package transferqueue, plain pickle over ZeroMQ and bare frames of which nothing is stored, in turn and with the same
rollouts on two cores. Progress goes to stderr, one JSON object to stdout. Exit code 1 when a claim does not hold; one
about something that cannot be had here is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import buffer_held, buffer_peers
from benchmarks.buffer_peers import BARE, BATCHES, CACHE, TRANSFERQUEUE, interleaved, parts, say, use_cores
from benchmarks.buffer_wire import Sizes
from benchmarks.ranks import machine, prepare
from tba_megatron.heap import keep_freed_memory

HELD = (10_000, 100_000, 1_000_000)
IN_OFF, IN_ON, OUT = "in, segments off", "in, segments on", "out"
# name: (limit, whether the figure has to be at least or at most that)
LIMITS = {
    "in_of_bare_frames": (0.6, "at least"),
    "out_of_transferqueue": (20.0, "at least"),
    "in_full_of_empty": (0.7, "at least"),
    "in_full_of_empty_segments_off": (0.7, "at least"),
    "out_full_of_empty": (0.7, "at least"),
    "memory_of_raw_bytes": (1.3, "at most"),
    "step_under_intake": (1.05, "at most"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, nargs="+", default=HELD, help="rollouts in the shard (%(default)s)")
    parser.add_argument("--rollouts", type=int, default=100_000, help="that go in or out (%(default)s)")
    parser.add_argument("--tokens", type=int, default=Sizes().tokens, help="of a completion (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each kind (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES[1:], help="transferqueue's: rollouts a put")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of transferqueue's environment (%(default)s)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder for logs (%(default)s)")
    parser.add_argument("--huge", action="store_true", help="also ten million short rollouts: minutes, and 6 GB")
    parser.add_argument("--no-peers", action="store_true", help="this project's buffer and bare frames alone")
    options = parser.parse_args(arguments)
    keep_freed_memory()  # as the roles of a run do
    sizes = Sizes(rollouts=options.rollouts, tokens=options.tokens)
    started = time.perf_counter()
    memory = buffer_held.growth(max(options.held), sizes)
    say(f"memory: {memory}")
    others = parts(sizes, cache=options.cache, batches=options.batches)
    if options.no_peers:
        others = {BARE: others[BARE]}
    ours = {f"{held} held": lambda held=held: buffer_held.measure(held, sizes, options.disk) for held in options.held}
    report = interleaved({**others, **ours}, options.repeats)
    step = _step(options.steps, sizes, options.disk) if options.steps else {}
    huge = {"huge": buffer_held.huge(sizes)} if options.huge else {}
    figures = _figures(report, list(ours), memory, step)
    claims = {
        name: {"figure": figure, "limit": LIMITS[name][0], "has_to_be": LIMITS[name][1], "holds": _holds(name, figure)}
        for name, figure in figures.items()
    }
    whole = {
        "machine": machine(),
        "tokens": options.tokens,
        "claims": claims,
        "memory": memory,
        "step": step,
        **huge,
        "parts": report,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(whole, indent=1), flush=True)
    return 0 if all(claim["holds"] for claim in claims.values()) else 1


def _step(steps: int, sizes: Sizes, disk: Path) -> dict[str, Any]:
    from benchmarks.buffer_step import measure

    prepare()
    found = measure(steps, sizes, disk)
    say(f"step: {found}")
    return found


def _figures(
    report: Mapping[str, Any], ours: Sequence[str], memory: Mapping[str, float], step: Mapping[str, Any]
) -> dict[str, float]:
    """What the claims are about; rates of this buffer beside others are those of the fewest rollouts held."""
    few, many = report[ours[0]], report[ours[-1]]

    def rate(entry: Mapping[str, Any], direction: str) -> float:
        return entry[direction]["rollouts_s"]

    figures = {"in_of_bare_frames": rate(few, IN_ON) / rate(report[BARE], "in")}
    theirs = buffer_peers.best(report.get(TRANSFERQUEUE, {}), OUT)
    if theirs:
        figures["out_of_transferqueue"] = rate(few, OUT) / theirs
    if len(ours) > 1:
        figures |= {
            "in_full_of_empty": rate(many, IN_ON) / rate(few, IN_ON),
            "in_full_of_empty_segments_off": rate(many, IN_OFF) / rate(few, IN_OFF),
            "out_full_of_empty": rate(many, OUT) / rate(few, OUT),
        }
    if memory["rollouts"] > 0.9 * HELD[-1]:  # what every shard has once counts for little there
        figures["memory_of_raw_bytes"] = memory["ratio"]
    if step:
        figures["step_under_intake"] = step["ratio"]
    return {name: round(figure, 3) for name, figure in figures.items()}


def _holds(name: str, figure: float) -> bool:
    limit, side = LIMITS[name]
    return figure >= limit if side == "at least" else figure <= limit


if __name__ == "__main__":
    use_cores(2)
    sys.exit(main())
