"""Hook of mkdocs: pages of the repository's root, and links between them and the pages of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages by their names in the repository, and in the site."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#]+)([^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name, page in ROOT_PAGES.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links of the repository to links of the site; of a file that the site lacks, the text
    of the link stays."""
    here = page.file.src_uri
    in_root = {page: name for name, page in ROOT_PAGES.items()}.get(here)
    folder = "" if in_root else posixpath.dirname(f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        picture, text, path, anchor = link.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        place = ROOT_PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return text
        return f"{picture}[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(rewritten, markdown)
