"""Tokens a second and peak memory of the trainer in each layout, and its speed against transformers with torch's AdamW.

``python -m benchmarks.trainer`` prints one JSON object. Everything is float32 on CPU with one thread a rank, so ranks
beyond the cores share them: figures of layouts say something relative to each other, and nothing about GPUs. A step is
packing or padding, forward, supervised loss, backward, clipping and AdamW on the same sequences.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.ranks import build_model, machine, prepare, run_ranks
from tba_megatron.config_sections import OptimizerSection, TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.types import TokenIds

if TYPE_CHECKING:
    from tba_megatron.trainer.model import Policy

VOCAB = 4096
OPTIMIZER = OptimizerSection(learning_rate=1e-4, weight_decay=0.0, clip_grad_norm=1.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, recompute selective": {"recompute": "selective"},
    "one rank, recompute full": {"recompute": "full"},
    "TP 2": {"tensor_parallel": 2},
    "TP 2, SP": {"tensor_parallel": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_parallel": 2},
    "PP 2, VPP 2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP 2": {"data_parallel": 2},
    "TP 2, PP 2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "one rank, bfloat16": {"dtype": "bfloat16"},
    "DP 2, bfloat16": {"data_parallel": 2, "dtype": "bfloat16"},
}
OURS = "this trainer"
# Sequences of a step: (how many, shortest, longest), in tokens. A third of each is its prompt.
BATCHES = {"20 to 200 tokens": (64, 20, 200), "18 to 22 tokens": (256, 18, 22)}

Pairs = list[tuple[TokenIds, TokenIds]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    layers: int
    hidden: int
    microbatch_tokens: int
    repetitions: int
    share: float  # of the sequences of ``BATCHES``

    @property
    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }

    def trainer(self, **layout: Any) -> TrainerConfig:
        return TrainerConfig(optimizer=OPTIMIZER, microbatch_tokens=self.microbatch_tokens, **layout)

    def pairs(self, batch: str) -> Pairs:
        n, shortest, longest = BATCHES[batch]
        rng = np.random.default_rng(0)
        # An even number: replicas get equally many.
        lengths = rng.integers(shortest, longest + 1, max(4, 2 * round(n * self.share / 2)))
        rows = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
        return [(row[: len(row) // 3], row[len(row) // 3 :]) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer", description="Speed and memory of the trainer in each layout."
    )
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--microbatch-tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the sequences of a step; for a quick look")
    args = vars(parser.parse_args(argv))
    layouts, options = args.pop("layouts"), Options(**args)
    prepare()
    report = {
        "machine": machine(),
        "threads_a_rank": 1,
        "dtype": "float32",
        "model": {**options.hf_config, "parameters": run_ranks(_count, options.trainer(), options)[0]},
        "microbatch_tokens": options.microbatch_tokens,
        "repetitions": options.repetitions,
        "against_transformers": {batch: compare(options, batch) for batch in BATCHES},
        "layouts": measure_layouts(options, layouts),
    }
    print(json.dumps(report, indent=2))
    return 0


def _count(groups: Groups, trainer: TrainerConfig, options: Options) -> int:
    return build_model(groups, trainer, options.hf_config).n_parameters


class TrainerSide:
    """The trainer's step on one rank."""

    def __init__(self, groups: Groups, trainer: TrainerConfig, options: Options) -> None:
        self.groups, self.trainer = groups, trainer
        self.model = build_model(groups, trainer, options.hf_config)

    def batches(self, pairs: Pairs) -> list:
        """This replica's microbatches; the sequences are dealt out as the trainer does."""
        from tba_megatron.packing import demonstration_groups, pack
        from tba_megatron.trainer.exchange import assign_replicas
        from tba_megatron.trainer.model import to_device

        everything = demonstration_groups(pairs)
        replica_G = assign_replicas([group.n_tokens for group in everything], self.groups.dp_size)
        mine = [group for group, to in zip(everything, replica_G, strict=True) if to == self.groups.dp_rank]
        multiple_of = self.groups.tp_size if self.trainer.sequence_parallel else 1
        packs = pack(mine, self.trainer.microbatch_tokens, multiple_of)
        return [to_device(p.microbatch, self.groups.device) for p in packs]

    def step(self, pairs: Pairs) -> float:
        """One optimizer step; the mean loss of a completion's token before it, NaN on other ranks than 0."""
        from tba_megatron.loss.supervised import SupervisedLoss
        from tba_megatron.trainer.step import update

        normaliser = float(sum(len(completion) for _, completion in pairs))
        loss, model = SupervisedLoss(), self.model
        done = update(model.policy, self.batches(pairs), loss, normaliser, model.head, self.groups)
        return done.statistics.get("loss", float("nan"))


def compare(options: Options, batch: str) -> dict[str, Any]:
    """This trainer at one rank, and forms of transformers, step by step in turn in one process.

    ``ratio`` is this trainer's speed over that of the fastest form, in CPU seconds of one thread: those of the clock on
    an idle machine, and comparable on a busy one too.
    """
    print(f"against transformers, {batch}", file=sys.stderr, flush=True)
    return run_ranks(_compare, options.trainer(), options, batch)[0]


def _compare(groups: Groups, trainer: TrainerConfig, options: Options, batch: str) -> dict[str, Any]:
    from benchmarks.profiles import head_cpu_s, operators, phases
    from benchmarks.transformers_side import TransformersSide, padded_tokens

    pairs = options.pairs(batch)
    ours = TrainerSide(groups, trainer, options)
    n = len(ours.batches(pairs))
    theirs = {
        f"transformers, {'tuned' if tuned else 'plain'}, {n_microbatches} microbatches": TransformersSide(
            options.hf_config, ours.model.architecture, ours.model.shape, OPTIMIZER, n_microbatches, tuned=tuned
        )
        for n_microbatches, tuned in ((n, False), (2 * n, True), (4 * n, True))
    }
    sides: dict[str, Callable[[Pairs], float]] = {OURS: ours.step, **{name: side.step for name, side in theirs.items()}}
    found = interleave(sides, pairs, options.repetitions)
    tokens = sum(len(prompt) + len(completion) for prompt, completion in pairs)
    rows = {name: _row(steps, tokens) for name, steps in found.items()}
    fastest = min(theirs, key=lambda name: rows[name]["cpu_s"]["median"])
    losses = np.array([[step.loss for step in steps] for steps in found.values()])
    return {
        "sequences": len(pairs),
        "tokens": tokens,
        "microbatches": n,
        "padded_tokens": {name: padded_tokens(pairs, side.n_microbatches) for name, side in theirs.items()},
        "sides": rows,
        "loss_difference": float(np.abs(losses / losses[0] - 1).max()),
        "fastest_of_transformers": fastest,
        "ratio": _ratio(rows, fastest, "cpu_s"),
        "ratio_of_wall_s": _ratio(rows, fastest, "wall_s"),
        "phases": phases(lambda: ours.step(pairs)),
        "head_cpu_s": head_cpu_s(ours.model, ours.batches(pairs)),
        "operators": {name: operators(lambda s=sides[name]: s(pairs)) for name in (OURS, fastest)},
    }


@dataclass(frozen=True, slots=True)
class Step:
    wall_s: float
    cpu_s: float
    loss: float


def timed(step: Callable[[Pairs], float], pairs: Pairs) -> Step:
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(pairs)
    return Step(time.perf_counter() - wall, time.process_time() - cpu, loss)


def interleave(sides: dict[str, Callable[[Pairs], float]], pairs: Pairs, repetitions: int) -> dict[str, list[Step]]:
    """One step of each side in turn, ``repetitions`` times, after a round that does not count."""
    found: dict[str, list[Step]] = {name: [] for name in sides}
    for _ in range(repetitions + 1):
        for name, step in sides.items():
            found[name].append(timed(step, pairs))
    return {name: steps[1:] for name, steps in found.items()}


def _row(steps: Sequence[Step], tokens: int) -> dict[str, Any]:
    walls, cpus = [step.wall_s for step in steps], [step.cpu_s for step in steps]
    return {
        "tokens_per_s": round(tokens / statistics.median(walls)),
        "tokens_per_cpu_s": round(tokens / statistics.median(cpus)),
        "wall_s": _spread(walls),
        "cpu_s": _spread(cpus),
    }


def _ratio(rows: Mapping[str, Any], other: str, clock: str) -> float:
    return round(rows[other][clock]["median"] / rows[OURS][clock]["median"], 3)


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def measure_layouts(options: Options, names: Sequence[str]) -> dict[str, Any]:
    """Speed and memory by layout, on the sequences of 20 to 200 tokens."""
    batch = next(iter(BATCHES))
    tokens = sum(len(prompt) + len(completion) for prompt, completion in options.pairs(batch))
    rows: dict[str, Any] = {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        trainer = options.trainer(**LAYOUTS[name])
        ranks = run_ranks(_measure, trainer, options, batch)
        # The slowest rank's clock; the CPU seconds of all ranks.
        steps = [
            Step(max(s.wall_s for s in step), sum(s.cpu_s for s in step), step[0].loss)
            for step in zip(*(rank["steps"] for rank in ranks), strict=True)
        ]
        rows[name] = {
            "ranks": trainer.world_size,
            **_row(steps, tokens),
            "loss": steps[-1].loss,
            "peak_mib_by_rank": [rank["peak_mib"] for rank in ranks],
            "of_which_before_the_model_mib": [rank["before_mib"] for rank in ranks],
            "bytes_a_parameter": ranks[0]["bytes_a_parameter"],
        }
    return rows


def _measure(groups: Groups, trainer: TrainerConfig, options: Options, batch: str) -> dict[str, Any]:
    before_mib = peak_mib()
    side, pairs = TrainerSide(groups, trainer, options), options.pairs(batch)
    steps = [timed(side.step, pairs) for _ in range(options.repetitions + 1)]
    return {
        "steps": steps[1:],
        "before_mib": before_mib,
        "peak_mib": peak_mib(),
        "bytes_a_parameter": bytes_a_parameter(side.model.policy),
    }


def bytes_a_parameter(policy: Policy) -> dict[str, float]:
    """What this rank keeps between steps, over the number of parameters that it computes with."""
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    wrapped: Any = policy.ddp
    kept: Any = [
        tensor
        for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
        for p in (p for group in part.param_groups for p in group["params"])
        for tensor in (p, *part.optimizer.state[p].values())
        if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in weights
    ]
    n = sum(p.numel() for p in parameters)
    found = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(buffer.grad_data.nbytes for ddp in wrapped for buffer in ddp.buffers),
        "optimizer": sum(tensor.nbytes for tensor in kept),
    }
    return {name: round(value / n, 2) for name, value in found.items()}


def peak_mib() -> int:
    """The most memory that this process has had resident so far (VmHWM, Linux)."""
    (kib,) = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.M)
    return int(kib) // 1024


if __name__ == "__main__":
    sys.exit(main())
