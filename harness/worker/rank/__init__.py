"""A rank: its place, machine, log, runs, agreements with other ranks, failures and end."""
