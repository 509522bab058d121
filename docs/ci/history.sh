#!/usr/bin/env bash
# The history of nights on a branch of its own (BRANCH, or bench-history): a night adds files and changes none.
#
#   bench/history.sh pull     before a night: history/ is a worktree of the branch
#   bench/history.sh push     after it: commits what the night added, and pushes it
set -euo pipefail
branch=${BRANCH:-bench-history}

commit() {
    git -C history add --all
    git -C history diff --cached --quiet ||
        git -C history -c user.name=bench -c user.email=bench@localhost commit --quiet --message "Add a night"
}

update() {
    if git fetch --quiet origin "+refs/heads/$branch:refs/remotes/origin/$branch" 2>/dev/null; then
        git -C history -c user.name=bench -c user.email=bench@localhost rebase --quiet "origin/$branch"
    fi
}

case ${1:-} in
pull)
    if [ -e history ] && [ ! -e history/.git ]; then
        echo "history/ is on no branch: move it away, call this again, and copy its files into the new history/" >&2
        exit 2
    fi
    if [ ! -e history ]; then
        git worktree prune
        git worktree add --quiet --force --detach --no-checkout history
        git -C history checkout --quiet --orphan "$branch-$$"
        git -C history read-tree --empty
        git -C history -c user.name=bench -c user.email=bench@localhost commit --quiet --allow-empty --message "Begin"
        # A checkout of the next job deletes local branches, which fails for one that is checked out.
        git -C history checkout --quiet --detach
        git branch --quiet --delete --force "$branch-$$"
    fi
    commit
    update
    ;;
push)
    commit
    update
    git -C history push --quiet origin "HEAD:refs/heads/$branch"
    ;;
*)
    echo "usage: bench/history.sh pull | push" >&2
    exit 2
    ;;
esac
