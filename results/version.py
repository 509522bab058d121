"""The version of `bench`: the one place that says it; the package's metadata is built from it."""

VERSION = "0.2.0"
