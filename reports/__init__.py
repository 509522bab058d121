"""Reports for a reader: the figures of a study (analysis), and the page that shows them (page)."""
