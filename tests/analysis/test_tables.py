import sys

import pytest

from torchdefine.analysis.tables import print_table


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A run's name is no markup: rich would take [bold] for a style, and [/] for a mistake."""
    print_table(["run", "seconds"], [["warm[bold]up", "3"], ["a[/]b", "12"]], note="See [red] here.")
    printed = capsys.readouterr().out
    for text in ("warm[bold]up", "a[/]b", "See [red] here."):
        assert text in printed


@pytest.mark.parametrize("columns", [30, 60, 80])
def test_a_narrow_terminal_folds_words_and_never_numbers(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    numbers = [f"{1_000 + place}.12{'*' if place == 3 else ''}" for place in range(8)]
    print_table(["run", *map(str, range(8))], [["a-name-that-is-rather-long-for-a-run", *numbers]])
    printed = capsys.readouterr().out
    assert all(number in printed.split() for number in numbers)
    assert "a-name-that-is-rather-long-for-a-run" in "".join(line.split(" ")[0] for line in printed.splitlines()[1:])
