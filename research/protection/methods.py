"""The methods that `compare.py` runs: a name gives the arguments of `syngap.protect`."""

from __future__ import annotations

from typing import Any

__all__ = ["METHODS", "VARIANTS", "options_of"]

# None: no protection.
METHODS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "distil": {"gate": False},
    "gate_filtered": {"teacher": False, "rotate": False},
    "gate_rotated": {"teacher": False, "rotate": True, "rank": "full"},
    "both_filtered": {"rotate": False},
    "both_rotated": {"rotate": True, "rank": "full"},
    "default": {},
}
# Added to a method's name with "+": both_filtered+tau0.9+every2
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"tau{tau}": {"consolidation": float(tau)} for tau in ("0.9", "0.99", "0.99999")},
    **{f"rank{rank}": {"rank": float(rank)} for rank in ("0.125", "0.25", "0.5")},
    **{f"rank{rank}": {"rank": int(rank)} for rank in ("16", "64", "256")},
    "rankfull": {"rank": "full"},
    **{f"anchors{count}": {"anchors": count} for count in (2, 4, 16, 32)},
    **{f"every{count}": {"every": count} for count in (2, 4, 8)},
    **{f"strength{weight}": {"strength": float(weight)} for weight in ("0.3", "0.5", "2", "4")},
    **{f"ambient{share}": {"ambient": float(share)} for share in ("0", "0.1")},
}


def options_of(method: str) -> dict[str, Any] | None:
    """Return the arguments of `syngap.protect` for a name; None for plain AdamW."""
    name, *variants = method.split("+")
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if name not in METHODS or unknown:
        raise SystemExit(
            f"there is no method {method!r}; methods: {', '.join(METHODS)}; "
            f"variants: {', '.join(VARIANTS)}"
        )
    options = METHODS[name]
    if options is None:
        if variants:
            raise SystemExit(f"{name} has no variants")
        return None
    for variant in variants:
        options = options | VARIANTS[variant]
    return options
