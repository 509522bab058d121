"""From runs to the figures of a study. Nothing here draws, and nothing here needs pandas."""
