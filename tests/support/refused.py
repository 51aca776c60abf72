"""What every refusal promises: one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syngap.bench.errors import UserError


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect a UserError of one line in which all of `words` stand."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
