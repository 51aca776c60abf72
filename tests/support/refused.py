"""What every refusal promises: one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def taken(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or None where it refuses in the one way that there is."""
    before = repr(arguments)
    try:
        return function(*arguments)
    except UserError as error:
        message = str(error)
    finally:
        assert repr(arguments) == before
    assert message
    assert message.isprintable(), message
    return None
