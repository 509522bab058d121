"""Why a launch stands still, read from hand-made logs and flight recorders, and from real recorders."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.launch.follow import Issued, LaunchState, Pulse, hang_reason, heartbeats, issues, laggard
from harness.worker.rank import network
from harness.worker.rank.network import flight_recording, write_recording
from results.launch import rank_log_path
from results.plan import Placement


def _log(folder: Path, rank: int, *events: str) -> None:
    lines = [json.dumps({"at": f"T{n}", "rank": rank, "event": event}) for n, event in enumerate(events)]
    (folder / f"rank-{rank:05d}.jsonl").write_text("".join(line + "\n" for line in lines))


def _recording(folder: Path, rank: int, *entries: tuple[str, int, str]) -> None:
    """Entries as torch 2.13 writes them, without the fields that are not read."""
    found = [
        {
            "process_group": [group, "undefined"],
            "collective_seq_id": number,
            "profiling_name": name,
            "is_p2p": name.startswith("gloo:send"),
            "state": "scheduled",
        }
        for group, number, name in entries
    ]
    text = json.dumps({"version": "2.10", "entries": found, "pg_status": {}})
    (folder / f"flight-{rank:05d}.json").write_text(text)


def test_the_reason_names_the_rank_its_phase_and_what_it_did_not_issue(tmp_path) -> None:
    _log(tmp_path, 0, "joining", "ready", "proof", "warm-up", "measure")
    _log(tmp_path, 1, "joining", "ready", "proof", "warm-up")
    _recording(tmp_path, 0, ("0", 41, "gloo:all_reduce"), ("0", 42, "gloo:barrier"))
    _recording(tmp_path, 1, ("0", 40, "gloo:all_reduce"), ("0", 41, "gloo:all_reduce"))
    assert hang_reason(tmp_path, {0: 15.2, 1: 18.4}) == (
        "no rank said anything for 15 s; rank 1 has been silent for longest, 18 s (phase: warm-up); "
        "rank 1 is behind: it issued 41 collectives, rank 0 42, the last of them gloo:barrier"
    )


def test_without_recorders_and_logs_the_reason_says_what_is_known(tmp_path) -> None:
    assert hang_reason(tmp_path, {0: 3.0, 1: 3.0}) == (
        "no rank said anything for 3 s; rank 0 has been silent for longest, 3 s (phase: starting)"
    )


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (["joining"], "starting"),
        (["ready", "proof", "alive"], "proof"),
        (["proof", "warm-up", "measure", "exposed"], "measuring the exchange"),
        (["measure", "recorded"], "ending"),
    ],
)
def test_a_phase_is_that_of_the_last_event_that_begins_one(events, expected, tmp_path) -> None:
    _log(tmp_path, 0, *events)
    assert LaunchState.of(rank_log_path(tmp_path, 0)).phase == expected


def test_heartbeats_are_of_the_last_whole_line(tmp_path) -> None:
    _log(tmp_path, 0, "ready", "proof")
    # Longer than what is read of a file's end.
    _log(tmp_path, 1, *["alive"] * 500)
    with (tmp_path / "rank-00001.jsonl").open("a") as file:
        file.write('{"at": "T500", "ra')
    (tmp_path / "rank-00002.jsonl").write_text("")
    (tmp_path / "rank-00003.jsonl").write_text('{"at": "T0"}\n{"at": "cut{"at": "T1"}\n')
    assert heartbeats(tmp_path) == {0: "T1", 1: "T499", 3: "T0"}


def test_issues_are_the_largest_number_of_each_group_and_a_damaged_recorder_says_nothing(tmp_path) -> None:
    _recording(tmp_path, 0, ("0", 7, "a"), ("0", 9, "b"), ("0", 8, "c"), ("2", 1, "d"))
    _recording(tmp_path, 1, ("0", 12, "gloo:send"), ("0", 3, "a"))
    (tmp_path / "flight-00002.json").write_text('{"entries": [')
    (tmp_path / "flight-00003.json").write_text('{"entries": [{"collective_seq_id": "one"}]}')
    assert issues(tmp_path) == {"0": {0: (9, "b"), 1: (3, "a")}, "2": {0: (1, "d")}}


def _issued(**counts: dict[int, int]) -> dict[str, dict[int, Issued]]:
    return {
        group: {rank: (n, f"{group}:sum") for rank, n in ranks.items()} for group, ranks in counts.items()
    }


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (_issued(), None),
        # One rank alone can be compared with nobody.
        (_issued(g={0: 5}), None),
        (
            _issued(g={0: 6, 1: 6, 2: 5}),
            "rank 2 is behind: it issued 5 collectives, rank 0 6, the last of them g:sum",
        ),
        (
            _issued(g={0: 6, 1: 5, 2: 4}),
            "rank 2 is behind: it issued 4 collectives, rank 0 6, the last of them g:sum",
        ),
        (_issued(g={0: 6, 1: 6}), "2 ranks had issued 6 collectives each, the last of them g:sum"),
        # Two nodes of two ranks. Rank 1 computes for ever, so rank 0 waits in their node's group, and
        # rank 2 for rank 0 among the leaders: rank 1 is behind somewhere and ahead nowhere.
        (
            _issued(node={0: 9, 1: 8}, other={2: 9, 3: 9}, leaders={0: 4, 2: 5}),
            "rank 1 is behind: it issued 8 collectives, rank 0 9, the last of them node:sum",
        ),
    ],
)
def test_the_laggard_is_behind_in_a_group_and_ahead_in_none(found, words) -> None:
    assert laggard(found) == words


def test_silence_is_counted_from_changes_and_not_from_times_of_files(tmp_path) -> None:
    now = [100.0]
    path = tmp_path / "rank-00000.jsonl"
    path.write_text("a\n")
    pulse = Pulse(tmp_path, Placement(nodes=1, gpus_per_node=2), clock=lambda: now[0])
    now[0] = 107.0
    assert pulse.silence_s() == {0: 7.0, 1: 7.0}
    # The host's clock was set back by a day: the file is older than before, and has changed all the same.
    with path.open("a") as file:
        file.write("b\n")
    yesterday = time.time() - 86_400
    os.utime(path, (yesterday, yesterday))
    assert pulse.silence_s() == {0: 0.0, 1: 7.0}
    now[0] = 110.0
    (tmp_path / "rank-00001.jsonl").write_text("")
    assert pulse.silence_s() == {0: 3.0, 1: 0.0}
    now[0] = 111.5
    assert pulse.silence_s() == {0: 4.5, 1: 1.5}


def stand_still(rank: int, folder: str) -> None:
    """On a rank: rank 1 does not join the second sum until both have written what they have issued."""
    path = Path(folder) / f"flight-{rank:05d}.json"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    work = dist.all_reduce(tensor, async_op=True) if rank == 0 else None
    write_recording(path, "gloo")
    store.set(f"{folder}{rank}", "written")
    store.wait([f"{folder}0", f"{folder}1"])
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()


def test_real_recorders_tell_who_did_not_join(ranks, tmp_path) -> None:
    # The recorder of ranks that ran other tests has their groups as well.
    ranks(2, stand_still, str(tmp_path), fresh=True)
    (group,) = (group for group in issues(tmp_path).values() if len(group) == 2)
    assert group[0][0] - group[1][0] == 1
    assert group[0][1] == "gloo:all_reduce"
    assert str(laggard(issues(tmp_path))).startswith("rank 1 is behind: ")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["flight-00000.json", "flight-00001.json"]


def test_a_recording_that_cannot_be_had_or_written_hurts_nobody(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "file").write_text("")
    write_recording(tmp_path / "file" / "flight-00000.json", "gloo")
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setitem(network._DUMPS, "gloo", "_no_such_name")
    assert flight_recording("gloo") is None
    write_recording(tmp_path / "flight-00000.json", "gloo")
    assert capfd.readouterr().err == "this torch has no flight recorder of gloo\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
