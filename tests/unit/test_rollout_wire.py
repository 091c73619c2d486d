"""Rollouts on the wire: nothing changes on the way, and nothing that is not a group of this run comes through."""

import logging
import time
from contextlib import contextmanager

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import RolloutFactory

from tba_megatron.errors import TransportError
from tba_megatron.transport.memory import MemoryRollouts
from tba_megatron.transport.rollouts import RolloutReceiver, RolloutSender, decode_group, encode_group, owner_of
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutGroup, RolloutId, StopReason

TOKEN = "of-this-run"

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))
versions = st.builds(PolicyVersion, st.integers(0, 9), st.integers(0, 10**6))
spans = st.lists(st.builds(PolicySpan, version=versions, start=st.integers(0, 9), end=st.integers(0, 9)), min_size=1)


@st.composite
def groups(draw):
    with_logprobs = draw(st.booleans())
    searcher, source = draw(st.text()), draw(st.text())
    rollouts = []
    for sequence in range(draw(st.integers(1, 4))):
        token_ids = draw(tokens)
        logprobs = st.lists(st.floats(width=32), min_size=len(token_ids), max_size=len(token_ids))
        rollouts.append(
            Rollout(
                rollout_id=RolloutId(searcher, sequence),
                token_ids=token_ids,
                reward=draw(st.floats()),
                stop_reason=draw(st.sampled_from(StopReason)),
                spans=tuple(draw(spans)),
                source=source,
                behaviour_logprobs=np.array(draw(logprobs), np.float32) if with_logprobs else None,
            )
        )
    return RolloutGroup(
        prompt_id=draw(st.text()), prompt_token_ids=draw(tokens), rollouts=tuple(rollouts), lease=draw(st.integers(-1))
    )


def assert_same(got: RolloutGroup, sent: RolloutGroup) -> None:
    assert (got.prompt_id, got.lease) == (sent.prompt_id, sent.lease)
    np.testing.assert_array_equal(got.prompt_token_ids, sent.prompt_token_ids)
    for a, b in zip(got.rollouts, sent.rollouts, strict=True):
        assert (a.rollout_id, a.stop_reason, a.spans, a.source) == (b.rollout_id, b.stop_reason, b.spans, b.source)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_equal(a.reward, b.reward)
        np.testing.assert_equal(a.behaviour_logprobs, b.behaviour_logprobs)
        assert a.token_ids.dtype == np.int32


@settings(deadline=None)
@given(group=groups().filter(lambda g: g.lease < 2**63))
def test_a_group_comes_back_as_it_was(group):
    assert_same(decode_group(encode_group(group)), group)


def test_a_group_comes_back_as_it_was_from_memory():
    pair = MemoryRollouts()
    sent = [RolloutFactory().group(f"p{i}", [[1, 2], []]) for i in range(3)]
    for group in sent:
        pair.send(group)
    for got, group in zip(pair.drain(), sent, strict=True):
        assert_same(got, group)
    assert list(pair.drain()) == []


def test_log_probs_that_only_some_rollouts_have_do_not_travel():
    factory = RolloutFactory()
    some = factory.rollout([1, 2], behaviour_logprobs=np.zeros(2, np.float32))
    group = RolloutGroup(prompt_id="p", prompt_token_ids=np.zeros(1, np.int32), rollouts=(some, factory.rollout([3])))
    assert [r.behaviour_logprobs for r in decode_group(encode_group(group)).rollouts] == [None, None]


def one_group() -> RolloutGroup:
    factory = RolloutFactory()
    rollouts = tuple(factory.rollout(ids, behaviour_logprobs=np.zeros(2, np.float32)) for ids in ([1, 2], [3, 4]))
    return RolloutGroup(prompt_id="p", prompt_token_ids=np.array([7], np.int32), rollouts=rollouts)


GOOD = encode_group(one_group())


def test_a_cut_header_is_refused_wherever_it_is_cut():
    for length in range(len(GOOD[0])):
        with pytest.raises(ValueError):
            decode_group([GOOD[0][:length], *GOOD[1:]])


DAMAGED = {
    "no frames": [],
    "a frame less": GOOD[:3],
    "a frame more": [*GOOD, b""],
    "a token less": [*GOOD[:2], GOOD[2][:-4], GOOD[3]],
    "half a token": [*GOOD[:2], GOOD[2][:-1], GOOD[3]],
    "half a prompt token": [GOOD[0], b"abc", *GOOD[2:]],
    "a log-prob less": [*GOOD[:3], GOOD[3][:-4]],
    "negative length": [GOOD[0].replace(b"\x92\x02\x02", b"\x92\x05\xff"), *GOOD[1:]],
    "unknown stop reason": [GOOD[0].replace(b"eos", b"eot"), *GOOD[1:]],
    "unreadable version": [GOOD[0].replace(b"0.0", b"0-0"), *GOOD[1:]],
    "a row less in one column": [GOOD[0].replace(b"\x92\xa3eos\xa3eos", b"\x91\xa3eos"), *GOOD[1:]],
    "text that is no text": [GOOD[0].replace(b"eos", b"\xff\xfe\xfd"), *GOOD[1:]],
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_frames_are_refused(what):
    assert DAMAGED[what] != GOOD
    with pytest.raises(ValueError):
        decode_group(DAMAGED[what])


def test_a_shard_is_the_same_in_every_process():
    # CRC-32 and its published check value: it must never change, so that a restored run finds its prompts.
    assert owner_of("123456789", 2**32) == 0xCBF43926
    assert owner_of("anything", 1) == 0


def test_shards_share_prompts_about_equally():
    counts = np.bincount([owner_of(f"p{i}", 3) for i in range(3000)], minlength=3)
    assert counts.min() > 900


@contextmanager
def receiver():
    inbox = RolloutReceiver("127.0.0.1", TOKEN)
    try:
        yield inbox
    finally:
        inbox.close()


def wait_for(inbox: RolloutReceiver, messages: int) -> list[RolloutGroup]:
    """All that arrived, once ``messages`` were taken or refused."""
    got: list[RolloutGroup] = []
    deadline = time.monotonic() + 60
    while len(got) + inbox.refused < messages:
        assert time.monotonic() < deadline, f"{len(got)} arrived, {inbox.refused} refused"
        got += inbox.drain()
        time.sleep(0.001)
    return got


def test_every_group_arrives_at_its_owner_in_order():
    with receiver() as first, receiver() as second:
        inboxes = [first, second]
        sender = RolloutSender([inbox.address for inbox in inboxes], TOKEN)
        sent = [RolloutFactory().group(f"p{i}", [[i], []]) for i in range(200)]
        for group in sent:
            sender.send(group)
        sender.close()
        for shard, inbox in enumerate(inboxes):
            mine = [group for group in sent if owner_of(group.prompt_id, 2) == shard]
            got = wait_for(inbox, len(mine))
            assert [g.prompt_id for g in got] == [g.prompt_id for g in mine]
            assert inbox.refused == 0


def test_a_wrong_token_and_damaged_frames_are_refused_and_counted(caplog):
    with receiver() as inbox, caplog.at_level(logging.ERROR):
        stranger = RolloutSender([inbox.address], "of-another-run")
        stranger.send(one_group())
        stranger.close()
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(inbox.address)
            for frames in ([b""], [TOKEN.encode()], *([TOKEN.encode(), *bad] for bad in DAMAGED.values())):
                socket.send_multipart(frames)
            socket.send_multipart([TOKEN.encode(), *GOOD])
            (got,) = wait_for(inbox, 1 + 2 + len(DAMAGED) + 1)
        assert inbox.refused == 1 + 2 + len(DAMAGED)
        assert_same(got, one_group())


def test_a_host_that_is_not_here_is_named():
    with pytest.raises(TransportError, match=r"transport\.host: cannot listen on 203\.0\.113\.1"):
        RolloutReceiver("203.0.113.1", TOKEN)
