"""Messages of random numbers: a header is refused or within the limits, and a request that is let through can be embedded."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockgrow_titan.teacher.messages import (
    MAGIC,
    MAX_TEXT_BYTES,
    VERSION,
    Header,
    Kind,
    Limits,
    MalformedMessage,
    check_request,
)
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER

LIMITS = Limits(max_rows=4, max_length=10, max_tokens=40, vocab_size=97, hidden_size=8, dtype=torch.bfloat16)
LARGEST = max(MAX_TEXT_BYTES, 4 * (4 + 40), 2 * 40 * 8)  # bytes of an error, a request, an answer
EXAMPLES = int(os.environ.get("BLOCKGROW_EXAMPLES", "0")) or 150

INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-2, 100)
FIELD = st.one_of(SMALL, INT64, st.sampled_from([2**31, 2**32, 2**62, 80, 160, 176, 640, MAX_TEXT_BYTES]))

drawn = settings(derandomize=True, database=None, max_examples=EXAMPLES, deadline=None)


@drawn
@given(
    numbers=st.lists(FIELD, min_size=Header.SIZE, max_size=Header.SIZE),
    signed=st.booleans(),
    receiver=st.sampled_from([STUDENT, TEACHER]),
)
def test_headers_of_random_numbers(numbers: list[int], signed: bool, receiver: str) -> None:
    """With the right magic number and version, too, so that the other fields are looked at."""
    if signed:
        numbers[:3] = [MAGIC, VERSION, 1 + numbers[2] % 4]
    packed = torch.tensor(numbers, dtype=torch.int64)
    try:
        header = Header.parse(packed, LIMITS, receiver)
    except MalformedMessage as error:
        assert "\n" not in str(error)
        return
    assert signed and torch.equal(header.pack(), packed)
    assert 0 <= header.num_bytes <= LARGEST and len(header.shape) in (1, 2)
    assert header.kind != (Kind.REQUEST if receiver == STUDENT else Kind.ANSWER)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 8), (40, 8), (44,)])
def test_one_field_changed(shape: tuple[int, ...]) -> None:
    """Every field of a valid header in turn, by every power of two: shape and bytes must still agree."""
    kind, receiver = (Kind.ANSWER, STUDENT) if len(shape) == 2 else (Kind.ERROR, TEACHER)
    dtype = LIMITS.dtype if len(shape) == 2 else torch.uint8
    valid = Header(kind, 7, dtype, shape).pack()
    assert Header.parse(valid, LIMITS, receiver).shape == shape
    for place in range(Header.SIZE):
        for bit in range(63):
            packed = valid.clone()
            packed[place] ^= 1 << bit
            try:
                header = Header.parse(packed, LIMITS, receiver)
            except MalformedMessage:
                continue
            assert header.num_bytes <= LARGEST and (header.shape == shape or place != 5)
            assert torch.equal(header.pack(), packed)


INT32 = st.one_of(st.integers(0, 12), st.integers(-(2**31), 2**31 - 1), st.sampled_from([96, 97, -1]))


@drawn
@given(lengths=st.lists(INT32, min_size=1, max_size=4), ids=st.lists(INT32, min_size=1, max_size=40), fit=st.booleans())
def test_requests_of_random_numbers(lengths: list[int], ids: list[int], fit: bool) -> None:
    if fit and 0 < sum(lengths) <= 40 and min(lengths) >= 0:
        ids = (ids * 40)[: sum(lengths)]
    try:
        check_request(torch.tensor(ids, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), LIMITS)
    except MalformedMessage:
        return
    assert sum(lengths) == len(ids) and all(0 <= n <= LIMITS.max_length for n in lengths)
    assert all(0 <= token < LIMITS.vocab_size for token in ids)
