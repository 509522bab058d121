"""Launches on this machine, as children of this process."""
