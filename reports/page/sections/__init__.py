"""The sections of the page. Each module has a function from a study to a section."""
