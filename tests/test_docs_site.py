"""The documentation as a site: built strictly, whole, and with nothing from another host."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
FIRST = [
    "index",
    "quick-start",
    "concepts",
    "two-sites",
    "planner",
    "deployment-file",
    "api",
    "kubernetes",
    "operations",
    "failures",
]
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}
NOT_LOADED = {"canonical", "prev", "next", "alternate"}


class Links(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to, and its name."""
        given = dict(attrs)
        if name := given.get("id") or given.get("name"):
            self.anchors.add(name)
        if (given.get("rel") or "") in NOT_LOADED:
            return
        for attribute in ("href", "src"):
            if (place := given.get(attribute)) is not None:
                self.links.append((tag if (tag, attribute) in LOADED else "a", place))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    finally:
        logger.removeHandler(handler)
    assert warnings == []
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    """Pages of the site, but for that of an unknown address."""
    return {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}


def test_links_and_anchors_lead_somewhere_in_the_site(pages: dict[Path, Links]) -> None:
    assert len(pages) > 100
    for page, found in pages.items():
        for _, link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{page}: {link}"
            if parts.fragment and there in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[there].anchors, f"{page}: {link}"


def test_addresses_elsewhere_are_https_and_nothing_is_loaded_from_them(
    pages: dict[Path, Links],
) -> None:
    outside = [
        (tag, link)
        for found in pages.values()
        for tag, link in found.links
        if urlsplit(link).netloc
    ]
    assert {tag for tag, _ in outside} == {"a"}
    for _, link in outside:
        parts = urlsplit(link)
        local = parts.hostname in ("127.0.0.1", "localhost")
        assert parts.scheme == ("http" if local else "https"), link
        assert re.fullmatch(r"[\w.:-]+", parts.netloc), link


def test_the_navigation_begins_with_the_ten_pages(site: Path) -> None:
    listed = re.findall(r"\]\(([\w/-]+)\.md\)", (site / "llms.txt").read_text())
    assert listed[:10] == FIRST
    assert len(listed) == len(set(listed))
    places = {name for name in listed if (site / f"{name}.md").is_file()}
    assert places == set(listed)


def test_every_page_of_the_documentation_is_in_llms_txt_and_in_the_search(site: Path) -> None:
    listed = set(re.findall(r"\]\(([\w/-]+)\.md\)", (site / "llms.txt").read_text()))
    docs = ROOT / "docs"
    names = {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")}
    wanted = {re.sub(r"(^|/)README$", r"\1contents", name).removesuffix("/index") for name in names}
    assert wanted - listed == set()
    search = (site / "search" / "search_index.json").read_text()
    assert "layout_mismatch" in search
    full = (site / "llms-full.txt").read_text()
    assert "# Why did my request go local" in full
    assert len(full.split()) > 90_000


def test_the_site_has_the_files_that_pages_link_to(site: Path) -> None:
    assert (site / "openapi.json").read_bytes() == (ROOT / "docs" / "openapi.json").read_bytes()
    assert (site / "files" / "examples" / "two-sites.toml").exists()
