"""A role of ``tba`` with faults built in: ``python chaos_role.py COMMAND FILE [section.key=value ...]``.

What happens is said by ``TBA_CHAOS``, a JSON object (``Chaos``). Nothing of the program is replaced: calls of it are
counted on their way, and at the chosen one the process kills itself as SIGKILL from outside would, so that the moment
is hit every time and is written down just before.

``launch`` starts its roles through a script that leads back here, so they obey the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

VARIABLE = "TBA_CHAOS"
MODULE = ("-m", "tba_megatron.cli.main")  # how a launcher starts a role of its installation
CRAWL_S = 0.5  # a step, once the trainer has come to where it is to be held up


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """``die``: which moment of a searcher is its last, at its ``after``-th time; it is written to ``mark``.

    A trainer beyond step ``hold_step`` crawls while the file ``hold`` exists, so that it does not come to its end
    before what a test does to it has happened. A launcher starts its roles with the program ``shim``.
    """

    die: str = ""  # generate, receive, send
    engine: str = "fake"
    after: int = 1
    mark: str = ""
    hold: str = ""
    hold_step: int = 0
    shim: str = ""


def main() -> int:
    words = sys.argv[1:]
    if tuple(words[:2]) == MODULE:
        words = words[2:]
    chaos = msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Chaos)
    if words[0] == "launch" and chaos.shim:
        sys.executable = chaos.shim
    if words[0] == "train" and chaos.hold:
        _crawl(chaos)
    if words[0] == "search" and chaos.die:
        from tba_megatron.dist import prepare_searcher_environment

        prepare_searcher_environment(1)  # the moments are in modules that import torch and vLLM
        {"generate": _die_generating, "receive": _die_receiving, "send": _die_sending}[chaos.die](chaos)
    from tba_megatron.cli.main import main as tba

    return tba(words)


def _crawl(chaos: Chaos) -> None:
    import megatron_patches

    megatron_patches.apply()  # before anything imports megatron, as the role would itself
    from tba_megatron.trainer.chief import Chief
    from tba_megatron.types import Action

    decide = Chief.decide

    def slowly(self: Chief, *args: Any, **kwargs: Any) -> Any:
        plan = decide(self, *args, **kwargs)
        if plan.action is Action.TRAIN and plan.step > chaos.hold_step and os.path.exists(chaos.hold):
            time.sleep(CRAWL_S)  # heartbeats and rollouts have threads of their own
        return plan

    Chief.decide = slowly


def _die(chaos: Chaos, **evidence: object) -> NoReturn:
    partial = Path(f"{chaos.mark}.partial")
    partial.write_text(json.dumps({"die": chaos.die, **evidence}))
    partial.rename(chaos.mark)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


def _countdown(chaos: Chaos) -> Callable[[], bool]:
    """True at the ``after``-th call."""
    calls = 0

    def reached() -> bool:
        nonlocal calls
        calls += 1
        return calls >= chaos.after

    return reached


def _die_generating(chaos: Chaos) -> None:
    """In a step of the engine: what it finished is in no message, and more is half written or waits."""
    if chaos.engine == "fake":
        from tba_megatron.search.fake_engine import FakeEngine as Engine
    else:
        from tba_megatron.search.vllm_engine import VllmEngine as Engine

    step, reached = Engine.step, _countdown(chaos)

    def dying(self: Any) -> Any:
        finished = step(self)
        if self.n_unfinished and reached():
            _die(chaos, open_prompts=len(finished) + self.n_unfinished, version=str(self.version))
        return finished

    Engine.step = dying


def _die_receiving(chaos: Chaos) -> None:
    """When the first bucket of a version has come and others have not."""
    from tba_megatron.search import receiver

    receive, reached = receiver.receive_version, _countdown(chaos)

    def dying(group: Any, manifest: Any, staging: Any, progress: Callable[[int], None]) -> None:
        last = reached()

        def seen(bucket: int) -> None:
            progress(bucket)
            if last and bucket == 0 and len(manifest.buckets) > 1:
                _die(chaos, buckets=1, of=len(manifest.buckets), version=manifest.version)

        receive(group, manifest, staging, seen)

    receiver.receive_version = dying


def _die_sending(chaos: Chaos) -> None:
    """When a message with rollouts was handed to its socket: nobody has acknowledged it, and it may not have left."""
    import zmq

    send, reached = zmq.Socket.send_multipart, _countdown(chaos)

    def dying(self: Any, msg_parts: Any, *args: Any, **kwargs: Any) -> Any:
        sent = send(self, msg_parts, *args, **kwargs)
        # [token, head, payload] is how rollouts travel; no message of the control channel has a third part.
        if len(msg_parts) == 3 and self.type == zmq.DEALER and reached():
            _die(chaos, payload_bytes=len(msg_parts[2]))
        return sent

    zmq.Socket.send_multipart = dying


if __name__ == "__main__":
    sys.exit(main())
