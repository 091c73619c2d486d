"""Whatever bytes a peer sends: they are read, or refused with a ValueError."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.transport import messages
from tba_megatron.transport.delivery import Answer
from tba_megatron.transport.manifest import decode_manifest
from tba_megatron.transport.rollouts import Head
from tba_megatron.untrusted import decoded

DEEP = b"\x91" * 100_000  # a list in a list in a list
HEADS, ANSWERS = msgspec.msgpack.Decoder(Head), msgspec.msgpack.Decoder(Answer)
READERS = {
    "from_searcher": messages.decode_from_searcher,
    "to_searcher": messages.decode_to_searcher,
    "head": lambda data: decoded(HEADS, data),
    "answer": lambda data: decoded(ANSWERS, data),
    "manifest": decode_manifest,
    "batch": decode,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x92\x00",
        b"\x95\xa1a\x00\x00\x00",  # a head, and one thing more
        b"\x93\x00\x00",  # an answer, and one thing more
        b"\x92\x00\x82\xa5token",
        b"\x82\xa5extra",
    ],
)
def test_what_is_nested_too_deeply_is_refused(reader, start):
    with pytest.raises(ValueError):
        reader(start + DEEP)


def test_a_batch_whose_head_is_nested_too_deeply_is_refused():
    data = encode(RolloutBatch.of_groups([]))
    size = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + size], data[8 + size :]
    longer = bytes([head[0] + 1]) + head[1:] + DEEP  # one more thing in its list
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(len(longer).to_bytes(8, "little") + longer + rest)


@settings(max_examples=300)
@given(data=st.binary(max_size=200), reader=st.sampled_from(sorted(READERS)))
def test_random_bytes_are_read_or_refused(data, reader):
    with contextlib.suppress(ValueError):
        READERS[reader](data)
