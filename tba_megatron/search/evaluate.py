"""Accuracy on held-out problems, by whatever engine and task it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tba_megatron.config_search import EvaluationConfig
from tba_megatron.tasks.base import Task
from tba_megatron.types import Engine, SamplingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """``accuracy`` is the mean score over all samples of all problems."""

    accuracy: float
    problems: int
    seconds: float


def evaluate(
    engine: Engine,
    task: Task,
    config: EvaluationConfig,
    sampling: SamplingSettings,
    *,
    in_engine: int,
    go_on: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """Sample ``config.samples_per_problem`` completions of each held-out problem and score them.

    The engine has to be idle. ``in_engine`` problems are in it at a time. ``go_on`` is asked between its steps, so that
    a searcher can show that it is alive; None when it says no.
    """
    started = time.monotonic()
    waiting = list(enumerate(task.held_out_prompts(config.problems)))
    prompts = {f"evaluation-{i}": prompt for i, prompt in waiting}
    waiting.reverse()
    scores: list[float] = []
    while waiting or engine.n_unfinished:
        while waiting and engine.n_unfinished < in_engine:
            i, prompt = waiting.pop()
            engine.submit(f"evaluation-{i}", prompt.token_ids, sampling)
        for request_id, completions in engine.step():
            scores += task.score(prompts[request_id], completions)
        if not go_on():
            return None
    return Evaluation(accuracy=sum(scores) / len(scores), problems=config.problems, seconds=time.monotonic() - started)
