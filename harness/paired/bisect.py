"""`bench compare --bisect GOOD BAD`: the commit that made it worse, in git's order, by paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.console import Console
from harness.matrix import RUNS
from harness.paired.accepted import resolve_base
from harness.paired.comparison import PairedComparison, PairedRequest, Row
from harness.paired.sources import IncomparableError, Repository
from reports.gate.comparison import FAILING, Comparison, Rules, Verdict
from reports.text import count
from results.errors import MachineError, UsageError
from results.lock import study_lock
from results.store import new_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What a bisection has found."""

    comparison: Comparison
    """Of GOOD with the first bad commit; with BAD, where that is not worse."""
    sentence: str


def bisect(request: PairedRequest, rules: Rules, console: Console) -> Culprit:
    """Compare commits between GOOD (`request.base`) and BAD (`request.new`) with GOOD until one is left.

    A commit is bad if something fails that fails in BAD. One that does not build, cannot be compared or does
    not tell is skipped. Raises UsageError if GOOD is no ancestor of BAD.
    """
    repository = Repository(Path.cwd())
    try:
        revision, rules = resolve_base(request.base.revision, rules, repository, console)
    except IncomparableError as error:
        raise UsageError(str(error)) from error
    good, bad = (repository.commit(one) for one in (revision, request.new.revision))
    names = request.base.revision, request.new.revision
    if good == bad:
        raise UsageError(f"{names[0]} and {names[1]} are the same commit: there is none to find")
    if not repository.is_ancestor(good, bad):
        raise UsageError(
            f"{names[0]} is no ancestor of {names[1]}: give GOOD first, or where the branches have parted, "
            f"what git merge-base {' '.join(names)} prints"
        )
    folder = request.out or RUNS / f"bisect-{new_id()}"

    def compared(commit: str, asked: frozenset[Row] | None = None) -> Comparison:
        console.note(f"commit {repository.title(commit)}")
        new = replace(request.new, revision=commit)
        out = folder / commit[:12]
        one = replace(request, base=replace(request.base, revision=good), new=new, out=out, asked=asked)
        return PairedComparison(one, rules, console).run()

    with study_lock(folder):
        found = compared(bad)
        wanted = _failing(found)
        if not wanted:
            untold = found.count(Verdict.INCONCLUSIVE, Verdict.INCOMPARABLE)
            what = (
                f"it is not certain that {request.new.revision} is worse: {count(untold, 'verdict')} could "
                f"not be reached, so that no commit is sought"
                if untold
                else f"{request.new.revision} is not worse: there is no culprit"
            )
            return Culprit(comparison=found, sentence=what)
        goods, skipped = [good], list[str]()
        while candidates := repository.between(goods, bad, skipped):
            try:
                tried = compared(candidates[0], wanted)
            except (UsageError, MachineError) as error:
                # BAD could be compared: this commit does not build, or refuses the options.
                console.warn(f"{candidates[0][:12]} is skipped: {error}")
                skipped.append(candidates[0])
                continue
            if wanted & _failing(tried):
                bad, found = candidates[0], tried
            elif _says_nothing(tried, wanted):
                skipped.append(candidates[0])
            else:
                goods.append(candidates[0])
    return Culprit(comparison=found, sentence=_sentence(repository, bad, goods, skipped))


def _failing(found: Comparison) -> frozenset[Row]:
    return frozenset((f.key, f.metric) for f in found.findings if f.verdict in FAILING)


def _says_nothing(found: Comparison, wanted: frozenset[Row]) -> bool:
    """Whether something that fails in BAD could not be judged here, or a cell has no figures."""
    return any(
        f.verdict not in (Verdict.NEW, Verdict.ACCEPTED)
        if f.metric is None
        else f.verdict is Verdict.INCONCLUSIVE and (f.key, f.metric) in wanted
        for f in found.findings
    )


def _sentence(repository: Repository, bad: str, goods: Sequence[str], skipped: Sequence[str]) -> str:
    left = [commit for commit in repository.between(goods, bad) if commit in skipped]
    if not left:
        return f"the first bad commit is {repository.title(bad)}"
    titles = "; ".join(repository.title(commit) for commit in (*left, bad))
    return f"the first bad commit is one of {count(len(left) + 1, 'commit')}: {titles}"
