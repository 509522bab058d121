"""The work of a rank on a run of a program: it starts the program, follows its steps, and ends it."""
