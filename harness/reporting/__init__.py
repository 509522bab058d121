"""Reading studies, and writing and printing their reports."""
