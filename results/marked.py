"""The parts of hand-written pages that are generated: what stands between two marks."""

from pathlib import Path


def write_between_marks(path: Path, mark: str, text: str) -> None:
    """Put ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->``, in place of what is there."""
    opening, closing = f"<!-- {mark} -->\n", f"<!-- /{mark} -->\n"
    before, rest = path.read_text(encoding="utf-8").split(opening)
    _, after = rest.split(closing)
    path.write_text(f"{before}{opening}{text}\n{closing}{after}", encoding="utf-8")
