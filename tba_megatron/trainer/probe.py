"""Does a searcher run what it was sent? One fixed sequence, scored by both sides with every version.

The only check that sees all of the way: conversion, wire, loading, and the engine's own arithmetic.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.dist import Groups
from tba_megatron.packing import pack_demonstrations
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.model import Policy, to_device
from tba_megatron.trainer.step import token_logprobs
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.messages import Probed
from tba_megatron.types import PolicyVersion, TokenIds

_log = logging.getLogger(__name__)

_REMEMBERED = 16  # versions whose log-probs the trainer still knows when an answer comes


def probe_tokens(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """A fixed sequence over the whole vocabulary; empty for a length of less than 2, which has nothing to score."""
    if length < 2:
        return ()
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


class Prober:
    """One rank's part in scoring the probe with the trainer's own weights."""

    def __init__(self, probe: Sequence[int], head: HeadSettings, groups: Groups, sequence_parallel: bool) -> None:
        self._head, self._groups = replace(head, temperature=1.0), groups  # as engines score
        self._batches = []
        if probe:
            ids: TokenIds = np.array(probe, np.int32)
            multiple_of = groups.tp_size if sequence_parallel else 1
            (packed,) = pack_demonstrations([(ids[:1], ids[1:])], len(ids) + multiple_of, multiple_of)
            self._batches = [to_device(packed.microbatch, groups.device)]

    def score(self, policy: Policy) -> tuple[float, ...]:
        """log p of each token but the first, in nats; empty on ranks other than the DP leader of replica 0.

        A collective over replica 0; other replicas hold the same weights and do nothing.
        """
        if not self._batches or self._groups.dp_rank != 0:
            return ()
        found = token_logprobs(policy.chunks, self._batches, self._head, self._groups)
        return tuple(found[0].float().tolist()) if self._groups.is_leader else ()


class ProbeDesk:
    """Rank 0's comparison of what searchers answer with what the trainer knows."""

    def __init__(self, config: WeightsConfig, control: ControlServer) -> None:
        self._limit_nats, self._control = config.probe_gap_nats, control
        self._known: OrderedDict[PolicyVersion, tuple[float, ...]] = OrderedDict()
        self._early: list[tuple[str, Probed]] = []
        self.answered = 0
        self.alerts = 0
        self.unknown = 0  # answers about versions that are no longer remembered
        self.last_gap_nats = 0.0  # mean over the tokens of the probe

    def know(self, version: PolicyVersion, logprobs_nats: Sequence[float]) -> None:
        self._known[version] = tuple(logprobs_nats)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def compare(self) -> None:
        """Look at all answers that have come; a searcher that is off gets the newest version again."""
        answers, self._early = self._early + self._control.take_probes(), []
        for searcher, answer in answers:
            version = PolicyVersion.parse(answer.version)
            if version in self._known:
                self._compare(searcher, answer, self._known[version])
            elif not self._known or version > max(self._known):
                self._early.append((searcher, answer))  # the trainer's own are on their way to this rank
            else:
                self.unknown += 1

    def _compare(self, searcher: str, answer: Probed, own: tuple[float, ...]) -> None:
        self.answered += 1
        gaps = (
            np.abs(np.subtract(own, answer.logprobs_nats))
            if len(own) == len(answer.logprobs_nats)
            else np.array([np.inf])
        )
        # A searcher whose weights are broken may answer NaN, which no comparison calls large.
        self.last_gap_nats = float(np.nan_to_num(gaps.mean(), nan=np.inf, posinf=np.inf))
        if self.last_gap_nats <= self._limit_nats:
            return
        self.alerts += 1
        worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf)))
        line = (
            f"searcher {searcher} does not run version {answer.version}: over the {len(own)} tokens of the probe its "
            f"log-probs are off by {self.last_gap_nats:.3g} nats in the mean, by {gaps[worst]:.3g} at token "
            f"{worst + 1} (weights.probe_gap_nats is {self._limit_nats:g}); the newest version is sent again"
        )
        _log.warning(line)
        self._control.refuse_weights(searcher, line)

    def metrics(self) -> dict[str, float]:
        return {
            "weights/probe_gap_nats": self.last_gap_nats,
            "weights/probes_total": self.answered,
            "weights/probe_alerts_total": self.alerts,
            "weights/probes_unknown_total": self.unknown,
        }
