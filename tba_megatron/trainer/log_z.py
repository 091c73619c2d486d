"""A learned log Z of the prompt: a linear map of the mean of its last hidden states, beside the model and not of it.

The hidden states are detached: the trunk gets no gradient from log Z, so Megatron's optimizer, its clipping and its
gradient norm know nothing of it. Every rank holds the same head and updates it with the same sum. It is H + 1 numbers,
of which the exported model and published weights have none.
T packed tokens, S sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tba_megatron.types import PackedMicrobatch

# Nats: gradients below it make less than whole steps. Adam turns rounding noise of a mean residual of 0, which is where
# the bias starts, into steps of its rate otherwise.
_ADAM_EPS = 1e-3


class LogZ:
    """log Z(x) = weight features(x) + bias in nats, float32, with torch's Adam.

    It starts, for every prompt, at the mean of the first batch's VarGrad estimates, r / beta - log pi + log pi_ref. At
    0 it would be off by the order of reward / beta, thousands of steps away with a small beta, and all that time the
    policy would be pushed towards whatever has a reward above 0. Adam's rate is ``learning_rate`` for the bias, and
    ``learning_rate`` / H for the weights: with hidden states of order 1 both then move log Z by about as much, whatever
    H is. Adam's steps do not depend on the size of a gradient, so it is not clipped.
    """

    def __init__(self, hidden_size: int, learning_rate: float, device: torch.device) -> None:
        self.weight = torch.zeros(hidden_size, dtype=torch.float32, device=device)
        self.bias = torch.zeros(1, dtype=torch.float32, device=device)
        self._adam = torch.optim.Adam(
            [
                {"params": [self.weight], "lr": learning_rate / hidden_size},
                {"params": [self.bias], "lr": learning_rate},
            ],
            eps=_ADAM_EPS,
        )
        self.steps = 0  # that were made

    def values(self, features_S: Tensor) -> Tensor:
        """float64 [S] of features [S, H], without gradient."""
        return features_S.double() @ self.weight.double() + self.bias.double()

    def start(self, log_z: float) -> None:
        """The log Z of every prompt, before the first step."""
        self.bias.fill_(log_z)

    def step(self, gradient: Tensor) -> None:
        """One step of Adam with the gradient [H + 1], the bias's last."""
        for parameter, part in ((self.weight, gradient[:-1]), (self.bias, gradient[-1:])):
            parameter.grad = part.to(parameter)
        self._adam.step()
        self.steps += 1

    def state(self) -> dict[str, np.ndarray]:
        """A copy of everything: weight and bias, Adam's moments of both, and the number of steps."""
        arrays = {"steps": np.array(self.steps, np.int64)}
        for name, parameter in self._parameters().items():
            moments = self._adam.state.get(parameter, {})
            arrays[name] = _copy(parameter)
            for moment in _MOMENTS:
                arrays[f"{name}.{moment}"] = _copy(moments.get(moment, torch.zeros_like(parameter)))
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """What ``state`` gave; ValueError for that of a model of another size, KeyError where something is missing."""
        self.steps = int(arrays["steps"])
        for name, parameter in self._parameters().items():
            found = {part: _tensor(arrays, part, parameter) for part in (name, *(f"{name}.{m}" for m in _MOMENTS))}
            parameter.copy_(found[name])
            self._adam.state[parameter] = {
                "step": torch.tensor(float(self.steps)),
                **{moment: found[f"{name}.{moment}"] for moment in _MOMENTS},
            }

    def _parameters(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}


_MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.Adam names them


def _copy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def _tensor(arrays: Mapping[str, np.ndarray], name: str, like: Tensor) -> Tensor:
    found = arrays[name]
    if found.shape != tuple(like.shape):
        raise ValueError(f"{name} has the shape {found.shape}, but this model needs {tuple(like.shape)}")
    return torch.from_numpy(found).to(like)


def prompt_means(hidden: Tensor, microbatch: PackedMicrobatch) -> Tensor:
    """float32 [S, H]: the mean of ``hidden`` [T, H] over the positions of each sequence's prompt.

    The last of them predicts the first token of the completion, so it is a response position too.
    """
    n = microbatch.n_sequences
    lengths = microbatch.cu_seqlens[1 : n + 1] - microbatch.cu_seqlens[:n]
    completions = np.bincount(microbatch.sequence_index[microbatch.response], minlength=n)
    starts = microbatch.cu_seqlens[:n]
    means = [
        hidden[start : start + length].float().mean(0)
        for start, length in zip(starts.tolist(), (lengths - completions).tolist(), strict=True)
    ]
    return torch.stack(means) if means else hidden.new_zeros((0, hidden.shape[1]), dtype=torch.float32)
