"""What a rank is: its place, machine, log, agreements with other ranks, failures and end."""
