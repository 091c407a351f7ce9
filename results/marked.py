"""The parts of hand-written pages that are generated: what stands between two marks."""

import re
from pathlib import Path


def write_between_marks(path: Path, mark: str, text: str) -> None:
    """Put ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->``, in place of what is there."""
    opening, closing = f"<!-- {mark} -->\n", f"<!-- /{mark} -->\n"
    before, rest = path.read_text(encoding="utf-8").split(opening)
    _, after = rest.split(closing)
    path.write_text(f"{before}{opening}{in_one_word(text)}\n{closing}{after}", encoding="utf-8")


def in_one_word(text: str) -> str:
    """Rows as the pages call them. The first stages, and so their files, have older names.

    They call weight scaling equalised, and do not say that the table below a projection is scaled.
    """
    text = text.replace("not equalised", "no weight scaling")
    text = re.sub(r"\bR2 and an? (?=equalised|projection|MLP)", "R2 scaled, ", text)
    return re.sub(r"(?<![-\w/])(an )?equalised(?!-)", lambda found: _WORDS[found[1]], text)


_WORDS = {None: "weight-scaled", "an ": "a weight-scaled"}
