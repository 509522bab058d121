"""`python -m harness.cli`: the command line where no `bench` is on the path."""

from harness.cli import main

main()
