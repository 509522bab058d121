"""Whole or not at all, and never over something: what is left when a write is cut short, in every way."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from harness.plan.study_file import STUDY_FILE
from results import files
from results.errors import StoreError, UsageError
from results.store import Study

ADVICE = {
    errno.ENOSPC: "free some space and run the same command again: what is written so far is kept",
    errno.EDQUOT: "free some space and run the same command again: what is written so far is kept",
    errno.EACCES: "choose a folder that you may write with --out",
    errno.EPERM: "choose a folder that you may write with --out",
    errno.EROFS: "choose a folder that you may write with --out",
    errno.EIO: "check the folder and run the same command again",
}
KILLED_BEFORE_THE_LINK = """
import os, signal, sys
from pathlib import Path
from harness.plan.study_file import STUDY_FILE
from results import files

os.link = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
files.write_once(Path(sys.argv[1]), b"new")
"""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _fail(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_appears_whole_in_folders_made_on_the_way(tmp_path) -> None:
    files.write_once(tmp_path / "a" / "b" / "c.json", b"data")
    assert (tmp_path / "a" / "b" / "c.json").read_bytes() == b"data"
    assert _names(tmp_path / "a" / "b") == ["c.json"]


def test_an_existing_file_is_never_replaced_and_nothing_is_left_beside_it(tmp_path) -> None:
    path = tmp_path / "plan-0001.json"
    files.write_once(path, b"old")
    with pytest.raises(StoreError) as error:
        files.write_once(path, b"new")
    assert str(error.value) == f"{path} exists and is never overwritten"
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["plan-0001.json"]


def test_a_derived_file_is_replaced(tmp_path) -> None:
    for data in (b"old", b"new"):
        files.replace(tmp_path / "index.jsonl", data)
        assert (tmp_path / "index.jsonl").read_bytes() == data
    assert _names(tmp_path) == ["index.jsonl"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path) -> None:
    """A file that replaced /dev/null would replace it for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.replace(pipe, b"data")
    assert os.read(reader, 100) == b"data"
    with files.replacing(pipe) as name, name.open("wb") as stream:
        stream.write(b"more")
    assert os.read(reader, 100) == b"more"
    os.close(reader)
    assert pipe.is_fifo()
    assert _names(tmp_path) == ["pipe"]


def test_what_a_shell_has_open_is_written_to_in_its_turn(tmp_path) -> None:
    code = (
        "from pathlib import Path; from results import files; print('first', end=' ');"
        "files.replace(Path('/dev/stdout'), b'data '); print('last', end='')"
    )
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before ")
        log.flush()
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_bytes() == b"before first data last"
    assert Path("/dev/stdout").is_symlink()


def test_one_of_many_writers_of_a_name_wins(tmp_path) -> None:
    path = tmp_path / "plan-0001.json"

    def write(writer: int) -> int | None:
        try:
            files.write_once(path, b"%d" % writer * 10_000)
        except StoreError:
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        winners = [writer for writer in pool.map(write, range(8)) if writer is not None]
    assert len(winners) == 1
    assert path.read_bytes() == b"%d" % winners[0] * 10_000
    assert _names(tmp_path) == ["plan-0001.json"]


@pytest.mark.parametrize("number", ADVICE, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_failing_write_leaves_the_folder_as_it_was_and_gives_advice(
    tmp_path, monkeypatch, call, number
) -> None:
    (tmp_path / "plan-0001.json").write_bytes(b"old")
    monkeypatch.setattr(os, call, _fail(number))
    path = tmp_path / "plan-0002.json"
    with pytest.raises(StoreError) as error:
        files.write_once(path, b"new")
    assert str(error.value) == f"cannot write {path}: {os.strerror(number)}; {ADVICE[number]}"
    assert _names(tmp_path) == ["plan-0001.json"]
    assert (tmp_path / "plan-0001.json").read_bytes() == b"old"


def test_a_failing_replacement_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    files.replace(tmp_path / "index.jsonl", b"old")
    for owner, call in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, _fail(errno.ENOSPC))
            with pytest.raises(StoreError, match="free some space"):
                files.replace(tmp_path / "index.jsonl", b"new")
        assert (tmp_path / "index.jsonl").read_bytes() == b"old"
        assert _names(tmp_path) == ["index.jsonl"]


def test_a_new_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch) -> None:
    done, sync, link = [], os.fsync, os.link

    def synced(descriptor: int) -> None:
        done.append("sync the folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync the file")
        sync(descriptor)

    def linked(*paths: Path) -> None:
        done.append("link")
        link(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    files.write_once(tmp_path / "plan-0001.json", b"new")
    assert done == ["sync the file", "link", "sync the folder"]


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_once(tmp_path / "plan-0001.json", b"new")
    assert _names(tmp_path) == []


def test_what_killed_writers_left_in_a_study_is_removed_and_nothing_of_the_living(tmp_path) -> None:
    launch = tmp_path / "launches" / "l"
    path = launch / "attempt.json"
    subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_LINK, str(path)], check=False)
    (left,) = _names(launch)
    killed = left.split("-")[1].split(".")[0]
    stay = [left.replace(killed, str(os.getpid())), left.replace("json.", "json.f"), ".my.tmp"]
    # Of another host, and of an older program, two days ago.
    go = [left.replace("json.", "json.e"), f".attempt.json.{killed}.01234567.tmp"]
    for name in (*stay, *go):
        (launch / name).touch()
    for name in (*go, ".my.tmp"):
        os.utime(launch / name, (0, time.time() - 2 * 86_400))
    Study(tmp_path).collect()
    assert _names(launch) == sorted(stay)


def test_a_full_disk_loses_nothing_and_the_same_call_goes_on_after_making_room(small_disk) -> None:
    files.write_once(small_disk / "first.json", b"a" * 10_000)
    (small_disk / "ballast").write_bytes(b"b" * 30_000)
    path = small_disk / "second.json"
    for write in (files.write_once, files.replace):
        with pytest.raises(StoreError) as error:
            write(path, b"c" * 40_000)
        assert str(error.value) == (
            f"cannot write {path}: No space left on device; free some space and run the same command again: "
            f"what is written so far is kept"
        )
        assert _names(small_disk) == ["ballast", "first.json"]
    assert (small_disk / "first.json").read_bytes() == b"a" * 10_000
    (small_disk / "ballast").unlink()
    files.write_once(path, b"c" * 40_000)
    assert path.read_bytes() == b"c" * 40_000


@pytest.mark.parametrize(("name", "why"), [("cell.json", "File exists"), ("x/cell.json", "Not a directory")])
def test_a_file_where_a_folder_should_be_is_one_line(tmp_path, name, why) -> None:
    (tmp_path / "cells").write_bytes(b"")
    path = tmp_path / "cells" / name
    for write in (files.write_once, files.replace):
        with pytest.raises(StoreError) as error:
            write(path, b"new")
        assert str(error.value) == (
            f"cannot write {path}: {why}; check the folder and run the same command again"
        )


def _refusal(path: Path) -> str:
    with pytest.raises(OSError) as error:  # noqa: PT011
        files.read(path, most=2**20)
    return str(error.value.strerror)


def test_what_is_no_regular_file_of_bounded_size_is_refused_at_once(tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        assert _refusal(path) == "it is not a regular file"
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(900 * 2**20)
    assert _refusal(tmp_path / "sparse") == "it has more than 1 MiB"
    with pytest.raises(OSError, match="line 1 has more than 4 MiB"):
        list(files.read_lines(tmp_path / "sparse"))
    assert len(files.read_end(tmp_path / "sparse", 10).data) == 10
    with pytest.raises(UsageError, match=r"sparse: it has more than 1 MiB; name a YAML file"):
        STUDY_FILE.read(tmp_path / "sparse")
    # A file of the kernel has no size.
    assert files.read("/proc/self/stat").data.startswith(str(os.getpid()).encode())


def test_only_brackets_that_nest_count_as_levels() -> None:
    value, texts = msgspec.json.Decoder(), b'["\\\\", "' + b"[{" * 1000 + b'\\"["]'
    assert files.Content("a", b"[" + b"[]," * 1000 + b"[]]").parsed(value) == [[]] * 1001
    assert files.Content("a", texts).parsed(value) == ["\\", "[{" * 1000 + '"[']
    deepest = files.MOST_LEVELS
    assert files.Content("a", b"[" * deepest + b"]" * deepest).parsed(value)
    with pytest.raises(files.DamagedError, match="more than 64 levels"):
        files.Content("a", b"[" * (deepest + 1) + b"]" * (deepest + 1)).parsed(value)
