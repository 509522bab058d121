"""Analysis: from runs to the figures of a study, without drawings and without pandas."""
