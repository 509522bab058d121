"""The measured process: one rank of a launch. It knows neither the command line nor the launchers."""
