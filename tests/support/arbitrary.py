"""Values of any kind in the place of a configuration or a part of it, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

WORDS = st.sampled_from(
    [
        *("name", "stream", "model", "training", "methods", "seeds", "method", "digits", "mlp"),
        *(
            "search",
            "trials",
            "added",
            "rounds",
            "spaces",
            "log",
            "uniform",
            "decay",
            "choose",
            "or",
        ),
        *("er", "sgd", "syngap", "lr", "buffer", "batch", "hidden", "device", "first", "tiny"),
    ]
)
KEYS: st.SearchStrategy[Any] = st.one_of(
    WORDS, WORDS, st.text(max_size=5), st.none(), st.booleans(), st.integers(), st.dates()
)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    *(WORDS, st.text(), st.none(), st.booleans(), st.integers(), st.floats()),
    *(st.dates(), st.datetimes(), st.binary(max_size=5)),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
