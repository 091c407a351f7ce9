"""The page of the leaderboard, from the stored rows."""

from pathlib import Path

import leaderboard_tables
import pytest


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's rows, and pages to write."""
    folder = tmp_path / "results" / "leaderboard"
    folder.mkdir(parents=True)
    for table in leaderboard_tables.TABLES:
        if (leaderboard_tables.FOLDER / table).exists():
            (folder / table).symlink_to(leaderboard_tables.FOLDER / table)
    (tmp_path / "README.md").write_text("a\n<!-- shrink -->\n<!-- /shrink -->\nb\n")
    monkeypatch.setattr(leaderboard_tables, "FOLDER", folder)
    leaderboard_tables.main()
    return folder / "README.md"


def test_every_row_is_shown(page: Path) -> None:
    text = page.read_text()
    for table in leaderboard_tables.TABLES:
        results = leaderboard_tables.results_of(table)
        for row in leaderboard_tables.rows_of(results):
            shown = f"| {row['bytes']:,} | {row['rows']:,} |" if row["bytes"] else "| does not fit |"
            assert shown in text
        if not results:
            assert f"## {table}\n\nNot run." in text


def test_the_readme_has_our_rows_first(page: Path) -> None:
    lines = (page.parents[2] / "README.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    assert [line.split(" | ")[0] for line in lines[first + 1 : first + 3]] == [
        "| bits by importance",
        "| bits by importance, distilled",
    ]


def test_the_pages_in_the_repository_are_as_generated(page: Path) -> None:
    assert page.read_text() == (Path(leaderboard_tables.__file__).parent / "leaderboard" / "README.md").read_text()
