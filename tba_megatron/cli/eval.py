"""``tba eval``: accuracy of a Hugging Face folder on held-out problems, as one JSON line.

It measures ``hf`` in the run folder, or what training starts from while there is none.
"""

from __future__ import annotations

import argparse
import json

from tba_megatron.cli.common import start_logging
from tba_megatron.cli.search import make_engine
from tba_megatron.config import Config
from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.dist import prepare_searcher_environment
from tba_megatron.errors import ConfigError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.search.evaluate import evaluate
from tba_megatron.tasks.registry import make_task
from tba_megatron.types import PolicyVersion, SamplingSettings


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    if not config.evaluation.problems:
        raise ConfigError(["evaluation.problems: 0 leaves nothing to do; set it to the number of problems"])
    if isinstance(config.search.engine, VllmEngineConfig):
        prepare_searcher_environment(config.search.engine.threads)
    exported = config.run.folder / "hf"
    folder = exported if exported.exists() else config.start_model
    tokenizer = HfTokenizer(folder)
    task = make_task(config.task, tokenizer, config.run.seed, config.model.max_length)
    engine = make_engine(config, folder, PolicyVersion(0, 0), seed=config.run.seed)
    sampling = SamplingSettings(
        n=config.evaluation.samples_per_problem,
        temperature=config.evaluation.temperature,
        top_p=1.0,
        max_new_tokens=config.search.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
    )
    done = evaluate(engine, task, config.evaluation, sampling, in_engine=config.search.prompts_in_engine)
    engine.close()
    assert done is not None  # nothing ends it early here
    print(
        json.dumps(
            {
                "model": str(folder),
                "accuracy": done.accuracy,
                "problems": done.problems,
                "samples_per_problem": config.evaluation.samples_per_problem,
                "temperature": config.evaluation.temperature,
                "seconds": round(done.seconds, 3),
            }
        )
    )
    return 0
