"""What fxguard says of many runs, to hold one checkout against another, byte by byte.

    git worktree add ../before main
    python tests/support/golden --against ../before               # all records, two processes
    python tests/support/golden --against ../before --every 6     # a sample, in three minutes
    python tests/support/golden --against ../before --only run    # one family
    python tests/support/golden --write FILE                      # the records of this checkout

A change that moves code must not change a word of what users read. Nothing is stored in the
repository: both checkouts make their records on the same machine, each with its own fxguard and its
own ``tests/support``. The cases are those of this package, for both: they name what users name, and
no file inside fxguard.

A record is what one case gives: the JSON and the text of reports, comparisons and forecasts, what
is printed, frames, coverage, notes, warnings and exceptions. ``runs`` counts how often a graph was
run again for it: a change may lower that number, and must not raise it.
"""
