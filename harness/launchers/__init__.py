"""Launchers: how the launches of a plan are started, each in a folder that nothing else imports by name."""
