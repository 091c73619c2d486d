"""Sources of rollouts: who samples how, whose tokenizer fits, and the metrics that tell sources apart."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import NEW_RUN, RolloutFactory, as_batch, as_group
from sampler_steps import SAMPLERS, draw_one, shard_of
from shard_lives import odd_rollouts
from test_sentencepiece_tokenizer import published, small_model, write_folder
from tokenizers import Tokenizer, models

from tba_megatron.config import Config
from tba_megatron.config_load import load_config
from tba_megatron.errors import ModelError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.search.source import check_same_tokenizer, fixed_model, sampling_of, takes_every
from tba_megatron.trainer.notes import DrawFacts, Note, SourceCounts, draw_facts, received_by_source
from tba_megatron.trainer.source_metrics import SourceMetrics
from tba_megatron.types import FOREIGN_ATTEMPT, PolicyHistory, Rollout, SamplingSettings

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny_qwen2"


# ---- what a searcher of a source is


def config_of(source: str = "searcher", *overrides: str) -> Config:
    sources = f"{{hot: {{temperature: 1.5, top_p: 0.9}}, slow: {{policy: {{kind: lagging, steps: 7}}}}, \
teacher: {{policy: {{kind: fixed, path: {TINY}}}}}}}"
    return load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            *(f"search.sources={sources}", f"search.source={source}", "search.temperature=0.7"),
            *("buffer.sampler.recent_probability=0.5", *overrides),
        ],
    )


def test_a_source_samples_in_its_own_way():
    def sampling(temperature: float, top_p: float) -> SamplingSettings:
        search = config_of().search
        n, most = search.completions_per_prompt, search.max_new_tokens
        return SamplingSettings(n=n, temperature=temperature, top_p=top_p, max_new_tokens=most, eos_ids=(1, 5))

    assert sampling_of(config_of(), (1, 5), 3) == sampling(0.7, 1.0)
    assert sampling_of(config_of("hot"), (1, 5), 3) == sampling(1.5, 0.9)


@pytest.mark.parametrize(("source", "steps"), [("searcher", 1), ("hot", 1), ("slow", 7), ("teacher", 0)])
def test_a_source_takes_each_version_some_or_none(source, steps):
    assert takes_every(config_of(source)) == steps
    assert fixed_model(config_of(source)) == (TINY if source == "teacher" else None)


@pytest.mark.parametrize(("make", "words"), [(False, "is no folder"), (True, r"has no config\.json")])
def test_a_fixed_policy_that_is_not_there_is_one_line(tmp_path, make, words):
    folder = tmp_path / "teacher"
    if make:
        folder.mkdir()
    sources = f"search.sources={{teacher: {{policy: {{kind: fixed, path: {folder}}}}}}}"
    with pytest.raises(ModelError, match=rf"^search\.sources\.teacher\.policy\.path: .*teacher {words}; .*$"):
        fixed_model(config_of("teacher", sources))


# ---- whose tokenizer is the run's


@pytest.fixture
def other(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "other"))


def change(folder: Path, name: str, changed) -> None:
    path = folder / name
    content = json.loads(path.read_text())
    path.write_text(json.dumps(changed(content), indent=3, sort_keys=True, ensure_ascii=False))


def difference(run_model: Path, other: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_same_tokenizer(run_model, other)
    start, end = f"{other}: another tokenizer than that of {run_model}: ", "; a fixed policy needs a model with the"
    message = str(caught.value)
    assert message.startswith(start) and "\n" not in message
    return message.removeprefix(start).partition(end)[0]


def bpe_folder(folder: Path, merges: list[tuple[str, str]]) -> Path:
    """A tokenizer of the letters a to d and all that ``merges`` make, and EOS."""
    folder.mkdir()
    pieces = sorted({*"abcd", "ab", "bc", "cd"})
    vocabulary = {piece: i for i, piece in enumerate(pieces)} | {"<eos>": len(pieces)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=merges)).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": len(pieces), "vocab_size": 16}))
    return folder


def test_the_same_tokenizer_in_other_words_passes(other, tmp_path):
    check_same_tokenizer(TINY, TINY)
    change(other, "tokenizer.json", lambda content: content | {"truncation": None, "padding": None})
    change(other, "config.json", lambda content: content | {"vocab_size": 64})
    assert (other / "tokenizer.json").read_bytes() != (TINY / "tokenizer.json").read_bytes()
    check_same_tokenizer(TINY, other)
    mine = bpe_folder(tmp_path / "a", [("a", "b"), ("c", "d")])
    theirs = bpe_folder(tmp_path / "b", [("a", "b"), ("c", "d")])

    def in_one_string(content):
        merges = [" ".join(pair) for pair in content["model"]["merges"]]
        return content | {"model": content["model"] | {"merges": merges}}

    change(theirs, "tokenizer.json", in_one_string)
    check_same_tokenizer(mine, theirs)


def test_another_number_of_tokens_is_told(other):
    token = {"id": 19, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": False}
    change(other, "tokenizer.json", lambda c: c | {"added_tokens": [*c["added_tokens"], token]})
    change(other, "config.json", lambda content: content | {"vocab_size": 20})
    assert difference(TINY, other) == "it has 20 tokens, not 19"
    assert difference(other, TINY) == "it has 19 tokens, not 20"


def test_the_first_token_that_differs_is_told(other):
    def swapped(content):
        vocabulary = content["model"]["vocab"]
        first, second = (text for text, i in vocabulary.items() if i in (4, 7))
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        return content

    texts = {i: text for text, i in HfTokenizer(TINY).ids.items()}
    change(other, "tokenizer.json", swapped)
    assert difference(TINY, other) == f"token 4 is {texts[7]!r}, not {texts[4]!r}"


def test_another_end_of_sequence_is_told_and_their_order_is_none(other):
    change(other, "generation_config.json", lambda content: content | {"eos_token_id": [7, 1]})
    assert difference(TINY, other) == "its end-of-sequence ids are 1, 7, not 1"
    turned = Path(shutil.copytree(other, other.with_name("turned")))
    change(turned, "generation_config.json", lambda content: content | {"eos_token_id": [1, 7]})
    check_same_tokenizer(other, turned)


def test_texts_that_are_cut_in_another_way_are_told(tmp_path):
    mine = bpe_folder(tmp_path / "a", [("a", "b"), ("b", "c"), ("c", "d")])
    theirs = bpe_folder(tmp_path / "b", [("b", "c"), ("a", "b"), ("c", "d")])
    assert HfTokenizer(mine).ids == HfTokenizer(theirs).ids
    assert difference(mine, theirs).startswith("it cuts '")
    assert difference(mine, theirs).endswith("' into other tokens")


def test_a_special_token_that_is_plain_text_elsewhere_is_told(other):
    change(other, "tokenizer.json", lambda c: c | {"added_tokens": [t for t in c["added_tokens"] if t["id"] != 0]})
    assert difference(TINY, other) == "it cuts '<pad>' into other tokens"


def test_a_bare_sentencepiece_model_is_compared_with_the_tokenizer_json_of_the_same_and_of_another(tmp_path):
    settings = {"legacy": True, "eos_token": "</s>"}
    bare = write_folder(tmp_path / "bare", small_model(), settings)
    whole = write_folder(tmp_path / "whole", small_model(), settings)
    published(small_model()).save(str(whole / "tokenizer.json"))
    check_same_tokenizer(bare, bare)
    check_same_tokenizer(whole, bare)
    check_same_tokenizer(bare, whole)
    assert difference(TINY, bare) == f"it has {len(HfTokenizer(bare).ids)} tokens, not 19"


def test_a_folder_without_a_tokenizer_is_one_line(other):
    (other / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"other: no tokenizer\.json and no tokenizer\.model"):
        check_same_tokenizer(TINY, other)


# ---- what came in, by source


SOURCES = ("searcher", "teacher", "hot")


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Rollouts of any rewards and lengths, of few sources and searchers."""
    rollouts = st.builds(_of, odd_rollouts(), st.sampled_from(SOURCES))
    groups = draw(st.lists(st.lists(rollouts, max_size=5), max_size=4))
    return as_batch(*(as_group(f"p{i}", group) for i, group in enumerate(groups)))


def _of(rollout: Rollout, source: str) -> Rollout:
    return RolloutFactory("hot").rollout(
        rollout.token_ids.tolist(), reward=rollout.reward, stop_reason=rollout.stop_reason, source=source
    )


def counted(batch: RolloutBatch) -> dict[str, SourceCounts]:
    """The specification: one rollout after another."""
    counts: dict[str, SourceCounts] = defaultdict(SourceCounts)
    for group in batch.groups():
        for rollout in group.rollouts:
            finite = math.isfinite(rollout.reward)
            counts[rollout.source] += SourceCounts(
                rollouts=1,
                reward_sum=rollout.reward if finite else 0.0,
                rewards=int(finite),
                completion_tokens=len(rollout.token_ids),
            )
    return dict(counts)


@settings(max_examples=200)
@given(batches())
def test_what_comes_in_is_counted_by_source_as_one_rollout_after_another(batch):
    assert received_by_source(batch) == received_by_source(decode(encode(batch))) == counted(batch)


# ---- what a step drew, by source


def mixed_shard():
    """Prompts whose pools two sources have filled; the teacher's versions are foreign."""
    groups, make = [], {name: RolloutFactory(name) for name in ("s", "t")}
    for i in range(6):
        own = [make["s"].rollout([i, j], step=i, reward=0.25 * j, source="searcher") for j in range(3)]
        taught = [
            make["t"].rollout([9] * (i + j), attempt=FOREIGN_ATTEMPT, step=i, reward=0.5, source="teacher")
            for j in range(1, 3)
        ]
        groups += [as_group(f"p{i}", own), as_group(f"p{i}", taught)]
    return shard_of(*groups)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_the_facts_of_a_draw_by_source_are_those_of_its_rollouts_and_add_up(sampler):
    shard, history, step = mixed_shard(), PolicyHistory(base_steps=(0,)), 5
    again = draw_one(sampler, shard, 2, 3, seed=1, step=step)
    shard.mark_trained(again.rows)
    draw = draw_one(sampler, shard, 4, 6, seed=2, step=step)
    shard.mark_trained(draw.rows)
    facts = draw_facts(draw, shard.rows, history, step, 10)
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    ages: dict[str, Counter[int]] = defaultdict(Counter)
    seen = {rollout.rollout_id for group in again.batch.train_groups() for rollout in group.rollouts}
    for group in draw.batch.train_groups():
        for rollout, n in zip(group.rollouts, group.copies, strict=True):
            sums = expected[rollout.source]
            sums["rollouts"] += n
            sums["completion_tokens"] += n * len(rollout.token_ids)
            sums["first_time"] += n * (rollout.rollout_id not in seen)
            sums["off_branch"] += n * rollout.version.is_foreign
            if not rollout.version.is_foreign:
                ages[rollout.source][step - rollout.version.step] += n
            sums["quarters"] += n * round(4 * rollout.reward)
    assert set(facts.by_source) == set(expected) and "searcher" in expected
    for source, one in facts.by_source.items():
        names = ("rollouts", "completion_tokens", "first_time", "off_branch")
        assert {name: getattr(one, name) for name in names} == {name: expected[source][name] for name in names}
        assert one.reward_sum == expected[source]["quarters"] / 4
        assert one.ages == ages[source]
    for name in ("completion_tokens", "first_time", "off_branch"):
        assert getattr(facts, name) == sum(getattr(one, name) for one in facts.by_source.values())
    assert facts.ages == sum(ages.values(), Counter())
    assert sum(one.rollouts for one in facts.by_source.values()) == 24


def test_a_version_that_nobody_can_have_run_is_off_the_branch():
    shard = shard_of(RolloutFactory().group("p", [1, 2], step=9))
    draw = draw_one(SAMPLERS["uniform"], shard, 1, 2, step=5)
    facts = draw_facts(draw, shard.rows, NEW_RUN, 5, 0)
    assert (facts.off_branch, facts.ages) == (2, Counter())
    assert len(shard.recent_rows(NEW_RUN, 5, 100)) == 0 and len(shard.recent_rows(NEW_RUN, 9, 0)) == 2


# ---- metrics


def note(**received: tuple[int, float, int, int]) -> Note:
    return Note(
        received_by_source={
            source: SourceCounts(rollouts=rollouts, reward_sum=reward, rewards=rewards, completion_tokens=tokens)
            for source, (rollouts, reward, rewards, tokens) in received.items()
        }
    )


def facts_of(rollouts: list[Rollout], step: int = 10) -> DrawFacts:
    """Of a step that drew each of ``rollouts`` once."""
    shard = shard_of(as_group("p", rollouts))
    draw = draw_one(SAMPLERS["uniform"], shard, 1, len(rollouts), step=step)
    shard.mark_trained(draw.rows)
    return draw_facts(draw, shard.rows, NEW_RUN, step, 0)


def test_one_source_has_no_metrics_of_its_own():
    metrics = SourceMetrics()
    metrics.absorb([note(searcher=(4, 2.0, 4, 40))])
    assert metrics.metrics([facts_of([RolloutFactory().rollout([1], source="searcher")])]) == {}
    assert metrics.metrics([]) == {}


def test_sources_are_told_apart_over_ranks_and_notes_from_when_a_second_one_is_seen():
    metrics, make = SourceMetrics(), RolloutFactory()
    own = [make.rollout([i], step=s, reward=r, source="searcher") for i, (s, r) in enumerate([(4, 1.0), (9, 0.0)])]
    taught = make.rollout([7] * 5, attempt=FOREIGN_ATTEMPT, step=9, reward=0.5, source="teacher")
    metrics.absorb([note(searcher=(4, 2.0, 4, 40)), note(searcher=(2, 1.0, 1, 2), teacher=(3, 0.0, 0, 9))])
    metrics.absorb([note(), note(teacher=(1, 0.5, 1, 3))])
    assert metrics.metrics(
        [facts_of([own[0], taught]), facts_of([own[1], make.rollout([3], step=10, source="hot")])]
    ) == {
        "source/hot/received": 0,
        "source/hot/drawn_share": 0.25,
        "source/hot/reward_trained": 0.0,
        "source/hot/len_trained": 1.0,
        "source/hot/first_time_share": 1.0,
        "source/hot/off_branch_frac": 0.0,
        "source/hot/age_p50": 0,
        "source/searcher/received": 6,
        "source/searcher/reward_received": 0.6,
        "source/searcher/len_received": 7.0,
        "source/searcher/drawn_share": 0.5,
        "source/searcher/reward_trained": 0.5,
        "source/searcher/len_trained": 1.0,
        "source/searcher/first_time_share": 1.0,
        "source/searcher/off_branch_frac": 0.0,
        "source/searcher/age_p50": 1,
        "source/teacher/received": 4,
        "source/teacher/reward_received": 0.5,
        "source/teacher/len_received": 3.0,
        "source/teacher/drawn_share": 0.25,
        "source/teacher/reward_trained": 0.5,
        "source/teacher/len_trained": 5.0,
        "source/teacher/first_time_share": 1.0,
        "source/teacher/off_branch_frac": 1.0,
    }
    # Sums are forgotten with a report, sources are not.
    assert metrics.metrics([]) == {
        f"source/{name}/{what}": 0 for name in ("hot", "searcher", "teacher") for what in ("received", "drawn_share")
    }


def test_reward_means_of_what_is_not_finite_are_left_out():
    metrics = SourceMetrics()
    metrics.absorb([note(a=(1, 0.0, 0, 3), b=(1, 1.0, 1, 3))])
    assert {name for name in metrics.metrics([]) if "reward" in name} == {"source/b/reward_received"}


def test_counts_of_a_batch_are_plain_numbers():
    batch = as_batch(as_group("p", [RolloutFactory().rollout([1, 2], reward=1.0, source="a")]))
    (counts,) = received_by_source(batch).values()
    assert [
        type(value) for value in (counts.rollouts, counts.reward_sum, counts.rewards, counts.completion_tokens)
    ] == [
        int,
        float,
        int,
        int,
    ]
    assert received_by_source(as_batch()) == {}
    assert np.isfinite(counts.reward_sum)
