import pytest

from torchdefine.analysis.tables import print_table


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A run's name is no markup: rich would take [bold] for a style, and [/] for a mistake."""
    print_table(["run", "seconds"], [["warm[bold]up", "3"], ["a[/]b", "12"]], note="See [red] here.")
    printed = capsys.readouterr().out
    for text in ("warm[bold]up", "a[/]b", "See [red] here."):
        assert text in printed
