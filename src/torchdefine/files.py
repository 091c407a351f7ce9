"""Files that are written whole or not at all, and read with a sentence instead of a traceback."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from torchdefine.errors import MachineError, UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it takes its place at once, on failure nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes private files
        os.replace(temporary, path)
    except OSError as error:
        raise _disk_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    _write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _write(path, lambda temporary: save_file(whole, temporary, metadata=metadata))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): it may have been cut short.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no settings: a JSON object was expected.")
    return value


def _write(path: Path, write: Callable[[Path], object]) -> None:
    with replacing(path) as temporary:
        try:
            write(temporary)
        except OSError as error:
            raise _disk_error(path, error) from error
        except Exception as error:  # safetensors reports a full disk as its own error type
            if "No space left" in str(error):
                raise MachineError(
                    f"The disk is full: {path} was not written, and what was there is unharmed."
                ) from error
            raise


def _disk_error(path: Path, error: OSError) -> Exception:
    if error.errno == errno.ENOSPC:
        return MachineError(f"The disk is full: {path} was not written, and what was there is unharmed.")
    return MachineError(f"{path} could not be written ({error.strerror or error}).")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
