"""The output of a launch's processes: its files, the rank of each, and their lines, also while they grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from results.files import opened, read_lines
from results.launch import EVENT, RUN_MARK, Launch, rank_log_paths, rank_output_paths

STREAMS = ("stdout", "stderr")
LEFT_OUT = "--- lines were left out here ---"
"""This line is shown instead of lines that were cut out of a growing file before it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to which a process of the launch prints."""

    path: Path
    rank: int | None
    """The rank that prints; None: what starts the ranks, or a rank that has not said its number."""
    stream: str

    @property
    def words(self) -> str:
        """The name to show, such as `rank 3, stderr`."""
        return self.path.name if self.rank is None else f"rank {self.rank}, {self.stream}"


def launcher_output(folder: Path) -> list[OutputFile]:
    """The files to which torchrun and the agents of nodes print, in the folder of a launch."""
    return [OutputFile(path=path, rank=None, stream="log") for path in sorted(folder.glob("*.log"))]


def rank_output(folder: Path, launch: Launch) -> list[OutputFile]:
    """The files to which ranks print: by rank, and last the files whose rank is not known yet."""
    # Each rank names its files in the first line of its log.
    known: dict[str, int] = {}
    for log in rank_log_paths(folder).values():
        try:
            event = next(read_lines(log)).parsed(EVENT)
            known |= {str(event[stream]): int(event["rank"]) for stream in STREAMS if stream in event}
        except (OSError, ValueError, TypeError, KeyError, StopIteration):
            continue
    found = []
    for path in rank_output_paths(folder):
        rank = known.get(path.relative_to(folder).as_posix())
        if rank is None and launch.placement.nodes == 1:
            # On one node the number in the path is the rank's.
            rank = int(path.parent.name)
        found.append(OutputFile(path=path, rank=rank, stream=path.stem))

    def place(file: OutputFile) -> tuple[int, Path, bool]:
        # stderr comes after stdout, because it reports a failure.
        rank = launch.placement.gpus if file.rank is None else file.rank
        return rank, file.path.parent, file.stream == "stderr"

    return sorted(found, key=place)


class OutputTail:
    """Reads the new complete lines of one file, each time it is asked."""

    def __init__(self, file: OutputFile, run_id: str | None = None) -> None:
        """With `run_id`, only the lines that a rank printed during this run."""
        self.file = file
        self._run_id = run_id
        self._offset = 0
        self._failed = False
        self._within = run_id is None

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """The lines since the last call; a last line without its end is given when everything has ended."""
        try:
            with opened(self.file.path) as file:
                cut = file.seek(0, 2) < self._offset
                file.seek(0 if cut else self._offset)
                data = file.readall()
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._failed:
                yield f"--- it cannot be read: {error.strerror} ---"
            self._failed = True
            return
        if cut:
            # The rank has cut the middle out of it, and continues at its new end.
            yield from self._skip(data)
            return
        whole = data if ended else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from self._of_run(whole)

    def _of_run(self, whole: bytes) -> Iterator[str]:
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(RUN_MARK) and self._run_id is not None:
                self._within = line == f"{RUN_MARK}{self._run_id}"
            elif self._within:
                yield line

    def _skip(self, data: bytes) -> Iterator[str]:
        """Continue after the last complete line of a file that was cut: its new lines are not known."""
        self._offset = data.rfind(b"\n") + 1
        marks = [line for line in data[: self._offset].splitlines() if line.startswith(RUN_MARK.encode())]
        was_within = self._within
        if self._run_id is not None and marks:
            self._within = marks[-1].decode(errors="replace") == f"{RUN_MARK}{self._run_id}"
        if was_within or self._within:
            yield LEFT_OUT


def last_lines(files: Sequence[OutputFile], run_id: str, most: int) -> tuple[OutputFile, list[str]] | None:
    """The last lines that a run printed to the first of these files in which it printed, and that file.

    For a run that never began, the end of the output before the first run. None if nothing was printed.
    """
    for file in files:
        lines = [line for line in OutputTail(file, run_id).lines(ended=True) if line.strip()]
        if not lines:
            every = list(OutputTail(file).lines(ended=True))
            lines = (
                [] if any(line.startswith(RUN_MARK) for line in every) else [x for x in every if x.strip()]
            )
        if lines:
            return file, lines[-most:]
    return None
