"""How fast do new weights reach searchers, how long does training wait for it, and how long does a searcher?

``python -m benchmarks.weights`` publishes models of 100 and 500 MB to one and to two receivers by the path of a run,
from the snapshot on until every receiver has all of it verified in staging. Beside it, in turn and between the same
processes, the same bytes go over gloo and nothing else is done. Then a real vLLM engine takes updates while it
generates. Progress goes to stderr, one JSON object to stdout. Exit code 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import weights_engine
from benchmarks.ranks import machine, prepare, run_ranks
from benchmarks.weights_wire import Expected, receive, receivers, trainer_side
from tba_megatron.config_sections import TrainerConfig

# What a claim is called, before the comma: (limit, whether the figure has to be at least or at most that).
LIMITS = {
    "publish of raw gloo": (0.5, "at least"),
    "snapshot of a plain copy": (1.5, "at most"),
    "searcher's pause of applying and one step": (1.0, "at most"),
}
NOT_MEASURED = (
    "nccl: there is no GPU here",
    "more than one machine: all processes share its cores and its loopback",
    "tensor and pipeline parallelism of trainer or engine",
    "a searcher's tasks and rollouts: the engine's loop has none",
)
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# Qwen2's proportions with few layers; MB of float32 by name.
MODELS: dict[str, dict[str, Any]] = {
    "100 MB": _QWEN2
    | {
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 16_384,
    },
    "500 MB": _QWEN2
    | {
        "num_hidden_layers": 5,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 49_152,
    },
}
ENGINE_MODEL = "100 MB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of these (%(default)s)")
    parser.add_argument("--receivers", type=int, default=2, help="at most (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="of which the median counts (%(default)s)")
    parser.add_argument("--updates", type=int, default=8, help="of the engine, one of them to warm up (%(default)s)")
    parser.add_argument("--no-engine", action="store_true", help="without vLLM")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    prepare()
    models = {}
    for name in options.models:
        models[name] = _measure(MODELS[name], options.receivers, options.repeats)
        say(f"{name}: {models[name]}")
    engine: dict[str, Any] = {}
    if not options.no_engine:
        engine = weights_engine.measure(MODELS[ENGINE_MODEL], options.updates)
        say(f"engine: {engine}")
    claims = claimed(figures(models, engine))
    whole = {
        "machine": f"{machine()}, {processor()}",
        "not_measured": NOT_MEASURED,
        "claims": claims,
        "models": models,
        "engine": engine,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(whole, indent=1), flush=True)
    return 0 if all(claim["holds"] for claim in claims.values()) else 1


def _measure(hf_config: Mapping[str, Any], n_receivers: int, repeats: int) -> dict[str, Any]:
    with receivers(n_receivers, receive, expected_tensors(hf_config)) as connections:
        (found,) = run_ranks(trainer_side, TrainerConfig(), hf_config, connections, repeats)
    return found


def expected_tensors(hf_config: Mapping[str, Any]) -> Expected:
    """What a receiver of the model wants: shape and dtype by name."""
    from tba_megatron.models.registry import ARCHITECTURES

    architecture = ARCHITECTURES[hf_config["architectures"][0]]
    shapes = architecture.tensor_shapes(architecture.read(hf_config))
    return {name: (shape, "float32") for name, shape in shapes.items()}


def figures(models: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, float]:
    """What the claims are about."""
    found = {}
    for name, model in models.items():
        found[f"snapshot of a plain copy, {name}"] = model["pause"]["ratio"]
        for n, ways in model["receivers"].items():
            found[f"publish of raw gloo, {name} to {n}"] = ways["publish_of_raw"]["median"]
    if engine:
        found[f"searcher's pause of applying and one step, {ENGINE_MODEL}"] = engine["pause_of_apply_and_a_step"]
    return found


def claimed(found: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    claims = {}
    for name, figure in found.items():
        limit, side = LIMITS[name.split(",")[0]]
        holds = figure >= limit if side == "at least" else figure <= limit
        claims[name] = {"figure": figure, "limit": limit, "has_to_be": side, "holds": holds}
    return claims


def processor() -> str:
    """The model's name of the CPU, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
