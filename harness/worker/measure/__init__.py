"""Timed blocks of steps, and their telemetry, profiles and live scalars."""
