"""The command line, called in a test's own process."""

import pytest

from torchdefine.cli import main


def command(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, fails: int = 0) -> str:
    """What a command prints, where it ends as it should."""
    capsys.readouterr()
    assert command(*arguments) == fails
    shown = capsys.readouterr()
    return shown.err if fails else shown.out
