"""`bench logs` and `bench show`: what ranks have printed, of whom it is, and how much of it is shown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import plan_of
from launching import a_launch, an_attempt

from harness.cli import logs, run
from harness.launch.rank_output import LEFT_OUT, OutputFile, OutputTail
from results.launch import Launch, Slot
from results.outcome import Outcome
from results.store import Study


class Printed:
    """A study of two nodes of one rank each, with a launch of two cells, and what was printed in it."""

    def __init__(self, root: Path, nodes: int = 2) -> None:
        plan = plan_of(workload="mlp", batch_size=8, device="cpu", gpus=2, strategy="ddp,scratch-ddp")
        self.study = Study(root)
        self.study.add_plan(plan)
        self.cells = [cell.id for cell in plan.cells]
        self.nodes = nodes

    def launch(self, name: str = "l1") -> Launch:
        slots = tuple(Slot(cell_id=cell, run_id=f"{name}-{cell}", repeat=1) for cell in self.cells)
        launch = a_launch(self.nodes, 2 // self.nodes, launch_id=name, slots=slots)
        self.study.add_launch(launch)
        for slot in launch.slots:
            self.study.start_run(slot.cell_id, slot.run_id)
        return launch

    def prints(
        self, launch: Launch, rank: int, text: str, stream: str = "stderr", *, told: bool = True
    ) -> Path:
        """Have a rank print a text to where torchrun leads it, on several nodes by a name made up there."""
        folder = self.study.launch_folder(launch.launch_id)
        # The order of nodes is not that of the names.
        node, local_rank = ("zy"[rank], 0) if self.nodes > 1 else ("x", rank)
        path = folder / "torchrun" / node / "attempt_0" / str(local_rank) / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        if told:
            place = path.parent.relative_to(folder)
            names = {name: f"{place}/{name}.log" for name in ("stdout", "stderr")}
            event = {"rank": rank, "event": "joining", **names}
            (folder / f"rank-{rank:05d}.jsonl").write_text(json.dumps(event) + "\n")
        return path

    def ends(self, launch: Launch, outcome: Outcome = Outcome.CRASHED, reason: str = "it failed") -> None:
        runs = [slot.run_id for slot in launch.slots]
        attempt = an_attempt(
            launch_id=launch.launch_id,
            exit_code=1,
            outcomes=dict.fromkeys(runs, outcome),
            reasons=dict.fromkeys(runs, reason),
        )
        self.study.add_attempt(attempt)


@pytest.fixture
def printed(tmp_path) -> Printed:
    return Printed(tmp_path / "s")


@pytest.fixture
def bench(printed, capsys) -> Callable[..., tuple[int, str, str]]:
    """`bench COMMAND STUDY ...`: exit code, stdout without the study's path, stderr."""

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        root = str(printed.study.root)
        code = run([command, root, *arguments])
        said = capsys.readouterr()
        return code, said.out.replace(root, "s"), said.err

    return call


def test_everything_of_the_last_launch_is_printed_under_the_names_of_its_ranks(printed, bench) -> None:
    printed.prints(printed.launch("l0"), 0, "of an earlier launch\n")
    launch = printed.launch()
    first = printed.prints(launch, 1, "one\n\x1b[31mred\n")
    second = printed.prints(launch, 0, "zero without an end", told=False)
    (printed.study.launch_folder("l1") / "agent-0.log").write_text("torchrun says\n")
    code, out, err = bench("logs")
    assert (code, err) == (0, "")
    paths = [str(path).replace(str(printed.study.root), "s") for path in (first, second)]
    assert out == (
        "==> agent-0.log: s/launches/l1/agent-0.log <==\ntorchrun says\n"
        f"\n==> rank 1, stderr: {paths[0]} <==\none\n\\x1b[31mred\n"
        # It has not come as far as to say which rank it is.
        f"\n==> stderr.log: {paths[1]} <==\nzero without an end\n"
    )


def test_on_one_node_the_number_in_the_path_is_the_rank(tmp_path) -> None:
    printed = Printed(tmp_path / "t", nodes=1)
    launch = printed.launch()
    printed.prints(launch, 1, "one\n", told=False)
    assert run(["logs", str(tmp_path / "t"), "--rank", "1"]) == 0
    assert run(["logs", str(tmp_path / "t"), "--rank", "2"]) == 2


def test_of_a_cell_it_is_what_each_rank_printed_in_its_last_run(printed, bench) -> None:
    first, second = printed.cells
    launch = printed.launch()
    for rank in (0, 1):
        for stream in ("stdout", "stderr"):
            text = f"start\n--- run l1-{first}\nfirst {rank}\n--- run l1-{second}\n{stream} of {rank}\n"
            printed.prints(launch, rank, text, stream)
    (printed.study.launch_folder("l1") / "torchrun.log").write_text("torchrun says\n")
    out = bench("logs", "--cell", second, "--rank", "1")[1]
    assert [line for line in out.splitlines() if line and "==>" not in line] == ["stdout of 1", "stderr of 1"]
    out = bench("logs", "--cell", second)[1]
    assert "torchrun says" not in out
    assert "start" not in out
    assert out.count(" of 0") == out.count(" of 1") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "2"), "--rank 2: launch l1 has ranks 0 to 1; name one of them"),
        (("--rank", "-1"), "--rank -1: launch l1 has ranks 0 to 1; name one of them"),
        (("--cell", "resnet"), "no cell of "),
        (("--cell", "mlp"), "'mlp' begins the ids of 2 cells"),
    ],
)
def test_what_is_not_there_is_named(printed, bench, arguments, words) -> None:
    printed.launch()
    code, out, err = bench("logs", *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_before_the_first_launch_it_says_so(printed, bench) -> None:
    assert bench("logs")[2].endswith("has begun; bench matrix starts some\n")
    code, _, err = bench("logs", "--cell", printed.cells[0])
    assert (code, f"{printed.cells[0]} has not been run yet" in err) == (2, True)


def test_a_launch_is_followed_to_its_end_and_on_to_the_next(printed, bench, monkeypatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    monkeypatch.setattr(logs, "NEXT_S", 0.5)
    seen: list[str] = []
    monkeypatch.setattr("harness.terminal.console.Console.text", lambda self, line: seen.append(line))
    launch = printed.launch()

    def wait_for(line: str) -> None:
        end = time.monotonic() + 60
        while line not in seen:
            assert time.monotonic() < end, seen
            time.sleep(0.01)

    def work() -> None:
        printed.prints(launch, 0, "first\nhalf")
        wait_for("first")
        path = printed.prints(launch, 0, " a line\n")
        wait_for("half a line")
        # The middle is cut out, and the rank goes on.
        path.write_text("cut\n")
        wait_for(LEFT_OUT)
        printed.prints(launch, 0, "after it\n")
        wait_for("after it")
        printed.prints(launch, 0, "last")
        following = printed.launch("l2")
        printed.ends(launch)
        printed.prints(following, 1, "the next launch\n")
        printed.ends(following)

    thread = threading.Thread(target=work)
    thread.start()
    code, _, _ = bench("logs", "--follow")
    thread.join()
    assert code == 0
    lines = [line for line in seen if "==>" not in line]
    assert lines == ["first", "half a line", LEFT_OUT, "after it", "last", "the next launch"]


def test_after_a_cut_it_is_known_again_which_run_the_next_words_are_of(tmp_path) -> None:
    path = tmp_path / "stderr.log"
    file = OutputFile(path=path, rank=0, stream="stderr")
    first, second = (OutputTail(file, run_id) for run_id in ("a", "b"))
    path.write_text("--- run a\nmany words\nof the first run\n")
    assert [list(tail.lines()) for tail in (first, second)] == [["many words", "of the first run"], []]
    path.write_text("--- run a\n--- run b\nend\nhalf")
    assert [list(tail.lines()) for tail in (first, second)] == [[LEFT_OUT]] * 2
    with path.open("a") as log:
        log.write(" a line\n")
    assert [list(tail.lines()) for tail in (first, second)] == [[], ["half a line"]]


def test_a_line_of_five_megabytes_is_shown_by_its_ends(printed, bench) -> None:
    launch = printed.launch()
    cell = printed.cells[0]
    printed.prints(launch, 1, f"--- run l1-{cell}\n{'x' * 5_000_000}\nValueError: no\x1b[0m\n")
    printed.ends(launch, reason="y" * 5_000_000)
    code, out, _ = bench("show", cell)
    assert code == 0
    assert len(out) < 5000
    assert "rank 1, stderr, s/launches/l1/" in out
    assert "(4,999,600 characters left out)" in out
    assert "(4,998,000 characters left out)" in out
    assert out.endswith("ValueError: no\\x1b[0m\n")
    assert len(bench("logs")[1]) < 5000


def test_a_reader_that_has_enough_is_no_defect(printed, monkeypatch) -> None:
    def closed(self: Any, line: str) -> None:
        raise BrokenPipeError

    printed.prints(printed.launch(), 0, "words\n")
    monkeypatch.setattr("harness.terminal.console.Console.text", closed)
    monkeypatch.setattr("os.dup2", lambda old, new: new)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    assert run(["logs", str(printed.study.root)]) == 141


def test_json_keeps_what_was_said(printed, bench) -> None:
    launch = printed.launch()
    printed.ends(launch, reason="\x1b[2J\u202egone")
    shown = bench("status")[1]
    assert "\\x1b[2J\\u202egone" in shown
    assert "\x1b" not in shown
    told = msgspec.json.decode(bench("status", "--json")[1])
    assert told["cells"][0]["others"] == "1 crashed: \x1b[2J\u202egone"
    assert run(["report", str(printed.study.root)]) == 0
    page = (printed.study.root / "report.html").read_text()
    assert "\\x1b[2J\\u202egone" in page
    assert not {"\x1b", "\u202e"} & set(page)
