"""Skips that are expected, by reason and by what is installed: in CI any other one is a failure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping


def expected() -> dict[str, bool]:
    """Pattern of a reason -> whether it holds here."""
    from tests.lib.models import HAS_HOOKED

    return {
        r"TransformerLens 4 has no HookedTransformer": not HAS_HOOKED,
        r"SAELens pins TransformerLens 3.*": not HAS_HOOKED,
    }


def unexpected(reasons: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Reasons that nothing here explains; none outside CI, where a user may have installed less."""
    reasons = set(reasons)
    if not reasons or environment.get("CI", "").lower() not in ("1", "true", "yes"):
        return []
    known = [re.compile(pattern, re.DOTALL) for pattern, holds in expected().items() if holds]
    return sorted(r for r in reasons if not any(k.fullmatch(r) for k in known))


def reason(longrepr: object) -> str:
    """The reason in pytest's representation of a skip: ``(path, line, "Skipped: reason")``."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ").strip()
