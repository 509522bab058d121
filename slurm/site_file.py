"""Site profiles as YAML files, and with single values replaced: read strictly, with errors that help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from results.strict_yaml import FileKind
from slurm.site import SiteProfile

SITE_FILE = FileKind(
    type=SiteProfile,
    name="site profile",
    example="partition: gpu",
    advice="docs/sites has examples",
)


def read_site(path: Path) -> SiteProfile:
    """The profile in a YAML file.

    Raises UsageError: one line with path, line, key (`time.maximum`), what was given and what is allowed.
    """
    return SITE_FILE.read(path)


def profile(data: object, where: str) -> SiteProfile:
    """The profile in plain data, such as a part of a JSON file. Raises UsageError that names `where`."""
    return SITE_FILE.converted(data, where)


def override(site: SiteProfile, values: Mapping[str, object]) -> SiteProfile:
    """The profile with other values; None leaves a key as it is, and `time.fixed` is a key of a part.

    Raises UsageError as `read_site` does.
    """
    return SITE_FILE.overridden(site, values, "options of the site")
