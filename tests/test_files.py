import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from torchdefine import files
from torchdefine.data.text_files import read_texts
from torchdefine.errors import MachineError, UserError
from torchdefine.files import (
    atomic_file,
    cache_folder,
    check_new_folder,
    check_writable,
    is_unfinished,
    locked,
    write_json,
)
from torchdefine.sealed_tensors import reading_safetensors, write_safetensors


def test_file_appears_whole_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with atomic_file(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]


def test_error_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_the_machines_failure(tmp_path: Path, number: int) -> None:
    with pytest.raises(MachineError, match="disk is full"), atomic_file(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert not list(tmp_path.iterdir())


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    target = tmp_path / "file" / "below"
    with pytest.raises(UserError, match=r"file/below could not be written .*: choose a folder"), atomic_file(target):
        pass
    for check in (check_writable, check_new_folder):
        with pytest.raises(UserError, match=r"file/below could not be written \(Not a directory\)"):
            check(target)
        check(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()


def test_a_place_that_nobody_may_write_to_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # who runs the tests as root may write anywhere
    for check in (check_writable, check_new_folder):
        with pytest.raises(UserError, match=r"new could not be written \(Permission denied\): choose a folder"):
            check(tmp_path / "new")


def test_nothing_but_a_file_is_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "device")
    (tmp_path / "folder").mkdir()
    for name in ("device", "folder"):
        with pytest.raises(UserError, match="is a folder or a device"), atomic_file(tmp_path / name):
            pass
    assert (tmp_path / "device").is_fifo()


def test_nothing_but_an_empty_folder_is_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    check_new_folder(tmp_path / "folder")
    (tmp_path / "folder" / "file").write_text("mine")
    for taken in (tmp_path / "folder", tmp_path / "folder" / "file"):
        with pytest.raises(UserError, match="exists already and is not empty"):
            check_new_folder(taken)


def test_a_place_that_a_disk_is_mounted_at_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be neither removed nor replaced, so that everything would be lost at the end."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(UserError, match=r"disk is where a disk is mounted, .*: choose one within it"):
        check_new_folder(tmp_path / "disk")
    write_folder(tmp_path / "disk" / "new")
    assert (tmp_path / "disk" / "new" / "whole").exists()


def test_a_path_that_no_file_can_name_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"strange-\\udcff' is not in UTF-8"):
        check_new_folder(tmp_path / os.fsdecode(b"strange-\xff"))


def test_a_lack_of_memory_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_safetensors(path, {"a": torch.ones(3)})
    said = {"if_missing": "make it", "if_damaged": "make it again"}
    with pytest.raises(RuntimeError, match=r"^can't allocate"), reading_safetensors(path, **said):
        raise RuntimeError("can't allocate memory")
    damaged = r"damaged or cut short \(no facts\): make it again"
    with pytest.raises(UserError, match=damaged), reading_safetensors(path, **said):
        raise ValueError("no facts")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_lack_of_open_files_is_the_machine_s(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    write_safetensors(path, {"a": torch.ones(3)})

    def too_many(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", too_many)
    said = r"text.txt cannot be opened \((Too many open files|Cannot allocate memory)\): raise the limits"
    for read in (files.read_text, lambda path: list(read_texts([path])), open_sealed):
        with pytest.raises(MachineError, match=said):
            read(path)


def open_sealed(path: Path) -> None:
    with reading_safetensors(path, if_missing="make it", if_damaged="make it again"):
        path.open()


def test_the_cache_says_how_it_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    monkeypatch.setenv("TORCHDEFINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="let TORCHDEFINE_CACHE name"), atomic_file(tmp_path / "file" / "below"):
        pass


def test_full_disk_while_writing_weights_keeps_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    write_safetensors(path, {"a": torch.ones(3)})
    before = path.read_bytes()

    def no_space(tensors: dict, file: Path, metadata: dict | None = None) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("torchdefine.sealed_tensors.save_file", no_space)
    with pytest.raises(MachineError, match="disk is full"):
        write_safetensors(path, {"a": torch.zeros(3)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


KILLED_IN_A_FOLDER = """
import os, signal, sys
from torchdefine.files import new_folder
with new_folder(sys.argv[1]) as making:
    (making / "half").write_text("a program")
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_IN_A_FILE = """
import os, signal, sys
from pathlib import Path
from torchdefine.files import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_IN_WEIGHTS = """
import os, signal, sys
from pathlib import Path
from torchdefine import sealed_tensors
def write_half(tensors, path, metadata):
    (path.parent / ".tmpZaKmVh").write_text("a file of the package's own, which it would rename")
    os.kill(os.getpid(), signal.SIGKILL)
sealed_tensors.save_file = write_half
sealed_tensors.write_safetensors(Path(sys.argv[1]), {})
"""


def write_folder(path: Path) -> None:
    with files.new_folder(path) as making:
        (making / "whole").write_text("a program")


def write_file(path: Path) -> None:
    with atomic_file(path) as file:
        file.write(b"content")


def write_weights(path: Path) -> None:
    write_safetensors(path, {"a": torch.ones(3)})


@pytest.mark.parametrize(
    ("killed_code", "write"),
    [(KILLED_IN_A_FOLDER, write_folder), (KILLED_IN_A_FILE, write_file), (KILLED_IN_WEIGHTS, write_weights)],
)
def test_what_a_killed_process_left_is_cleared_away(
    tmp_path: Path, killed_code: str, write: Callable[[Path], None]
) -> None:
    for name in ("a", "a.b"):
        killed = subprocess.run([sys.executable, "-c", killed_code, str(tmp_path / name)], check=False)
        assert killed.returncode == -signal.SIGKILL
    of_b = {".a.b.in-use", ".a.b.unfinished"}
    assert {path.name for path in tmp_path.iterdir()} == {".a.in-use", ".a.unfinished", *of_b}
    assert all(map(is_unfinished, tmp_path.iterdir()))
    (tmp_path / ".a.notes").mkdir()
    write(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".a.notes", *of_b}
    write(tmp_path / "a.b")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.b", ".a.notes"}


def test_who_writes_the_same_file_waits_for_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with atomic_file(tmp_path / "a") as file:
            second = pool.submit(write_file, tmp_path / "a")
            time.sleep(0.2)
            assert not second.done()
            file.write(b"first")
        second.result(10)
    assert (tmp_path / "a").read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_lock_is_waited_for_or_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "a"):
        with pytest.raises(UserError, match="It is taken"), locked(tmp_path / "new" / "a", "It is taken"):
            pass
        with locked(tmp_path / "new" / "b", "It is taken"):
            pass
    with locked(tmp_path / "new" / "a", "It is taken"):
        pass
    assert not list((tmp_path / "new").iterdir())


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    write_json(tmp_path / "some.json", {"a": [math.inf, (1.5, math.nan)], "b": {"c": -math.inf, "d": "Infinity"}})
    assert json.loads((tmp_path / "some.json").read_text()) == {
        "a": [None, [1.5, None]],
        "b": {"c": None, "d": "Infinity"},
    }


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHDEFINE_CACHE", str(tmp_path / "variable"))
    assert cache_folder(tmp_path / "argument") == tmp_path / "argument"
    assert cache_folder() == tmp_path / "variable"
    monkeypatch.delenv("TORCHDEFINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_folder() == tmp_path / "user" / "torchdefine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "torchdefine"


def test_weights_can_be_read_by_whom_the_system_lets(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_safetensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
