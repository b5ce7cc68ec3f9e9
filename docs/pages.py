"""Hooks of MkDocs: pages of the site that are not in docs/, links that leave docs/, `llms.txt`.

python docs/pages.py > docs/glossary.md writes the glossary.

Pages are written for a reader of the repository. On the site a link to a page of the repository
leads to its page here, and a link to another file to a copy of that file, so that the site needs no
other host. Python-Markdown wants a blank line before a list; GitHub does not.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ADDED = {
    "index.md": "README.md",
    "contents.md": "docs/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
}
"""Pages of the site and the files of the repository that they are."""
PLACES = {place: page for page, place in ADDED.items()} | {"docs/decisions": "decisions/index.md"}
COPIES = "files"
"""Folder of the site with copies of other files of the repository."""
_LINK = re.compile(r"(?<=\]\()([^)\s:]+)(?=\))")
_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^(?:[-*] |\d+\. )")


def on_config(config: Any) -> Any:
    """Write out the patterns of the navigation: all files of a folder that it does not name."""
    named = set(_named(config.nav))
    config.nav = _expanded(config.nav, Path(config.docs_dir), named)
    return config


def _named(entries: Any) -> Iterator[str]:
    """Pages that a navigation names."""
    if isinstance(entries, str):
        yield entries
    else:
        values = entries.values() if isinstance(entries, dict) else entries
        for each in values:
            yield from _named(each)


def _expanded(entries: Any, docs: Path, named: Container[str]) -> Any:
    if isinstance(entries, str):
        return entries
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append({title: _expanded(inner, docs, named) for title, inner in entry.items()})
        elif "*" in entry:
            files = sorted(file.relative_to(docs).as_posix() for file in docs.glob(entry))
            found += [file for file in files if file not in named]
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and copies of the files that pages link to."""
    if (replaced := files.get_file_from_path("README.md")) is not None:
        files.remove(replaced)
    for name, place in ADDED.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text()))
    files.append(File.generated(config, "decisions/index.md", content=_decisions()))
    for place in sorted(_linked(files)):
        copy = File.generated(
            config,
            f"{COPIES}/{place}",
            content=(ROOT / place).read_bytes(),
            inclusion=InclusionLevel.NOT_IN_NAV,
        )
        files.append(copy)
    return files


def _decisions() -> str:
    lines = ["# Decisions", ""]
    for file in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        number, _, title = file.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        lines.append(f"- {number}: [{title}]({file.name})")
    return "\n".join(lines) + "\n"


def _target(page: str, link: str) -> str:
    """The file of the repository that a link of a page of the site is about."""
    place = ADDED.get(page, f"docs/{page}")
    return posixpath.normpath((PurePosixPath(place).parent / link).as_posix())


def _linked(files: Files) -> set[str]:
    """Files that are no pages and lie outside of docs/, to which a page links."""
    places = {
        _target(file.src_uri, link.partition("#")[0])
        for file in files.documentation_pages()
        for link in _LINK.findall(file.content_string)
    }
    return {
        place
        for place in places
        if place not in PLACES and not place.startswith("docs/") and (ROOT / place).is_file()
    }


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to pages and copies of the site, and set lists apart."""
    return _apart(_LINK.sub(lambda link: _led(page.file.src_uri, link[0]), markdown))


def _led(page: str, link: str) -> str:
    path, mark, anchor = link.partition("#")
    if not path:
        return link
    place = _target(page, path)
    if place in PLACES:
        there = PLACES[place]
    elif place.startswith("docs/"):
        there = place.removeprefix("docs/")
    elif (ROOT / place).is_dir():
        there = "contents.md"  # a folder is no page
    else:
        there = f"{COPIES}/{place}"
    return posixpath.relpath(there, posixpath.dirname(page) or ".") + mark + anchor


def _apart(markdown: str) -> str:
    """Put a blank line between a paragraph and the list that follows it."""
    lines: list[str] = []
    is_code = is_list = False
    for line in markdown.splitlines():
        is_code ^= bool(_FENCE.match(line))
        is_item = bool(_ITEM.match(line)) and not is_code
        if is_item and not is_list and lines and lines[-1].strip():
            lines.append("")
        is_list = is_item or (is_list and bool(line.strip()))
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_nav(nav: Navigation, config: Any, **_: Any) -> Navigation:
    """Keep the navigation for `llms.txt`."""
    config.extra["pages"] = nav
    return nav


def on_post_build(config: Any) -> None:
    """Write the pages as Markdown, `llms.txt` with their list, `llms-full.txt` with their text."""
    site, full = Path(config.site_dir), []
    index = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.extra["pages"].items:
        index += [f"## {section.title}", ""]
        for page in _pages(section):
            text, name = page.markdown or "", f"{page.url.rstrip('/') or 'index'}.md"
            (site / name).write_text(text)
            index.append(f"- [{page.title}]({name})")
            full.append(text)
        index.append("")
    (site / "llms.txt").write_text("\n".join(index))
    (site / "llms-full.txt").write_text("\n".join(full))


def _pages(item: Any) -> list[Page]:
    if isinstance(item, Page):
        return [item]
    return [page for child in item.children or () for page in _pages(child)]


def glossary() -> str:
    """The page of all terms, by their names."""
    terms = tomllib.loads((ROOT / "glossary.toml").read_text())["term"]
    lines = [
        "# Glossary",
        "",
        "Written from `glossary.toml` by `python docs/pages.py > docs/glossary.md`. "
        "[Concepts](concepts.md) explains how they belong together.",
        "",
        "| term | meaning |",
        "|---|---|",
    ]
    ours = [term for term in terms if term["name"] != "names of what a thing is"]
    rows = sorted(ours, key=lambda term: term["name"].lower())
    return "\n".join([*lines, *(f"| {each['name']} | {each['means']} |" for each in rows)])


if __name__ == "__main__":
    print(glossary())
