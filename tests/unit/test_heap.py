import platform
import subprocess
import sys

import pytest

from tba_megatron.heap import FreedMemory

GLIBC = platform.libc_ver()[0] == "glibc"

# Blocks of 1 MB, a small one that stays behind each; then the large ones go. Prints the private memory in MB: in use,
# freed, and given back.
HOLES = """
from pathlib import Path
from tba_megatron.heap import FreedMemory, keep_freed_memory

def own_mb():
    words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(words["RssAnon"].split()[0]) // 1024

keep_freed_memory()
large, small = [], []
for _ in range(200):
    large.append(b"x" * (1 << 20))
    small.append(b"x" * 2000)
used = own_mb()
large.clear()
freed = own_mb()
assert FreedMemory(every_s=0.0).tend()
print(used, freed, own_mb())
"""


def printed_by(code: str) -> str:
    """Of a process of its own: it changes the allocator."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_glibc_can_be_told_to_keep_freed_memory():
    code = "from tba_megatron.heap import keep_freed_memory; print(keep_freed_memory())"
    assert printed_by(code) == f"{GLIBC}\n"


@pytest.mark.skipif(not GLIBC, reason="only glibc can be told to keep and to give back")
def test_freed_memory_stays_and_then_goes_back_though_what_is_in_use_lies_between():
    used, freed, given_back = map(int, printed_by(HOLES).split())
    assert freed > used - 20
    assert given_back < used - 180


def test_it_is_given_back_once_in_a_while():
    times_s = [0.0]
    memory = FreedMemory(every_s=60.0, clock=lambda: times_s[-1])
    calls: list[int] = []
    memory._trim = lambda pad: calls.append(pad) or 1
    for now_s in (0.0, 59.0, 60.0, 61.0, 119.0, 121.0):
        times_s.append(now_s)
        memory.tend()
    assert calls == [0, 0]
