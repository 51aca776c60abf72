"""Which lines of syngap have been reached, at next to no cost; from Python 3.12 on."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any


class Lines:
    """Counts lines of the package that were executed; before Python 3.12 it sees none."""

    def __init__(self) -> None:
        self.count = self._told = 0
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None:
            return

        def reached(code: CodeType, line: int) -> Any:
            if "/syngap/" in code.co_filename:
                self.count += 1
            return monitoring.DISABLE  # at this line, from now on

        monitoring.use_tool_id(monitoring.COVERAGE_ID, "fuzz")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, reached)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def new(self) -> bool:
        """Return whether lines were reached since this was last asked."""
        told, self._told = self._told, self.count
        return self.count > told
