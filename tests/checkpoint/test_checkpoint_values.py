"""Values that are no tensors go through JSON and come back exactly, or are refused by place."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from search import TIMES
from shardwise.checkpoint.json_values import from_json, to_json
from shardwise.errors import CheckpointError

PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


def through(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "here"), allow_nan=False)), "here")


@settings(max_examples=50 * TIMES, deadline=None)
@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_special_values() -> None:
    assert math.isnan(through(float("nan")))
    assert through(Counter({3: 1, 5: 2})) == Counter({3: 1, 5: 2})
    assert through(torch.__version__) == str(torch.__version__)
    tensor = torch.tensor([[1.5, -math.inf], [0.0, 3.0]], dtype=torch.bfloat16)
    assert torch.equal(through({"lr": tensor})["lr"], tensor)
    assert through({"$float": "x"}) == {"$float": "x"}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", torch.ones(65), lambda: 0, 1j])
def test_others_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"here\.a\[1\]: a .* cannot be saved"):
        to_json({"a": [0, value]}, "here")
