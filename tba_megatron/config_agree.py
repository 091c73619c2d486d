"""What a searcher that is started by hand must have in common with the run that it joins."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tba_megatron.config import Config
from tba_megatron.config_load import differences, load_config
from tba_megatron.errors import ConfigError, RunFolderError

# Which problems are trained on and which are held out, and what a completion is worth. How it samples is its own.
SHARED = (
    "run.seed",
    "model.max_length",
    "task.*",
    "objective.*",
    "evaluation.*",
    "search.completions_per_prompt",
    "search.max_new_tokens",
    "search.epochs",
)
# The reference of a run is its start model, wherever its weights are held.
OF_A_REFERENCE = ("model.path", "sft.steps")


def refuse_other_problems(config: Config) -> None:
    """RunFolderError when the trainer's ``config.yaml`` in the run folder has other problems, rewards or measures."""
    stored = config.run.folder / "config.yaml"
    try:
        run = load_config(stored)
    except ConfigError as error:
        raise RunFolderError(
            f"{stored} cannot be read ({error.problems[0]}); is it the trainer's run.folder?"
        ) from None
    patterns = SHARED + (OF_A_REFERENCE if run.objective.reference.placement == "searcher" else ())
    if found := differences(run, config, lambda key: any(fnmatchcase(key, pattern) for pattern in patterns)):
        raise RunFolderError(f"this searcher would search for another run: {found}; start it with {stored}")
