"""Are log-probs without logits exact, small and fast, beside the other ways to have them?

``python -m benchmarks.kernels --device cpu|cuda``. Progress goes to stderr, one JSON object to stdout, whole or as far
as it came. Exit code 1 when something that is claimed does not hold. With cuda, torch and triton are all it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import kernels_cpu, kernels_gpu


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--quick", action="store_true", help="small shapes and few repetitions; its figures say little")
    parser.add_argument(
        "--seconds", type=float, default=280.0, help="cuda: start nothing after this long (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    report: dict[str, Any] = {}
    started = time.perf_counter()
    try:
        if options.device == "cpu":
            # Of the processes that measure: a thread that waits sleeps, or its waiting would count as CPU seconds.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            kernels_cpu.measure(kernels_cpu.QUICK if options.quick else kernels_cpu.FULL, report)
        else:
            bench = kernels_gpu.on_cuda(quick=options.quick, deadline_s=started + options.seconds)
            kernels_gpu.measure(bench, report)
    finally:
        # A machine with a GPU may be had once: what was measured before a fault is worth printing.
        report["wall_s"] = round(time.perf_counter() - started, 1)
        print(json.dumps(report, indent=1), flush=True)
    return 0 if report.get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
