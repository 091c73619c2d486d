"""Made-up rollouts that every side of the buffer's benchmark stores. numpy alone: environments of peers import it too.

G groups of ``GROUP`` rollouts, all of one length T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GROUP = 8  # rollouts
TOKENS = 256  # of a completion: 2 kB with log-probs
PROMPT_TOKENS = 32
VOCABULARY = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeRollouts:
    """The arrays of G groups; no two completions are equal."""

    prompts: npt.NDArray[np.int32]  # [G, PROMPT_TOKENS]
    tokens: npt.NDArray[np.int32]  # [G, GROUP, T]
    logprobs: npt.NDArray[np.float32]  # [G, GROUP, T] nats
    rewards: npt.NDArray[np.float64]  # [G, GROUP]

    @property
    def n_groups(self) -> int:
        return len(self.prompts)

    @property
    def n_rollouts(self) -> int:
        return self.rewards.size


def make_rollouts(n_groups: int, *, seed: int, sender: int, n_tokens: int = TOKENS) -> MadeRollouts:
    """``n_groups`` groups, a function of the arguments; each sender has others."""
    random = np.random.default_rng([seed, sender])
    shape = (n_groups, GROUP, n_tokens)
    return MadeRollouts(
        prompts=random.integers(0, VOCABULARY, (n_groups, PROMPT_TOKENS), np.int32),
        tokens=random.integers(0, VOCABULARY, shape, np.int32),
        logprobs=-random.random(shape, np.float32),
        rewards=random.random(shape[:2]),
    )
