"""Where numbers come from, as tables say it."""

from __future__ import annotations


def short_commit(commit: str | None) -> str:
    """Twelve digits, and whether the tree had changes beside it."""
    whole, _, changed = (commit or "unknown").partition("-")
    return f"{whole[:12]}-{changed}" if changed else whole[:12]
