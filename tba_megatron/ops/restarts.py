"""How often a role that failed may be started again, and after which pause."""

from __future__ import annotations

from collections import deque

HASTY_S = 10.0  # who fails sooner after its start waits before the next, and each time longer
FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 8.0


class Restarts:
    """Each role may be started again ``most`` times within ``window_s``. Uses no clock: times come from outside."""

    def __init__(self, most: int, window_s: float) -> None:
        self.most, self.window_s = most, window_s
        self._failures_s: dict[str, deque[float]] = {}  # within the window, by role
        self._hasty: dict[str, int] = {}  # failures in a row that came soon after a start, by role

    def failed(self, name: str, now_s: float, lived_s: float) -> float | None:
        """Seconds to wait before ``name``, which lived for ``lived_s``, is started again; None: it has failed once
        too often."""
        failures_s = self._failures_s.setdefault(name, deque())
        failures_s.append(now_s)
        while failures_s[0] < now_s - self.window_s:
            failures_s.popleft()
        if len(failures_s) > self.most:
            return None
        hasty = self._hasty[name] = self._hasty.get(name, 0) + 1 if lived_s < HASTY_S else 0
        # The first comes at once: it may well be the only one.
        return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(hasty - 2, 32)) if hasty > 1 else 0.0

    def failures(self, name: str) -> int:
        """Within the window that ended with the last failure."""
        return len(self._failures_s.get(name, ()))
