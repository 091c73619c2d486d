"""What the reference costs a step: with its log-probs kept from before, computed now, and from host memory.

``python -m benchmarks.reference [--repetitions 15] [--layers 4] [--hidden 256]``

One rank, float32. In turn, on the same packed groups: a step without a reference (``rloo``), one of trajectory balance
whose rollouts have the reference's log-probs, one that has to compute them with the reference beside the policy, one
with the reference in host memory, and a forward pass alone. Medians of CPU seconds of the rank; JSON with the ratios.
Exit code 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranks import build_model, machine, prepare, run_ranks
from benchmarks.trainer import VOCAB, Options
from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutId, StopReason, TrainGroup

PROMPTS, COMPLETIONS = 8, 8  # of a step
SHORTEST, LONGEST = 20, 80  # tokens of a completion; a prompt has 16
MOST_CACHED = 1.1  # of a step without a reference
MOST_COMPUTED = 1.1  # of a forward pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference", description="What the reference costs a step."
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args(argv)
    options = Options(
        layers=args.layers, hidden=args.hidden, microbatch_tokens=2048, repetitions=args.repetitions, share=1.0
    )
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        (cpu_s,) = run_ranks(measure, options.trainer(), options, Path(folder))
    report = {"machine": machine(), "repetitions": args.repetitions, **ratios(cpu_s)}
    print(json.dumps(report, indent=2))
    return int(not all(report["claims"].values()))


def ratios(cpu_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """``cpu_s``: CPU seconds of each kind, measured in turn. A ratio compares what was measured in one turn."""

    def median(value: Callable[[Mapping[str, float]], float]) -> float:
        rounds = [dict(zip(cpu_s, row, strict=True)) for row in zip(*cpu_s.values(), strict=True)]
        return statistics.median(value(one) for one in rounds)

    cached = median(lambda one: one["cached"] / one["none"])
    computed = median(lambda one: (one["computed"] - one["cached"]) / one["forward"])
    host = median(lambda one: (one["host"] - one["cached"]) / one["forward"])
    return {
        "cpu_ms": {kind: round(1000 * statistics.median(values), 2) for kind, values in cpu_s.items()},
        "cached_over_none": round(cached, 3),
        "computing_over_forward": round(computed, 3),
        "computing_from_host_over_forward": round(host, 3),
        "claims": {
            f"a step with kept log-probs costs at most {MOST_CACHED} of one without a reference": cached <= MOST_CACHED,
            f"computing them costs at most {MOST_COMPUTED} of a forward pass": computed <= MOST_COMPUTED,
        },
    }


def measure(groups: Groups, trainer: TrainerConfig, options: Options, folder: Path) -> dict[str, list[float]]:
    """CPU seconds of each kind of step, in turn."""
    from tba_megatron.loss.guards import Guards
    from tba_megatron.loss.ratio import Rloo
    from tba_megatron.loss.regression import TbVarGrad
    from tba_megatron.packing import pack
    from tba_megatron.trainer.model import build_chunks, to_device
    from tba_megatron.trainer.reference import Reference
    from tba_megatron.trainer.reference_files import ReferenceFiles
    from tba_megatron.trainer.reference_weights import OnDevice, OnHost
    from tba_megatron.trainer.step import sequence_logprobs, update

    model = build_model(groups, trainer, options.hf_config)
    chunks = model.policy.chunks
    files = ReferenceFiles(
        folder=folder,
        template=folder,
        dtype=trainer.dtype,
        architecture=model.architecture,
        shape=model.shape,
        groups=groups,
    )
    twin = OnDevice(build_chunks(model.shape, trainer, groups))
    twin.take(chunks)
    beside = Reference(twin, chunks, files, model.head, groups)
    host = Reference(OnHost(chunks), chunks, files, model.head, groups)
    unknown = pack(groups_of(), trainer.microbatch_tokens, reference_version=0)
    known = beside.fill(unknown)[0]
    plain, balance = Rloo(0.0, Guards()), TbVarGrad(0.1, Guards())

    def step(packs: Sequence[Any], reference: Reference | None) -> None:
        loss = plain if reference is None else balance
        if reference is not None:
            packs = reference.read(packs, loss.needs.reference).packs
        batches = [to_device(each.microbatch, groups.device) for each in packs]
        update(model.policy, batches, loss, float(PROMPTS * COMPLETIONS), model.head, groups)

    def forward() -> None:
        batches = [to_device(each.microbatch, groups.device) for each in unknown]
        sequence_logprobs(chunks, batches, model.head, groups)

    kinds: dict[str, Callable[[], None]] = {
        "none": lambda: step(unknown, None),
        "cached": lambda: step(known, beside),
        "computed": lambda: step(unknown, beside),
        "host": lambda: step(unknown, host),
        "forward": forward,
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.repetitions + 1):
        for kind, run in kinds.items():
            started_s = time.process_time()
            run()
            if turn:  # the first warms up
                found[kind].append(time.process_time() - started_s)
    return found


def groups_of() -> list[TrainGroup]:
    """Made-up groups of a step."""
    rng = np.random.default_rng(0)
    return [
        TrainGroup(
            prompt_id=f"p{g}",
            prompt_token_ids=rng.integers(0, VOCAB, 16).astype(np.int32),
            rollouts=tuple(_rollout(g * COMPLETIONS + i, rng) for i in range(COMPLETIONS)),
            copies=(1,) * COMPLETIONS,
        )
        for g in range(PROMPTS)
    ]


def _rollout(sequence: int, rng: np.random.Generator) -> Rollout:
    tokens = rng.integers(0, VOCAB, rng.integers(SHORTEST, LONGEST + 1)).astype(np.int32)
    return Rollout(
        rollout_id=RolloutId("made-up", sequence),
        token_ids=tokens,
        reward=float(rng.random() < 0.5),
        stop_reason=StopReason.EOS,
        spans=(PolicySpan(version=PolicyVersion(0, 0), start=0, end=len(tokens)),),
        source="made-up",
    )


if __name__ == "__main__":
    sys.exit(main())
