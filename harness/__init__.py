"""The roof: the command line, plans, launches, and the measured process."""
