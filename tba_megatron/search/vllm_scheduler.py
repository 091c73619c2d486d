"""vLLM's scheduler, with what a searcher asks of it beside: one request that goes first, and what an update costs.

It runs in the searcher's process at every tensor-parallel size. Written for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class SearchScheduler(Scheduler):
    """``n_recomputed`` of the ``n_scheduled`` tokens of the newest step had been computed before an update."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.n_scheduled = self.n_recomputed = 0
        self._thrown_away: dict[str, int] = {}  # by request: its first so many tokens were computed once already

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self.n_scheduled = output.total_num_scheduled_tokens
        self.n_recomputed = self._again(output.num_scheduled_tokens) if self._thrown_away else 0
        return output

    def _again(self, scheduled: dict[str, int]) -> int:
        """Tokens of this step that were thrown away by an update, prefixes that siblings share counted once."""
        again = 0
        for request_id in [name for name in self._thrown_away if name in scheduled or name not in self.requests]:
            request = self.requests.get(request_id)
            if request is None:  # aborted
                del self._thrown_away[request_id]
                continue
            end = request.num_computed_tokens  # after this step
            until = self._thrown_away[request_id]
            again += max(0, min(end, until) - (end - scheduled[request_id]))
            if end >= until:
                del self._thrown_away[request_id]
        return again

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            for request in self.running:
                known = self._thrown_away.get(request.request_id, 0)
                self._thrown_away[request.request_id] = max(known, request.num_computed_tokens)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    @contextmanager
    def first(self, request_id: str) -> Iterator[None]:
        """Within the block ``request_id``, which waits, is next to run, and in a place that no other request may take.

        The engine has to have a place more than requests may be active (``max_num_seqs``, ``max_num_active_seqs``).
        """
        request = self.requests[request_id]
        self.waiting.remove_request(request)
        self.waiting.prepend_request(request)
        self.max_num_active_reqs += 1
        try:
            yield
        finally:
            self.max_num_active_reqs -= 1

    def salt_waiting(self, salt: str) -> None:
        """Whatever waits is computed without the cached keys and values of other salts, and cached under this one."""
        for request in [*self.waiting, *self.kv_holding_waiting]:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()
