"""One global batch, trained in every layout: loss and gradient norm against those of one rank.

``python -m benchmarks.parallelism [--markdown]`` prints one JSON object; ``--markdown`` also rewrites the table of
docs/parallelism.md. Everything is float32 on CPU. Three optimizer steps a case, so that the second and third also see
what the first one's update did; a difference is the largest over the steps, relative to one rank. Exit code 1 when one
is above 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.ranks import build_model, machine, prepare, run_ranks
from tba_megatron.config_sections import OptimizerSection, TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutId, StopReason, TrainGroup

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- python -m benchmarks.parallelism --markdown -->", "<!-- end of the table -->"
LIMIT = 1e-5
VOCAB = 64
BETA = 0.1
GROUPS = 16  # G of a step
STEPS = 3
# A large epsilon: Adam turns rounding noise of vanishing gradients into whole steps otherwise.
OPTIMIZER = OptimizerSection(learning_rate=1e-2, adam_eps=1e-3, weight_decay=0.1, clip_grad_norm=1.0)

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,  # logits far from uniform
}
_GATED = {**_SIZES, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2, tied": {"architectures": ["Qwen2ForCausalLM"], **_GATED, "tie_word_embeddings": True},
    "Qwen2, untied": {"architectures": ["Qwen2ForCausalLM"], **_GATED, "tie_word_embeddings": False},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], **_GATED, "head_dim": 24},
    "Llama": {"architectures": ["LlamaForCausalLM"], **_GATED},
    "GPT-NeoX": {"architectures": ["GPTNeoXForCausalLM"], **_SIZES, "rotary_pct": 0.25},
    "GPT-2": {
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": VOCAB, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64, "initializer_range": 0.1},
    },
}
FAMILY = "Qwen2, tied"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layout, and how the batch is cut into microbatches. ``order`` seeds a permutation of the groups; 0: none."""

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    microbatch_tokens: int = 160
    order: int = 0
    family: str = FAMILY
    extra: tuple[tuple[str, Any], ...] = ()

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
            virtual_pipeline=self.vpp,
            data_parallel=self.dp,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            microbatch_tokens=self.microbatch_tokens,
            optimizer=OPTIMIZER,
            megatron_extra=dict(self.extra),
        )


def _hard(name: str, family: str = FAMILY, **changes: Any) -> Case:
    fields: dict[str, Any] = {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "recompute": "full"}
    return Case(name=name, family=family, **(fields | changes))


CASES = (
    Case(name="TP 2", tp=2),
    Case(name="TP 4", tp=4),
    Case(name="TP 2, SP", tp=2, sequence_parallel=True),
    Case(name="TP 4, SP", tp=4, sequence_parallel=True),
    Case(name="PP 2", pp=2),
    Case(name="PP 4", pp=4),
    Case(name="PP 2, stages of 5 and 3 layers", pp=2, extra=(("num_layers_in_first_pipeline_stage", 5),)),
    Case(name="PP 2, VPP 2", pp=2, vpp=2),
    Case(name="PP 4, VPP 2", pp=4, vpp=2),
    Case(name="DP 2", dp=2),
    Case(name="DP 4", dp=4),
    Case(name="TP 2, PP 2", tp=2, pp=2),
    Case(name="TP 2, DP 2", tp=2, dp=2),
    Case(name="PP 2, DP 2", pp=2, dp=2),
    Case(name="PP 2, VPP 2, DP 2", pp=2, vpp=2, dp=2),
    Case(name="TP 2, PP 2, DP 2", tp=2, pp=2, dp=2),
    Case(name="TP 2, SP, PP 2, DP 2", tp=2, sequence_parallel=True, pp=2, dp=2),
    Case(name="recompute selective", recompute="selective"),
    Case(name="recompute full", recompute="full"),
    Case(name="microbatches of 400 tokens", microbatch_tokens=400),
    Case(name="microbatches of 80 tokens: some groups in two passes", microbatch_tokens=80),
    Case(name="microbatches of one sequence: all groups in two passes", microbatch_tokens=1),
    Case(name="the whole batch in one microbatch", microbatch_tokens=100_000),
    Case(name="groups in another order", order=1),
    Case(name="groups in another order, microbatches of 80 tokens", order=2, microbatch_tokens=80),
    _hard(
        "TP 2, SP, PP 2, VPP 2, DP 2, recompute full, two passes, another order", dp=2, order=3, microbatch_tokens=80
    ),
    *(_hard(f"{family}: TP 2, SP, PP 2, VPP 2, recompute full", family) for family in FAMILIES),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a run did: global loss and gradient norm of each step, and the passes and microbatches of replica 0."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    microbatches: int  # of the first step
    split_groups: int  # of the first step: those trained in two passes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; 1 when a difference is above the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallelism", description="Loss and gradient norm of every layout against one rank."
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="some of the cases; default: all")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--markdown", action="store_true", help="rewrite the table of docs/parallelism.md; needs all cases"
    )
    args = parser.parse_args(argv)
    names = [case.name for case in CASES]
    unknown = [name for name in args.cases or () if name not in names]
    if unknown or (args.markdown and (args.cases or args.steps != STEPS)):
        parser.error(
            f"no such case: {unknown[0]}; known: {names}" if unknown else "--markdown needs all cases, 3 steps"
        )
    prepare()
    report = compare([case for case in CASES if case.name in (args.cases or names)], args.steps)
    print(json.dumps(report, indent=2))
    if args.markdown:
        rewrite(PAGE, table(report))
    return int(not report["worst"] <= LIMIT)


def compare(cases: Sequence[Case], steps: int) -> dict[str, Any]:
    """Every case against one rank with the same model; ``worst`` is the largest difference of all."""
    one_rank: dict[str, Trace] = {}
    rows = []
    for case in cases:
        if case.family not in one_rank:
            one_rank[case.family] = run(Case(name="one rank", family=case.family), steps)
        expected, found = one_rank[case.family], run(case, steps)
        rows.append(
            {
                "case": case.name,
                "ranks": case.trainer().world_size,
                "microbatches": found.microbatches,
                "groups_in_two_passes": found.split_groups,
                "loss": found.losses,
                "grad_norm": found.norms,
                "loss_difference": difference(found.losses, expected.losses),
                "norm_difference": difference(found.norms, expected.norms),
            }
        )
    worst = float(max(max(row["loss_difference"], row["norm_difference"]) for row in rows))
    return {
        "machine": machine(),
        "dtype": "float32",
        "steps": steps,
        "limit": LIMIT,
        "one_rank": {
            family: {"loss": trace.losses, "grad_norm": trace.norms, "microbatches": trace.microbatches}
            for family, trace in one_rank.items()
        },
        "cases": rows,
        "worst": worst,
    }


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where a value is not finite, so that it never looks small."""
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) if np.isfinite([a, b]).all() and b else float("inf") for a, b in pairs)


def run(case: Case, steps: int) -> Trace:
    """Train ``case`` on forked ranks. All of them must have seen the same norms."""
    print(case.name, file=sys.stderr, flush=True)
    ranks = run_ranks(train, case.trainer(), case, steps)
    if any(rank.norms != ranks[0].norms for rank in ranks):
        raise RuntimeError(f"{case.name}: ranks disagree about the gradient norm: {[rank.norms for rank in ranks]}")
    return ranks[0]


def train(groups: Groups, trainer: TrainerConfig, case: Case, steps: int) -> Trace:
    """On one rank. Losses are known on rank 0 only; NaN elsewhere."""
    from tba_megatron.loss.guards import Guards
    from tba_megatron.loss.regression import TbVarGrad
    from tba_megatron.packing import pack
    from tba_megatron.trainer.exchange import assign_replicas
    from tba_megatron.trainer.model import to_device
    from tba_megatron.trainer.step import update

    model = build_model(groups, trainer, FAMILIES[case.family])
    losses, norms, packed = [], [], []
    for step in range(steps):
        drawn = train_groups(seed=step)
        if case.order:
            drawn = [drawn[g] for g in np.random.default_rng(case.order).permutation(len(drawn))]
        replica_G = assign_replicas([group.n_tokens for group in drawn], groups.dp_size)
        mine = [group for group, replica in zip(drawn, replica_G, strict=True) if replica == groups.dp_rank]
        multiple_of = groups.tp_size if trainer.sequence_parallel else 1
        microbatches = [p.microbatch for p in pack(mine, trainer.microbatch_tokens, multiple_of)]
        batches = [to_device(microbatch, groups.device) for microbatch in microbatches]
        normaliser = float(sum(sum(group.copies) for group in drawn))
        done = update(model.policy, batches, TbVarGrad(BETA, Guards()), normaliser, model.head, groups)
        losses.append(done.statistics.get("loss", float("nan")))
        norms.append(done.grad_norm)
        packed.append(microbatches)
    return Trace(
        losses=tuple(losses),
        norms=tuple(norms),
        microbatches=len(packed[0]),
        split_groups=len({m.split_group for m in packed[0]} - {-1}),
    )


def train_groups(seed: int) -> list[TrainGroup]:
    """The global batch of a step: prompts with four distinct completions, one of them drawn twice."""
    rng = np.random.default_rng(seed)
    return [
        TrainGroup(
            prompt_id=f"p{g}",
            prompt_token_ids=rng.integers(0, VOCAB, rng.integers(3, 12)).astype(np.int32),
            rollouts=tuple(_rollout(rng, 4 * g + i) for i in range(4)),
            copies=(2, 1, 1, 1),
        )
        for g in range(GROUPS)
    ]


def _rollout(rng: np.random.Generator, sequence: int) -> Rollout:
    tokens = rng.integers(0, VOCAB, rng.integers(1, 24)).astype(np.int32)
    return Rollout(
        rollout_id=RolloutId("made-up", sequence),
        token_ids=tokens,
        reward=float(rng.normal()),
        stop_reason=StopReason.EOS,
        spans=(PolicySpan(version=PolicyVersion(0, 0), start=0, end=len(tokens)),),
        source="made-up",
        reference_logprob=float(-4.5 * len(tokens) + rng.normal()),
        reference_version=0,
    )


def table(report: dict[str, Any]) -> str:
    """The report as the table of the page: a row a case."""
    one = report["one_rank"][FAMILY]
    lines = [
        f"One rank ({FAMILY}): loss {_several(one['loss'])}; gradient norm {_several(one['grad_norm'])}.",
        f"The largest difference of all is {report['worst']:.1e}.",
        "",
        "| case | ranks | microbatches a replica | groups in two passes | loss | gradient norm |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["cases"]:
        counts = f"{row['ranks']} | {row['microbatches']} | {row['groups_in_two_passes']}"
        lines.append(f"| {row['case']} | {counts} | {row['loss_difference']:.1e} | {row['norm_difference']:.1e} |")
    return "\n".join(lines)


def _several(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def rewrite(page: Path, lines: str) -> None:
    """Put ``lines`` between the two marks of ``page``; the file is replaced whole or not at all."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RuntimeError(f"{page} lacks the marks {BEGIN} and {END}, in this order")
    partial = page.with_name(f".{page.name}.partial")
    partial.write_text(f"{before}{begin}\n{lines}\n{end}{after}", encoding="utf-8")
    os.replace(partial, page)


if __name__ == "__main__":
    sys.exit(main())
