"""Settings shared by the tests of configurations."""

from collections.abc import Iterator

import pytest

from syngap.bench import registry


@pytest.fixture(autouse=True, scope="module")
def no_plug_ins() -> Iterator[None]:
    """Looking for other packages' entry points takes longer than all else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: ())
        yield
