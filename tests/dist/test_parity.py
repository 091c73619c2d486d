"""Every way of splitting the model or the batch gives what Hugging Face, or one rank, gives."""

from __future__ import annotations

import functools

import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.errors import ConfigError
from tba_megatron.models.registry import read_model
from tba_megatron.trainer.megatron_config import transformer_config

BATCHES = [tiny.train_groups(4, seed=seed) for seed in range(3)]
KINDS = {"qwen2_tied": ("qwen2", True), "qwen2_untied": ("qwen2", False), "llama_untied": ("llama", False)}
LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
}
# Each kind meets the layouts that treat it differently from the others: a tied embedding crosses the pipeline.
CASES = [
    *[("qwen2_tied", layout) for layout in LAYOUTS],
    ("qwen2_untied", "tp2_pp2"),
    ("llama_untied", "tp2"),
    ("llama_untied", "pp2"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(policy, reference) folders by kind."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: (
            tiny.save_model(root / name, kind, tied=tied, seed=1),
            tiny.save_model(root / f"{name}_reference", kind, tied=tied, seed=2),
        )
        for name, (kind, tied) in KINDS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders):
    @functools.cache
    def train(kind: str) -> tiny.Trained:
        return run_ranks(tiny.train_on_rank, tiny.trainer_config(), *folders[kind], BATCHES)[0]

    return train


def hf_logprobs(folder, groups):
    """The completion's log-prob sum of each rollout, by Hugging Face, one sequence at a time."""
    model, sums = tiny.load_hf_model(folder), {}
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([*group.prompt_token_ids.tolist(), *rollout.token_ids.tolist()])
            first = len(group.prompt_token_ids)
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            chosen = logprobs[first - 1 : -1].gather(1, tokens[first:, None])
            sums[rollout.rollout_id.sequence] = float(chosen.double().sum())
    return sums


def split_run(folders, kind, layout, **fields):
    sizes = {k: v for k, v in layout.items() if k in ("tp", "pp", "dp")}
    trainer = tiny.trainer_config(**layout, **fields)
    return run_ranks(tiny.train_on_rank, trainer, *folders[kind], BATCHES, **sizes)


def joined_logprobs(ranks):
    found = {}
    for rank in ranks:
        found.update(rank.logprobs)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_response_logprobs_are_those_of_hugging_face(kind, folders, one_rank):
    expected = hf_logprobs(folders[kind][0], BATCHES[0])
    assert one_rank(kind).logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_split_run_is_the_run_of_one_rank(kind, layout, folders, one_rank):
    expected, ranks = one_rank(kind), split_run(folders, kind, LAYOUTS[layout])
    assert joined_logprobs(ranks) == pytest.approx(expected.logprobs, abs=1e-5)
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    for mine, theirs in zip(ranks[0].statistics, expected.statistics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for rank in ranks:
        assert rank.norms == pytest.approx(expected.norms, rel=1e-5)
        assert rank.rates == expected.rates
        assert not any(rank.skipped)
    for step in (0, 2):
        found = tiny.whole([rank.weights[step] for rank in ranks])
        tiny.assert_same_weights(found, expected.weights[step], 1e-5)


def test_training_moves_every_parameter(folders, one_rank):
    before = dict(tiny.load_hf_model(folders["qwen2_tied"][0]).named_parameters())
    for name, after in one_rank("qwen2_tied").weights[-1].items():
        assert (after != before[name]).any(), name


@pytest.mark.parametrize("microbatch_tokens", [1, 10_000])
def test_how_groups_fall_into_microbatches_changes_nothing(microbatch_tokens, folders, one_rank):
    expected = one_rank("qwen2_tied")
    (found,) = split_run(folders, "qwen2_tied", {}, microbatch_tokens=microbatch_tokens)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-6)


def test_replicas_may_have_different_numbers_of_microbatches(folders, one_rank):
    expected = one_rank("qwen2_tied")
    lopsided = [[batch[0], batch[1], batch[2], batch[3]] for batch in BATCHES]
    trainer = tiny.trainer_config(dp=2)

    def body(groups):
        mine = trainer.model_copy(update={"microbatch_tokens": 1 if groups.dp_rank else 10_000})
        rank = tiny.Rank(groups, mine, *folders["qwen2_tied"])
        return len(rank.packs(lopsided[0])), rank.train(lopsided)

    (n0, found), (n1, _) = run_ranks(body, dp=2)
    assert (n0, n1) == (1, 2)
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-5)


def uneven_stages(groups, trainer, folder, reference_folder):
    rank = tiny.Rank(groups, trainer, folder, reference_folder)
    return len(rank.policy.chunks[0].decoder.layers), rank.train(BATCHES)


def test_three_layers_on_two_uneven_stages(tmp_path):
    folders = [tiny.save_model(tmp_path / str(seed), layers=3, seed=seed) for seed in (1, 2)]
    (expected,) = run_ranks(tiny.train_on_rank, tiny.trainer_config(), *folders, BATCHES)
    trainer = tiny.trainer_config(pp=2, megatron_extra={"num_layers_in_first_pipeline_stage": 2})
    ranks = run_ranks(uneven_stages, trainer, *folders, pp=2)
    assert [layers for layers, _ in ranks] == [2, 1]
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=1e-5)
    found = tiny.whole([trained.weights[-1] for _, trained in ranks])
    tiny.assert_same_weights(found, expected.weights[-1], 1e-5)


def probabilities_of_all_tokens(groups, folder):
    """Sum over the vocabulary of the probability at each response position, by the head of the trainer."""
    from tba_megatron.trainer.head import response_logprobs
    from tba_megatron.trainer.model import forward, to_device

    rank = tiny.Rank(groups, tiny.trainer_config(tp=groups.tp_size), folder)
    (pack,) = rank.packs(BATCHES[0][:1])
    batch = to_device(pack.microbatch, groups.device)
    with torch.no_grad():
        logits = forward(rank.policy.chunks[0], batch)
        total = torch.zeros(len(batch.rows))
        for token in range(tiny.VOCAB):
            labels = torch.full_like(batch.labels, token)
            total += response_logprobs(
                logits, batch.rows, labels, temperature=0.7, vocab_size=tiny.VOCAB, groups=groups
            ).exp()
    return logits.shape[-1], total


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2_untied"])
def test_padded_tokens_get_no_probability(kind, folders):
    for columns, total in run_ranks(probabilities_of_all_tokens, folders[kind][0], tp=2):
        assert columns == 64  # of 19 real ones, so that the second rank holds padding only
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2_untied"])
def test_padded_rows_stay_zero(kind, folders):
    ranks = split_run(folders, kind, {"tp": 2})
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in ranks[0].local:
            rows = torch.cat([rank.local[name] for rank in ranks])
            assert rows.shape[0] == 128
            assert not rows[tiny.VOCAB :].any()
            assert rows[: tiny.VOCAB].any(dim=1).all()


def test_a_wrong_world_size_is_one_line_with_both_numbers():
    def body(groups):
        from tba_megatron.trainer.parallel import open_process_groups

        with pytest.raises(ConfigError) as caught:
            open_process_groups(tensor_parallel=2, pipeline_parallel=2, data_parallel=1, seed=0, timeout_s=5.0)
        return str(caught.value)

    (message,) = run_ranks(body)
    assert "\n" not in message
    assert "has 1 ranks (torchrun)" in message and "2 x 2 x 1 = 4" in message


@pytest.mark.parametrize(
    ("sizes", "extra", "words"),
    [
        ({"tp": 4}, {}, "trainer.tensor_parallel: 4 does not divide num_key_value_heads = 2"),
        ({"pp": 3}, {}, "trainer.pipeline_parallel: 3 does not divide num_hidden_layers = 2"),
        ({}, {"no_such_field": 1}, "trainer.megatron_extra.no_such_field: unknown to TransformerConfig"),
        ({}, {"hidden_size": 64}, "trainer.megatron_extra.hidden_size: is set by another part"),
        ({}, {"num_moe_experts": 4}, "trainer.megatron_extra.num_moe_experts: mixture of experts is not supported"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_one_line(sizes, extra, words, folders):
    _, shape = read_model(folders["qwen2_tied"][0])
    with pytest.raises(ConfigError) as caught:
        transformer_config(shape, tiny.trainer_config(**sizes, megatron_extra=extra))
    assert len(caught.value.problems) == 1
    assert words in str(caught.value) and "\n" not in str(caught.value)
