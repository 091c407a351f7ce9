import contextlib
import hashlib
import io
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchdefine.data import download as download_module
from torchdefine.data.download import download, extract, keep_hash
from torchdefine.errors import MachineError, UserError

ArchiveMaker = Callable[[Path, dict[str, bytes]], None]

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FileServer(ThreadingHTTPServer):
    """Serves one file at every address, in the ways that servers do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.content = CONTENT
        self.knows_ranges = True
        self.statuses: list[int] = []
        """Failures to answer with before the file is served."""
        self.break_off_after: int | None = None
        """Bytes after which the next answer stops, once."""
        self.ranges: list[str | None] = []
        self.version: str | None = None
        """The ETag of the file."""
        self.drip: tuple[bytes, float] | None = None
        """What to send without an end, and how many seconds lie between."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.zip"


class FileHandler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.knows_ranges else 0
        if wanted and self.headers.get("If-Range", self.server.version) != self.server.version:
            start = 0
        if self.server.drip:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(self.server.drip[0])
                    time.sleep(self.server.drip[1])
        elif self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
        elif start >= len(self.server.content):
            self.send_error(416)
        else:
            body = self.server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            if self.server.version:
                self.send_header("ETag", self.server.version)
            self.end_headers()
            self.wfile.write(body[: self.server.break_off_after])
            self.server.break_off_after = None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "downloads" / "file.zip"


def names_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def test_file_with_a_known_hash_is_verified(server: FileServer, target: Path) -> None:
    calls: list[tuple[int, int]] = []
    assert download(server.url, target, SHA256, lambda done, total: calls.append((done, total))) == SHA256
    assert target.read_bytes() == CONTENT
    assert names_beside(target) == ["file.zip"]
    assert calls[-1] == (len(CONTENT), len(CONTENT))


def test_partial_file_is_continued(server: FileServer, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.zip.part").write_bytes(CONTENT[:1000])
    download(server.url, target, SHA256)
    assert server.ranges == ["bytes=1000-"]
    assert target.read_bytes() == CONTENT


def test_server_without_ranges_sends_all_again(server: FileServer, target: Path) -> None:
    server.knows_ranges = False
    target.parent.mkdir()
    (target.parent / "file.zip.part").write_bytes(CONTENT[:1000])
    download(server.url, target, SHA256)
    assert server.ranges == ["bytes=1000-"]
    assert target.read_bytes() == CONTENT


def test_broken_transfer_is_resumed(server: FileServer, target: Path) -> None:
    server.break_off_after = 5000
    download(server.url, target, SHA256)
    assert server.ranges == [None, "bytes=5000-"]
    assert target.read_bytes() == CONTENT


def test_part_longer_than_the_file_is_dropped(server: FileServer, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.zip.part").write_bytes(b"x" * (len(CONTENT) + 1))
    download(server.url, target, SHA256)
    assert server.ranges == [f"bytes={len(CONTENT) + 1}-", None]


def test_passing_trouble_is_tried_again(server: FileServer, target: Path) -> None:
    server.statuses = [503, 500]
    download(server.url, target, SHA256)
    assert len(server.ranges) == 3


def test_absent_file_is_not_tried_again(server: FileServer, target: Path) -> None:
    server.statuses = [404]
    with pytest.raises(MachineError, match=rf"{server.url} could not be downloaded \(the server answered 404"):
        download(server.url, target)
    assert len(server.ranges) == 1


def test_wrong_hash_removes_the_file(server: FileServer, target: Path) -> None:
    with pytest.raises(MachineError, match=rf"{SHA256} where {'0' * 64} was expected"):
        download(server.url, target, "0" * 64)
    assert names_beside(target) == []


def test_hash_of_a_good_download_without_a_known_one_is_kept(server: FileServer, target: Path) -> None:
    assert download(server.url, target) == SHA256
    assert names_beside(target) == ["file.zip"], "whether the file is good is not known yet"
    keep_hash(target, SHA256)
    assert names_beside(target) == ["file.zip", "file.zip.sha256"]
    download(server.url, target)
    server.content = CONTENT[::-1]
    with pytest.raises(MachineError, match=r"first download, kept in .*file\.zip\.sha256"):
        download(server.url, target)
    assert target.read_bytes() == CONTENT, "what was fetched before stays"
    assert names_beside(target) == ["file.zip", "file.zip.sha256"]


def test_what_is_left_of_a_file_is_not_continued_without_a_hash(server: FileServer, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.zip.part").write_bytes(b"stale")
    assert download(server.url, target) == SHA256
    assert server.ranges == [None]


def test_what_is_left_of_another_file_is_fetched_again(server: FileServer, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.zip.part").write_bytes(b"stale")
    assert download(server.url, target, SHA256) == SHA256
    assert server.ranges == ["bytes=5-", None]


def test_a_file_that_changes_between_attempts_is_fetched_anew(server: FileServer, target: Path) -> None:
    server.version, server.break_off_after = '"1"', 5000

    def change(done: int, total: int) -> None:
        server.version, server.content = '"2"', CONTENT[::-1]

    download(server.url, target, progress=change)
    assert target.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(
    ("drip", "limit", "message"),
    [
        ((b"x" * 1000, 0.0), {"MOST_BYTES": 50_000}, "more than 50,000 bytes"),
        ((b"x", 0.02), {"TIMEOUT_SECONDS": 0.2}, "too slow"),
        ((b"x" * 1000, 0.01), {"TOTAL_SECONDS": 0.2}, "took more than"),
    ],
)
def test_endless_and_slow_answers_are_refused(
    server: FileServer, target: Path, monkeypatch: pytest.MonkeyPatch, drip: tuple, limit: dict, message: str
) -> None:
    server.drip = drip
    for name, value in limit.items():
        monkeypatch.setattr(download_module, name, value)
    with pytest.raises(MachineError, match=message):
        download(server.url, target)
    assert names_beside(target) == []


def test_announced_size_is_refused_before_it_is_fetched(
    server: FileServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "MOST_BYTES", len(CONTENT) - 1)
    with pytest.raises(MachineError, match="more than"):
        download(server.url, target)
    assert names_beside(target) == []


def test_offline_names_the_address_and_the_way_out(server: FileServer, target: Path) -> None:
    server.server_close()  # nothing listens at the port any more
    with pytest.raises(MachineError, match=rf"{server.url} could not be downloaded .*--data"):
        download(server.url, target)


def test_unwritable_place_is_not_blamed_on_the_network(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "downloads").write_text("a file in the way")
    with pytest.raises(UserError, match="could not be written"):
        download(server.url, tmp_path / "downloads" / "file.zip")


def make_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def make_tgz(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("make", [make_zip, make_tgz])
def test_only_named_members_are_taken(tmp_path: Path, make: ArchiveMaker) -> None:
    archive, inside = tmp_path / "archive", tmp_path / "inside"
    make(
        archive,
        {"data/train.txt": b"text", "../evil.txt": b"evil", "/evil.txt": b"evil", "data/more.txt": b"more"},
    )
    extract(archive, {"data/train.txt": inside / "train.txt"})
    assert (inside / "train.txt").read_bytes() == b"text"
    assert sorted(path.name for path in tmp_path.rglob("*.txt")) == ["train.txt"]


def test_leading_dot_of_tar_members_is_ignored(tmp_path: Path) -> None:
    make_tgz(tmp_path / "archive", {"./data/train.txt": b"text"})
    extract(tmp_path / "archive", {"data/train.txt": tmp_path / "train.txt"})
    assert (tmp_path / "train.txt").read_bytes() == b"text"


@pytest.mark.parametrize("make", [make_zip, make_tgz])
def test_missing_member_is_named(tmp_path: Path, make: ArchiveMaker) -> None:
    make(tmp_path / "archive", {"other.txt": b"text"})
    with pytest.raises(MachineError, match=r"archive lacks .*train\.txt"):
        extract(tmp_path / "archive", {"train.txt": tmp_path / "train.txt"})
    assert not (tmp_path / "train.txt").exists()


@pytest.mark.parametrize("make", [make_zip, make_tgz])
def test_archives_that_unpack_to_far_more_are_refused(
    tmp_path: Path, make: ArchiveMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_ALWAYS_UNPACKED", 1 << 16)
    monkeypatch.setattr(download_module, "MOST_TIMES_LARGER", 2)
    if make is make_zip:
        with zipfile.ZipFile(tmp_path / "archive", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("train.txt", bytes(1 << 20))
    else:
        make(tmp_path / "archive", {"train.txt": bytes(1 << 20)})
    with pytest.raises(MachineError, match="unpacks to far more"):
        extract(tmp_path / "archive", {"train.txt": tmp_path / "train.txt"})
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    members = {"train.txt": CONTENT}
    make_tgz(archive, members)
    packed = archive.read_bytes()
    make_zip(archive, members)
    stored = archive.read_bytes()
    flipped = stored.replace(CONTENT[1000:1100], CONTENT[1000:1099] + b"!")
    for damaged in (b"no archive", packed[: len(packed) // 2], packed[:-8] + bytes(8), flipped):
        archive.write_bytes(damaged)
        with pytest.raises(MachineError, match="archive is damaged"):
            extract(archive, {"train.txt": tmp_path / "train.txt"})
        assert not (tmp_path / "train.txt").exists()
