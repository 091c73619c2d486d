"""The balance op against its specification and its laws. T tokens, S sequences, G groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tba_megatron.errors import KernelError
from tba_megatron.kernels.balance import BalanceOut, balance, coefficients, segment_sum
from tba_megatron.kernels.reference import balance_reference

SEEDS = given(st.integers(0, 10_000))
FEW = settings(max_examples=40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of ``balance``; the reference is per token."""

    logprob: Tensor
    reference: Tensor
    sequence_index: Tensor
    group_index: Tensor
    reward_over_beta: Tensor
    copies: Tensor
    n_groups: int
    scale: float = 0.037

    def terms(self) -> dict:
        return {name: getattr(self, name) for name in ("reward_over_beta", "copies", "n_groups", "scale")}


def case_of(sequences: list[int], groups: list[int], n_groups: int, *, seed: int = 0, dtype=torch.float64) -> Case:
    """Random values for tokens of ``sequences`` in ``groups``."""
    rng = np.random.default_rng(seed)
    n_tokens, n_sequences = len(sequences), len(groups)
    return Case(
        logprob=torch.from_numpy(-3 * rng.random(n_tokens)).to(dtype),
        reference=torch.from_numpy(-3 * rng.random(n_tokens)).to(dtype),
        sequence_index=torch.tensor(sequences, dtype=torch.int64),
        group_index=torch.tensor(groups, dtype=torch.int64),
        reward_over_beta=torch.from_numpy(20 * rng.random(n_sequences)),
        copies=torch.from_numpy(rng.integers(1, 5, n_sequences).astype(float)),
        n_groups=n_groups,
    )


def random_case(seed: int, **options) -> Case:
    """Tokens and sequences in no order, some sequences without tokens, some groups of one or no sequence."""
    rng = np.random.default_rng(seed)
    n_sequences, n_groups = int(rng.integers(1, 12)), int(rng.integers(1, 6))
    sequences = rng.integers(0, n_sequences, rng.integers(0, 60))
    groups = rng.integers(0, n_groups, n_sequences)
    return case_of(sequences.tolist(), groups.tolist(), n_groups, seed=seed, **options)


def run(case: Case, *, sums: bool = False, **options) -> BalanceOut:
    reference = (
        {"reference_sums": segment_sum(case.reference, case.sequence_index, len(case.group_index))}
        if sums
        else {"reference": case.reference}
    )
    return balance(case.logprob, case.sequence_index, case.group_index, **reference, **case.terms(), **options)


def gradient(case: Case) -> Tensor:
    leaf = case.logprob.detach().clone().requires_grad_()
    run(replace(case, logprob=leaf)).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_same(found: BalanceOut, expected: BalanceOut, tolerance: float = 1e-12) -> None:
    for field in fields(BalanceOut):
        assert_close(getattr(found, field.name), getattr(expected, field.name), tolerance)


# The specification


def test_a_case_computed_by_hand():
    found = balance(
        torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64),
        torch.tensor([0, 1, 0]),
        torch.tensor([0, 0]),
        reference=torch.tensor([-1.5, -1.5, -0.5], dtype=torch.float64),
        reward_over_beta=torch.tensor([2.0, 0.0], dtype=torch.float64),
        copies=torch.tensor([1.0, 3.0], dtype=torch.float64),
        n_groups=2,
        scale=0.5,
    )
    # r / beta - kl = 1.5, 0.5; log Z = (1.5 + 3 * 0.5) / 4 = 0.75
    assert found.logprob.tolist() == [-1.5, -2.0]
    assert found.kl.tolist() == [0.5, -0.5]
    assert found.log_z.tolist() == [0.75, 0.0]
    assert found.residual.tolist() == [-0.75, 0.25]
    assert found.coefficient.tolist() == [-0.75, 0.75]
    assert found.loss.item() == 0.5 * (0.75**2 + 3 * 0.25**2)


@SEEDS
@FEW
def test_the_loss_and_its_gradient_are_those_of_the_specification(seed):
    case = random_case(seed)
    leaf = case.logprob.detach().clone().requires_grad_()
    expected = balance_reference(leaf, case.reference, case.sequence_index, case.group_index, **case.terms())
    (expected_gradient,) = torch.autograd.grad(expected.loss, leaf)
    found = run(case)
    # Groups of one have no loss but the rounding of residuals near 20.
    torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-12, atol=1e-26)
    for name in ("kl", "residual", "log_z"):
        assert_close(getattr(found, name), getattr(expected, name).detach())
    assert_close(gradient(case), expected_gradient)
    assert_close(found.coefficient[case.sequence_index], expected_gradient)


@SEEDS
@FEW
def test_sums_of_the_reference_do_the_same_as_its_tokens(seed):
    case = random_case(seed)
    assert_same(run(case, sums=True), run(case))


def test_the_gradient_is_that_of_finite_differences_with_log_z_moving():
    case = random_case(8)
    leaf = case.logprob.requires_grad_()
    assert len(leaf) > 5
    assert torch.autograd.gradcheck(lambda x: 3 * run(replace(case, logprob=x)).loss, (leaf,))


@SEEDS
@FEW
def test_letting_the_gradient_through_log_z_changes_nothing(seed):
    case = random_case(seed)
    leaf = case.logprob.detach().clone().requires_grad_()
    kl = segment_sum(leaf - case.reference, case.sequence_index, len(case.group_index))
    losses = [leaf.sum() * 0]
    for g in range(case.n_groups):
        members = case.group_index == g
        x, copies = (kl - case.reward_over_beta)[members], case.copies[members]
        if len(x):
            losses.append(case.scale * (copies * (x - (copies * x).sum() / copies.sum()).square()).sum())
    (expected,) = torch.autograd.grad(torch.stack(losses).sum(), leaf)
    assert_close(gradient(case), expected)


# Laws


@SEEDS
@FEW
def test_the_residuals_of_a_group_add_up_to_zero(seed):
    case = random_case(seed)
    found = run(case)
    assert_close(
        segment_sum(case.copies * found.residual, case.group_index, case.n_groups), torch.zeros_like(found.log_z)
    )


@SEEDS
@FEW
def test_adding_a_constant_to_the_rewards_of_a_group_moves_its_log_z_alone(seed):
    case = random_case(seed)
    shift_G = torch.linspace(-50, 50, case.n_groups, dtype=torch.float64)
    shifted = replace(case, reward_over_beta=case.reward_over_beta + shift_G[case.group_index])
    before, after = run(case), run(shifted)
    has_members = torch.bincount(case.group_index, minlength=case.n_groups) > 0
    assert_same(after, replace(before, log_z=torch.where(has_members, before.log_z + shift_G, 0.0)))
    assert_close(gradient(shifted), gradient(case))


@SEEDS
@FEW
def test_the_order_of_tokens_sequences_and_groups_changes_nothing(seed):
    case, generator = random_case(seed), torch.Generator().manual_seed(seed)
    tokens, sequences, groups = (
        torch.randperm(n, generator=generator) for n in (len(case.logprob), len(case.group_index), case.n_groups)
    )
    place_S, place_G = torch.argsort(sequences), torch.argsort(groups)
    mixed = replace(
        case,
        logprob=case.logprob[tokens],
        reference=case.reference[tokens],
        sequence_index=place_S[case.sequence_index[tokens]],
        group_index=place_G[case.group_index[sequences]],
        reward_over_beta=case.reward_over_beta[sequences],
        copies=case.copies[sequences],
    )
    found, expected = run(mixed), run(case)
    by_sequence = {name: getattr(found, name)[place_S] for name in ("logprob", "kl", "residual", "coefficient")}
    assert_same(replace(found, **by_sequence, log_z=found.log_z[place_G]), expected)
    assert_close(gradient(mixed), gradient(case)[tokens])


@SEEDS
@FEW
def test_groups_split_over_parts_give_the_loss_and_coefficients_of_the_whole(seed):
    """Tokens of one sequence in several parts, as over context-parallel ranks, and so sequences over microbatches."""
    case, rng = random_case(seed), np.random.default_rng(seed)
    part_T, kl = torch.from_numpy(rng.integers(0, 3, len(case.logprob))), torch.zeros(len(case.group_index)).double()
    for part in range(3):
        mine = part_T == part
        part_case = replace(
            case,
            logprob=case.logprob[mine],
            reference=case.reference[mine],
            sequence_index=case.sequence_index[mine],
        )
        kl += run(part_case).kl
    found = coefficients(kl, case.reward_over_beta, case.copies, case.group_index, case.n_groups, scale=case.scale)
    whole = run(case)
    for name in ("loss", "residual", "log_z", "coefficient"):
        assert_close(getattr(found, name), getattr(whole, name))
    assert_close(found.coefficient[case.sequence_index], gradient(case))


@SEEDS
@FEW
def test_copies_of_a_sequence_are_as_many_sequences(seed):
    case = random_case(seed)
    copied = torch.repeat_interleave(torch.arange(len(case.group_index)), case.copies.long())
    tokens = [(case.sequence_index == int(s)).nonzero()[:, 0] for s in copied]
    token, n_each = torch.cat(tokens), torch.tensor([len(t) for t in tokens])
    written_out = replace(
        case,
        logprob=case.logprob[token],
        reference=case.reference[token],
        sequence_index=torch.repeat_interleave(torch.arange(len(copied)), n_each),
        group_index=case.group_index[copied],
        reward_over_beta=case.reward_over_beta[copied],
        copies=torch.ones(len(copied), dtype=torch.float64),
    )
    found, expected = run(written_out), run(case)
    assert_close(found.loss, expected.loss)
    assert_close(found.log_z, expected.log_z)
    assert_close(segment_sum(found.coefficient, copied, len(case.group_index)), expected.coefficient)


# Numbers


@pytest.mark.parametrize("sums", [False, True])
def test_32_thousand_float32_tokens_a_sequence_are_summed_to_a_billionth(sums):
    sequences = np.random.default_rng(0).permutation(np.repeat(np.arange(8), 32_768))
    case = case_of(sequences.tolist(), [0, 1] * 4, 2, dtype=torch.float32)
    found = run(case, sums=sums)
    for s in range(8):
        mine = case.sequence_index == s
        logprobs, references = case.logprob[mine].tolist(), case.reference[mine].tolist()
        assert found.logprob[s].item() == pytest.approx(math.fsum(logprobs), abs=1e-9)
        kl = math.fsum([*logprobs, *(-r for r in references)])
        assert found.kl[s].item() == pytest.approx(kl, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_has_the_dtype_of_the_log_probs_and_the_rest_is_float64(dtype):
    case = random_case(3, dtype=dtype)
    found = run(case)
    assert {getattr(found, field.name).dtype for field in fields(BalanceOut)} == {torch.float64}
    assert gradient(case).dtype == dtype
    assert torch.equal(gradient(case), found.coefficient.to(dtype)[case.sequence_index])


def test_only_the_loss_has_a_gradient_and_it_is_scaled_by_what_comes_from_above():
    case = random_case(4)
    leaf = case.logprob.detach().clone().requires_grad_()
    found = run(replace(case, logprob=leaf))
    assert [field.name for field in fields(BalanceOut) if getattr(found, field.name).requires_grad] == ["loss"]
    (scaled,) = torch.autograd.grad(7 * found.loss, leaf)
    assert_close(scaled, 7 * gradient(case))
    with torch.no_grad():
        assert not run(replace(case, logprob=leaf)).loss.requires_grad


def test_int32_indices_do_as_well():
    case = random_case(5)
    narrow = replace(case, sequence_index=case.sequence_index.int(), group_index=case.group_index.int())
    assert_same(run(narrow), run(case))
    assert torch.equal(gradient(narrow), gradient(case))


# What has no members


@pytest.mark.parametrize(
    ("sequences", "groups", "n_groups"),
    [([], [], 0), ([], [], 3), ([], [1, 0, 1], 2), ([2, 2, 0], [0, 0, 0], 1), ([0, 0, 1], [0, 3], 5)],
    ids=["nothing", "empty groups", "no tokens", "an empty sequence", "groups of one and of none"],
)
@pytest.mark.parametrize("sums", [False, True])
def test_sequences_and_groups_without_members_are_legal(sequences, groups, n_groups, sums):
    case = case_of(sequences, groups, n_groups)
    found = run(case, sums=sums)
    expected = balance_reference(case.logprob, case.reference, case.sequence_index, case.group_index, **case.terms())
    for name in ("loss", "kl", "residual", "log_z"):
        assert_close(getattr(found, name), getattr(expected, name))
    assert gradient(case).shape == case.logprob.shape


def test_a_group_of_one_has_neither_loss_nor_gradient():
    case = replace(case_of([0, 0, 1], [0, 1], 2), copies=torch.tensor([1.0, 4.0]).double())
    assert run(case).loss.item() == 0
    assert gradient(case).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["logprob", "reference", "reward_over_beta"])
@pytest.mark.parametrize("sums", [False, True])
def test_a_value_that_is_not_finite_makes_the_loss_nan_and_leaves_other_groups_alone(where, value, sums):
    case = case_of([0, 1, 2, 3, 4], [0, 0, 1, 1, 2], 3)
    values = getattr(case, where).clone()
    values[2] = value
    found, expected = run(replace(case, **{where: values}), sums=sums), run(case)
    assert found.loss.isnan()
    others = case.group_index != 1
    assert_close(found.coefficient[others], expected.coefficient[others])
    assert found.coefficient[2].isnan()


def test_a_sequence_without_copies_adds_nothing_even_where_it_is_not_a_number():
    case = case_of([0, 1, 2, 1], [0, 0, 0], 1)
    case = replace(case, copies=torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    broken = replace(case, logprob=case.logprob.clone(), reward_over_beta=case.reward_over_beta.clone())
    broken.logprob[1] = broken.reward_over_beta[1] = math.nan
    without = case_of([0, 1], [0, 0], 1)
    kept = torch.tensor([0, 2])
    without = replace(
        without, **{name: getattr(case, name)[kept] for name in ("logprob", "reference", "reward_over_beta", "copies")}
    )
    for one in (case, broken):
        assert_close(run(one).loss, run(without).loss)
        assert_close(gradient(one)[kept], gradient(without))
        assert gradient(one)[[1, 3]].tolist() == [0, 0]
    none = run(replace(case, copies=torch.zeros(3)))
    assert (none.loss.item(), none.log_z.tolist(), none.coefficient.tolist()) == (0, [0], [0, 0, 0])


# Errors


def arguments(**changes) -> dict:
    case = random_case(1)
    given = {name: getattr(case, name) for name in ("logprob", "reference", "sequence_index", "group_index")}
    return given | case.terms() | changes


LONG = torch.zeros(99, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reference": None}, "neither of reference"),
        ({"reference_sums": LONG}, "both of reference"),
        ({"reference": LONG}, "reference has shape [99]"),
        ({"reference": None, "reference_sums": LONG}, "reference_sums has shape [99]"),
        ({"logprob": LONG.bfloat16()}, "logprob is torch.bfloat16"),
        ({"logprob": LONG[None]}, "of shape [1, 99]"),
        ({"sequence_index": LONG.long()}, "sequence_index has shape [99]"),
        ({"copies": LONG}, "copies has shape [99]"),
        ({"reward_over_beta": LONG}, "reward_over_beta has shape [99]"),
        ({"group_index": LONG.long()}, "group_index [99]"),
        ({"n_groups": 0}, "give 0 to -1"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": math.inf}, "scale is inf"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_bad_input_is_one_clear_line(changes, named):
    with pytest.raises(KernelError) as error:
        balance(**arguments(**changes))
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sequence_index", "group_index"])
@pytest.mark.parametrize("value", [-1, 99])
def test_an_index_out_of_range_is_refused(name, value):
    index = arguments()[name].clone()
    index[0] = value
    with pytest.raises(KernelError, match=f"{name} goes from .*{value}"):
        balance(**arguments(**{name: index}))
    with pytest.raises(KernelError, match=f"{name} is torch.float32"):
        balance(**arguments(**{name: index.float()}))


def test_coefficients_refuses_the_same():
    case = random_case(1)
    kl = torch.zeros(len(case.group_index), dtype=torch.float64)
    with pytest.raises(KernelError, match="kl has shape"):
        coefficients(kl[1:], case.reward_over_beta, case.copies, case.group_index, case.n_groups, scale=1.0)
    with pytest.raises(KernelError, match="scale is nan"):
        coefficients(kl, case.reward_over_beta, case.copies, case.group_index, case.n_groups, scale=math.nan)
