"""What can happen to a shard, and lives that are made of it: short ones by hypothesis, long ones by a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from rollout_factory import RolloutFactory, as_group, prompt_tokens

from tba_megatron.types import FOREIGN_ATTEMPT, PolicySpan, PolicyVersion, Rollout, RolloutGroup, StopReason


@dataclass(frozen=True, kw_only=True)
class Add:
    groups: tuple[RolloutGroup, ...]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Rollouts are picked by their place among those that are held, modulo their number."""

    picks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Refer:
    picks: tuple[int, ...]
    version: int


Event = Add | Train | Refer
# Short lives

COMPLETIONS = ([], [0], [1], [0, 1], [0, 0], [1, 1, 1, 1, 1])
PROMPT_IDS = ("a", "π", "a\0", "")
VERSIONS = [(0, step) for step in range(5)] + [(1, step) for step in range(1, 4)] + [(2, 2)]
FOREIGN = [(FOREIGN_ATTEMPT + attempt, step) for attempt, step in VERSIONS[1::3]]


def span(version: tuple[int, int], start: int, end: int) -> PolicySpan:
    return PolicySpan(version=PolicyVersion(*version), start=start, end=end)


@st.composite
def some_rollouts(draw: st.DrawFn, make: RolloutFactory, n_completions: int = len(COMPLETIONS)) -> Rollout:
    """Mostly valid, of few versions, and often what is there before."""
    completion = draw(st.sampled_from(COMPLETIONS[-n_completions:]))
    attempt, step = draw(st.sampled_from(VERSIONS + FOREIGN))
    n, whole = len(completion), (span((attempt, step), 0, len(completion)),)
    special = {
        "behaviour": {"behaviour_logprobs": np.full(n, -0.25, np.float32)},
        "reference": {"reference": -2.5},
        "truncated": {"stop_reason": StopReason.LENGTH},
        "two policies": {"spans": (span((0, 0), 0, 1), span((attempt, step), 1, n))} if n > 1 else {},
        "no reward": {"reward": math.nan},
        "log-probs of another": {"behaviour_logprobs": np.zeros(n + 1, np.float32)},
        "impossible log-prob": {"behaviour_logprobs": np.full(n, -np.inf, np.float32)},
        "impossible reference": {"reference": math.inf},
        "reference of nothing": {"reference_logprob": -1.0},
        "no spans": {"spans": ()},
        "spans with a gap": {"spans": (*whole, span((attempt, step), n + 1, n + 2))},
        "spans that overlap": {"spans": (*whole, *whole)},
        "aborted": {"stop_reason": StopReason.ABORT},
    }
    kinds = ["plain"] * 24 + ["behaviour", "reference", "truncated", "two policies"] * 4 + list(special)
    fields = special.get(draw(st.sampled_from(kinds)), {})
    reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return make.rollout(completion, attempt=attempt, step=step, **({"reward": reward} | fields))


@st.composite
def lives(draw: st.DrawFn) -> list[Event]:
    """Of few prompts and completions, so that pools are full of what arrives again."""
    makers = [RolloutFactory("s0"), RolloutFactory("søker\0")]
    prompt_ids = st.sampled_from(PROMPT_IDS[: draw(st.sampled_from([1, 2, len(PROMPT_IDS)]))])
    n_completions = draw(st.sampled_from([1, 2, len(COMPLETIONS)]))
    rollouts = st.one_of([some_rollouts(make, n_completions) for make in makers])

    @st.composite
    def some_groups(draw: st.DrawFn) -> RolloutGroup:
        prompt_id = draw(prompt_ids)
        right = prompt_tokens(prompt_id * 4 + "?")
        prompt = draw(st.sampled_from([right] * 25 + [right[:0], right[::-1].copy(), np.array([7], np.int32)]))
        chosen = draw(st.lists(rollouts, min_size=draw(st.sampled_from([0, 1, 3])), max_size=6))
        return RolloutGroup(prompt_id=prompt_id, prompt_token_ids=prompt, rollouts=tuple(chosen))

    picks = st.lists(st.integers(0, 99), max_size=5).map(tuple)
    n_groups = draw(st.integers(0, 2))
    add = st.builds(Add, groups=st.lists(some_groups(), min_size=n_groups, max_size=4).map(tuple))
    train = st.builds(Train, picks=picks)
    refer = st.builds(Refer, picks=picks, version=st.integers(0, 3))
    events = draw(st.lists(st.one_of(add, add, add, train, refer), min_size=draw(st.sampled_from([1, 6])), max_size=9))
    again = [event for event in events if isinstance(event, Add) and draw(st.booleans())]
    return events + again  # what is given twice is received twice


@st.composite
def odd_rollouts(draw: st.DrawFn) -> Rollout:
    """Every field near its law."""
    few, floats = st.integers(-1, 3), st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf])
    versions = st.builds(PolicyVersion, st.integers(-1, 2), st.integers(-1, 2))
    spans = st.lists(st.builds(PolicySpan, version=versions, start=few, end=few), max_size=3)
    return RolloutFactory().rollout(
        draw(st.sampled_from([*COMPLETIONS, [0, -1], [-5]])),
        reward=draw(floats),
        spans=tuple(draw(spans)),
        stop_reason=draw(st.sampled_from(StopReason)),
        behaviour_logprobs=draw(st.none() | st.lists(floats, max_size=3).map(lambda v: np.array(v, np.float32))),
        reference_logprob=draw(st.none() | floats),
        reference_version=draw(st.none() | st.integers(0, 1)),
    )


# Long lives


def random_life(seed: int, n_events: int, n_prompts: int) -> Iterator[Event]:
    """Long enough that arrays grow, places are used again, and most of what was held has left. A fifth is foreign."""
    rng = np.random.default_rng(seed)
    make = RolloutFactory()
    for i in range(n_events):
        groups = []
        for prompt in rng.integers(n_prompts, size=rng.integers(1, 12)).tolist():
            steps = np.maximum(0, i // 4 - rng.integers(0, 4, size=rng.integers(1, 12)))
            length = rng.choice([2, 40])
            attempt = FOREIGN_ATTEMPT if rng.random() < 0.2 else 0
            tokens = [rng.integers(3, size=rng.integers(length)).tolist() for _ in steps]
            rollouts = [make.rollout(ids, attempt=attempt, step=int(s)) for ids, s in zip(tokens, steps, strict=True)]
            groups.append(as_group(f"p{prompt}", rollouts))
        yield Add(groups=tuple(groups))
        if i % 3 == 0:
            yield Train(picks=tuple(rng.integers(10_000, size=16).tolist()))
            yield Refer(picks=tuple(rng.integers(10_000, size=16).tolist()), version=i)
