"""What the age of completions costs each objective: accuracy against a policy lag that is forced exactly.

``python -m benchmarks.staleness --out DIR [--variants ...] [--lags 0 8 64] [--seeds 0 1] [--rates 2e-4 4e-4 8e-4]``

The quickstart's task and model, with the trainer, buffer and vLLM of a real run (``staleness_run.py``). Each variant,
an objective and its guard, gets the same search: one learning rate of ``--rates``, chosen at lag 0 with the first seed
on held-out problems that are not the reported ones. Beside the lags: m of the sampler (``--recent``) and, at lag 0
and one learning rate, all other objectives (``--others``). JSON at the end, in DIR also a table and a plot. What is in
DIR is not run again, so the command can be stopped and given again; two workers take about an hour on two cores.
``--full`` is the larger grid: seven objectives, five lags, three seeds, a day or so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.ranks import machine, prepare, run_ranks
from benchmarks.staleness_report import curves_svg, lag_rows, markdown
from benchmarks.staleness_run import CONFIG, Cell, run_cells, start_of

OBJECTIVES = {
    "tb_vargrad": "{kind: tb_vargrad, beta: 0.1}",
    "tba_prime": "{kind: tba_prime, beta: 0.1}",
    "tb_learned_z": "{kind: tb_learned_z, beta: 0.1}",
    "kimi_k15": "{kind: kimi_k15, tau: 0.1}",
    "kimi_k2": "{kind: kimi_k2, tau: 0.1}",
    "oapl": "{kind: oapl, tau: 0.1}",
    "rloo": "{kind: rloo}",
    "proximal_rloo": "{kind: proximal_rloo}",
    "ppo_clip": "{kind: ppo_clip}",
    "grpo": "{kind: grpo}",
    "dr_grpo": "{kind: dr_grpo}",
    "online_dpo": "{kind: online_dpo}",
}
GUARDS = {
    "plain": "{}",
    "negative": "{negative_weight: 0.3}",
    "lost": "{lost_negative_ratio: 0.8}",
    "random": "{lost_negative_ratio: 0.8}",  # the control: as many as are lost, whichever
}
GUARDED = [f"{objective}+{guard}" for objective in ("tb_vargrad", "grpo") for guard in ("negative", "lost")]
VARIANTS = ["tb_vargrad", "grpo", *GUARDED, "proximal_rloo", "kimi_k2"]
CONTROLS = ["tb_vargrad+random", "grpo+random"]  # of the learning rate of the mask that they control
FIXED = ["tb_vargrad@4e-4"]  # at that learning rate: the others' choice, where its own differs
OTHERS = ["tba_prime", "tb_learned_z", "kimi_k15", "oapl", "rloo", "ppo_clip", "dr_grpo", "online_dpo"]
RECENT = [0.0, 0.5, 0.95, 1.0]
MIDDLE_RATE = 4e-4
LEAST_GAIN = 0.15


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a worker failed or an objective gains less at lag 0 than ``LEAST_GAIN``."""
    args = _arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.cells is not None:
        return _work([Cell(**cell) for cell in json.loads(args.cells.read_text())], args.out)
    for seed in args.seeds:
        _warm_start(args.out, seed)
    searched = [cell_of(variant, args, learning_rate=rate) for variant in args.variants for rate in args.rates]
    beside = [cell_of(variant, args) for variant in args.others]
    beside += [
        cell_of("tb_vargrad", args, recent=m, seed=seed, learning_rate=MIDDLE_RATE)
        for m in args.recent
        for seed in args.seeds
    ]
    if not _run_all([*searched, *beside], args):
        return 1
    rates = {variant: chosen_rate(variant, args) for variant in args.variants}
    rates |= {control: rates[lost] for control in args.controls if (lost := control.replace("random", "lost")) in rates}
    rates |= {variant: float(variant.partition("@")[2]) for variant in args.fixed}
    lagged = [
        cell_of(variant, args, lag=lag, seed=seed, learning_rate=rate)
        for seed in args.seeds
        for lag in args.lags
        for variant, rate in rates.items()
        if lag or variant not in args.controls
    ]
    if not _run_all(lagged, args):
        return 1
    report = _report(args, rates, lagged)
    (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "table.md").write_text(markdown(report))
    (args.out / "staleness.svg").write_text(curves_svg(report["lags"], args.lags))
    print(json.dumps(report, indent=1))
    return int(not all(report["claims"].values()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description="Accuracy against policy lag.")
    parser.add_argument("--out", type=Path, required=True, help="every run leaves a file here")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="objective, or objective+guard")
    parser.add_argument("--controls", nargs="*", default=CONTROLS, help="objective+random of masks among the variants")
    parser.add_argument("--fixed", nargs="*", default=FIXED, help="variant@rate: with a learning rate of no search")
    parser.add_argument("--others", nargs="*", default=OTHERS, help="objectives that run at lag 0 only")
    parser.add_argument("--recent", type=float, nargs="*", default=RECENT, help="values of m")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4, 8e-4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time; each computes on one core")
    parser.add_argument("--full", action="store_true", help="seven objectives, five lags, three seeds")
    parser.add_argument("--cells", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.full:
        args.lags, args.seeds = [0, 2, 8, 64, 256], [0, 1, 2]
        args.variants = [*VARIANTS, "rloo", "ppo_clip", "oapl"]
        args.steps = 600
    return args


def cell_of(variant: str, args: argparse.Namespace, **more: Any) -> Cell:
    """The cell of ``variant`` at lag 0 with the first seed, but for ``more``."""
    objective, _, guard = variant.partition("@")[0].partition("+")
    cell = Cell(
        loss=OBJECTIVES[objective],
        guards=GUARDS[guard or "plain"],
        control=guard == "random",
        seed=args.seeds[0],
        learning_rate=MIDDLE_RATE,
        steps=args.steps,
    )
    return replace(cell, **more)


def chosen_rate(variant: str, args: argparse.Namespace) -> float:
    """The learning rate that does best at lag 0 with the first seed, on the problems that are for choosing."""
    found = {rate: _read(cell_of(variant, args, learning_rate=rate), args.out)["choice"] for rate in args.rates}
    return max(found, key=found.__getitem__)


def _read(cell: Cell, out: Path) -> dict[str, Any]:
    return json.loads((out / f"{cell.name}.json").read_text())


def _warm_start(out: Path, seed: int) -> None:
    folder = start_of(out, seed)
    if (folder / "sft" / "config.json").exists():
        return
    command = (sys.executable, "-m", "tba_megatron.cli.main", "sft", CONFIG)
    subprocess.run([*command, f"run.folder={folder}", f"run.seed={seed}"], check=True, stdout=sys.stderr)


# ---- workers


def _run_all(cells: Sequence[Cell], args: argparse.Namespace) -> bool:
    """Every cell that is missing, dealt to ``args.workers`` processes; whether none of them failed."""
    missing = [cell for cell in dict.fromkeys(cells) if not (args.out / f"{cell.name}.json").exists()]
    codes: list[int] = []

    def run(index: int) -> None:
        path = args.out / f"worker-{index}.json"
        path.write_text(json.dumps([asdict(cell) for cell in missing[index :: args.workers]]))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.staleness", "--cells", str(path)]
        done = subprocess.run([*command, "--out", str(args.out)], stdout=sys.stderr, check=False)
        codes.append(done.returncode)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(min(args.workers, len(missing)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not any(codes)


def _work(cells: Sequence[Cell], out: Path) -> int:
    prepare()
    trainer = cells[0].config(start_of(out, cells[0].seed)).trainer
    run_ranks(run_cells, trainer, cells, out, limit_s=24 * 3600.0)
    return 0


# ---- what was found


def _report(args: argparse.Namespace, rates: Mapping[str, float], lagged: Sequence[Cell]) -> dict[str, Any]:
    names = {}
    for variant, rate in rates.items():
        for lag in args.lags:
            names[variant, lag] = [
                _read(cell, args.out)
                for seed in args.seeds
                if (cell := cell_of(variant, args, lag=lag, seed=seed, learning_rate=rate)) in lagged
            ]
    lags = lag_rows({key: found for key, found in names.items() if found})
    search = {
        variant: {str(rate): _read(cell_of(variant, args, learning_rate=rate), args.out) for rate in args.rates}
        for variant in args.variants
    }
    recent = {
        str(m): [
            _read(cell_of("tb_vargrad", args, recent=m, seed=seed, learning_rate=MIDDLE_RATE), args.out)
            for seed in args.seeds
        ]
        for m in args.recent
    }
    others = {variant: _read(cell_of(variant, args), args.out) for variant in args.others}
    fresh = {variant: found[0] for (variant, lag), found in names.items() if lag == 0 and found} | others
    gains = {variant: found["accuracy"] - found["start"] for variant, found in fresh.items()}
    return {
        "machine": machine(),
        "steps": args.steps,
        "learning_rates": dict(rates),
        "search": {v: {rate: round(found["choice"], 4) for rate, found in row.items()} for v, row in search.items()},
        "lags": lags,
        "recent": {
            m: {
                "accuracy": [round(found["accuracy"], 4) for found in runs],
                "age_mean": round(runs[0]["age_mean"], 1),
            }
            for m, runs in recent.items()
        },
        "gain_at_lag_0": {variant: round(gain, 4) for variant, gain in gains.items()},
        "start": round(sum(found["start"] for found in fresh.values()) / len(fresh), 4),
        "claims": {f"{variant} gains {LEAST_GAIN} at lag 0": gain >= LEAST_GAIN for variant, gain in gains.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
