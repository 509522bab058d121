"""A kind of study of another package: all ranks copy memory at once, and a section names the slowest host."""
