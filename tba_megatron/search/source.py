"""What a searcher of a source is: how it samples, which policy it runs, how often it takes new weights.

``search.source`` names the source. A fixed policy is another model, so its token ids must mean what the run's mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tba_megatron.config import Config
from tba_megatron.config_search import FixedPolicy, LaggingPolicy
from tba_megatron.errors import ModelError, shown
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.types import SamplingSettings

_PROBE_TEXTS, _PROBE_TOKENS = 256, 24


def sampling_of(config: Config, eos_ids: tuple[int, ...], step: int) -> SamplingSettings:
    """How this searcher samples a prompt while it runs the policy after optimizer step ``step``.

    Trajectory balance learns from any of it. Behaviour log-probs, where they are stored, are those of the distribution
    that was sampled, after temperature and top-p: with a ``top_p`` below 1 what could not be sampled has none, and no
    weight that is made of them can make up for that.
    """
    search, source = config.search, config.search.this_source
    return SamplingSettings(
        n=search.completions_per_prompt,
        temperature=source.temperature_at(step),
        top_p=source.top_p,
        max_new_tokens=search.max_new_tokens,
        eos_ids=eos_ids,
    )


def takes_every(config: Config) -> int:
    """Optimizer steps that a version must be newer than the last that this searcher took; 1: each, 0: it takes none."""
    policy = config.search.this_source.policy
    if isinstance(policy, FixedPolicy):
        return 0
    return policy.steps if isinstance(policy, LaggingPolicy) else 1


def fixed_model(config: Config) -> Path | None:
    """The folder of this searcher's model, where it never takes weights. ModelError where there is no model in it."""
    policy = config.search.this_source.policy
    if not isinstance(policy, FixedPolicy):
        return None
    if not (policy.path / "config.json").is_file():
        what = "has no config.json" if policy.path.is_dir() else "is no folder"
        raise ModelError(
            f"search.sources.{config.search.source}.policy.path: {policy.path} {what}; give a Hugging Face "
            f"folder with the weights and the tokenizer of a model"
        )
    return policy.path


def check_same_tokenizer(run_model: Path, other: Path) -> None:
    """ModelError, in one line that says what differs, where ``other`` reads and writes other token ids than the run.

    What tokenizers do is compared, not their files: the ids of all tokens, where a completion ends, and how texts are
    cut into tokens.
    """
    mine, theirs = HfTokenizer(run_model), HfTokenizer(other)
    difference = next(_differences(mine, theirs), None)
    if difference is not None:
        raise ModelError(
            f"{other}: another tokenizer than that of {run_model}: {difference}; a fixed policy needs a model with the "
            f"run's own tokenizer"
        )


def _differences(mine: HfTokenizer, theirs: HfTokenizer) -> Iterator[str]:
    if mine.ids != theirs.ids:
        if len(mine.ids) != len(theirs.ids):
            yield f"it has {len(theirs.ids)} tokens, not {len(mine.ids)}"
        own, other = ({i: text for text, i in tokenizer.ids.items()} for tokenizer in (mine, theirs))
        first = min(i for i in own.keys() | other.keys() if own.get(i) != other.get(i))
        yield f"token {first} is {_token(other.get(first))}, not {_token(own.get(first))}"
    if set(mine.eos_ids) != set(theirs.eos_ids):
        yield f"its end-of-sequence ids are {_ids(theirs)}, not {_ids(mine)}"
    for text in _probes(mine):
        if mine.encode(text).tolist() != theirs.encode(text).tolist():
            yield f"it cuts {shown(repr(text))} into other tokens"


def _probes(tokenizer: HfTokenizer) -> Iterator[str]:
    """The first and last tokens, where special ones are, then texts of tokens drawn from the whole vocabulary, the same
    ones each time.
    """
    texts = sorted(tokenizer.ids, key=tokenizer.ids.__getitem__)
    yield from texts[:_PROBE_TEXTS] + texts[-_PROBE_TEXTS:]
    ids = np.array(sorted(tokenizer.ids.values()), np.int32)
    rng = np.random.default_rng(0)
    for _ in range(_PROBE_TEXTS):
        yield tokenizer.decode(rng.choice(ids, _PROBE_TOKENS))


def _token(text: str | None) -> str:
    return "missing" if text is None else shown(repr(text), 40)


def _ids(tokenizer: HfTokenizer) -> str:
    return shown(", ".join(map(str, sorted(tokenizer.eos_ids))))
