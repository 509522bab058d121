"""The sections of the page, one module each: a function from a study to what is shown."""
