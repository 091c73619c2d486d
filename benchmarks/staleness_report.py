"""The runs of ``benchmarks.staleness`` as rows with intervals, as a table, and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Runs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]  # (variant, lag) -> a run for each seed

_QUANTILE = statistics.NormalDist().inv_cdf(0.975)
_DIAGNOSTICS = ("abs_drift", "lost_push", "ess_frac", "grad_norm")
_COLOURS = (
    "#0b5fa5",
    "#c23b22",
    "#6baed6",
    "#08306b",
    "#fc9272",
    "#67000d",
    "#2ca25f",
    "#8856a7",
    "#7f7f7f",
    "#bf9000",
)


def lag_rows(runs: Runs) -> list[dict[str, Any]]:
    """A row for each variant and lag: the mean accuracy over seeds, with half a 95 % interval for comparing rows."""
    half = half_interval([[found["accuracy"] for found in each] for each in runs.values()])
    return [
        {
            "variant": variant,
            "lag": lag,
            "learning_rate": found[0]["cell"]["learning_rate"],
            "accuracy": round(statistics.mean(run["accuracy"] for run in found), 4),
            "half_interval": round(half, 4),
            "seeds": [round(run["accuracy"], 4) for run in found],
            "worst_on_the_way": round(min(value for run in found for _, value in run["curve"]), 4),
            "skipped": sum(run["skipped"] for run in found),
            "diagnostics": {
                name: round(statistics.mean(run["diagnostics"][name] for run in found), 4)
                for name in _DIAGNOSTICS
                if name in found[0]["diagnostics"]
            },
        }
        for (variant, lag), found in runs.items()
    ]


def half_interval(rows: Sequence[Sequence[float]]) -> float:
    """Of the mean of a row, after what a seed adds to all rows alike is taken out: its warm start is another model.

    The spread is pooled over all rows, (rows - 1) (seeds - 1) degrees of freedom; NaN where there are too few.
    """
    seeds = len(rows[0])
    freedom = (len(rows) - 1) * (seeds - 1)
    if freedom < 1 or any(len(row) != seeds for row in rows):
        return math.nan
    overall = statistics.mean(value for row in rows for value in row)
    of_seed = [statistics.mean(column) for column in zip(*rows, strict=True)]
    squares = [
        (value - statistics.mean(row) - level + overall) ** 2
        for row in rows
        for value, level in zip(row, of_seed, strict=True)
    ]
    return _QUANTILE * math.sqrt(sum(squares) / freedom / seeds)


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of ``docs/staleness.md``."""
    lags = sorted({row["lag"] for row in report["lags"]})
    cells = {(row["variant"], row["lag"]): row for row in report["lags"]}
    variants = list(dict.fromkeys(variant for variant, _ in cells))
    lines = [
        "| objective | learning rate | " + " | ".join(f"lag {lag}" for lag in lags) + " | drift | lost pushes |",
        "|---|---|" + "---|" * (len(lags) + 2),
    ]
    for variant in variants:
        row = [cells.get((variant, lag)) for lag in lags]
        last = next(cell for cell in reversed(row) if cell)
        said = [f"{cell['accuracy']:.3f} ± {cell['half_interval']:.3f}" if cell else "" for cell in row]
        seen = [f"{last['diagnostics'].get(name, math.nan):.2f}" for name in ("abs_drift", "lost_push")]
        lines.append(f"| `{variant}` | {last['learning_rate']:g} | " + " | ".join([*said, *seen]) + " |")
    lines += ["", "| m | accuracy, by seed | mean age of what was trained on |", "|---|---|---|"]
    for m, found in report["recent"].items():
        lines.append(f"| {m} | {', '.join(f'{a:.3f}' for a in found['accuracy'])} | {found['age_mean']} steps |")
    lines += ["", "| objective | gain at lag 0 |", "|---|---|"]
    lines += [f"| `{variant}` | {gain:+.3f} |" for variant, gain in report["gain_at_lag_0"].items()]
    return "\n".join(lines) + "\n"


def curves_svg(rows: Sequence[Mapping[str, Any]], lags: Sequence[int]) -> str:
    """Accuracy against lag, a line for each variant; lags are equally far apart."""
    width, height, left, top = 620, 380, 60, 20
    values = [row["accuracy"] for row in rows]
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10

    def x(lag: int) -> float:
        return left + lags.index(lag) * (width - 240) / max(1, len(lags) - 1)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - 80)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for tenth in range(round(low * 10), round(high * 10) + 1):
        line = y(tenth / 10)
        parts.append(f'<path d="M{left} {line:.1f}H{width - 180}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8}" y="{line + 4:.1f}" font-size="12" text-anchor="end">{tenth / 10:.1f}</text>'
        )
    for lag in lags:
        parts.append(f'<text x="{x(lag):.1f}" y="{height - 42}" font-size="12" text-anchor="middle">{lag}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 18}" font-size="12">policy lag, optimizer steps; accuracy, held out</text>'
    )
    for i, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        points = [(x(row["lag"]), y(row["accuracy"])) for row in rows if row["variant"] == variant]
        colour = _COLOURS[i % len(_COLOURS)]
        dash = ' stroke-dasharray="5 3"' if "+" in variant else ""
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        parts.append(f'<text x="{width - 165}" y="{top + 12 + 18 * i}" font-size="12" fill="{colour}">{variant}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
