"""How much memory that a role has freed stays with it: for a while, and not for ever."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

# glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in bytes, and M_ARENA_MAX (malloc.h).
_OPTIONS = ((-1, 128 << 20), (-3, 16 << 20), (-8, 2))
GIVE_BACK_EVERY_S = 15.0  # it takes some hundredths of a second, and as much until what is needed again is back


def keep_freed_memory() -> bool:
    """Blocks of up to 16 MiB that are freed stay with this process; whether its C library can be told so (glibc).

    Messages of some MiB come and go for as long as a role lives. By default each is memory from the kernel, whose first
    use is a page fault for every 4 KiB: on a virtual machine that costs several times what copying the message does.
    What is kept lies in two arenas: each of the threads that come with a broadcast group would begin one of its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in _OPTIONS)


class FreedMemory:
    """What was freed in the meantime, given back to the kernel four times a minute (glibc's malloc_trim).

    Blocks that stay lie between those that come and go, and until 2.38 glibc seldom finds a hole that a freed tensor
    left for the next of its size (aligned blocks, glibc bug 14581). So the holes grow for as long as a role lives: by a
    megabyte for every hundred steps of a small model. What is in use stays where it is.
    """

    def __init__(self, every_s: float = GIVE_BACK_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._next_s = clock() + every_s
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def tend(self) -> bool:
        """Call it now and then from the main loop; whether any memory was given back."""
        if self._trim is None or self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + self._every_s
        return self._trim(0) == 1
