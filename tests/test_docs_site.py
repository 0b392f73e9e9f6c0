"""The documentation as a site: it builds without a warning, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. --strict fails for a link or an anchor to nothing, and a page without nav."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Nothing may be fetched: every request would go to a closed port.
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    environment["https_proxy"] = environment["http_proxy"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages - {path.stem for path in site.glob("*.html")} == set()


def test_a_page_loads_nothing_from_other_servers(site) -> None:
    texts = [path.read_text() for path in [*site.rglob("*.html"), *site.rglob("*.css")]]
    assert len(texts) > 25
    tags = r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)="
    loads = rf"""(?:{tags}|@import |url\()["']?(?:https?:)?//"""
    assert [found for text in texts for found in re.findall(rf"{loads}[^\s>]*", text)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_loads_nothing(path) -> None:
    assert not re.search(r"""(?:href|src)=["']https?:|@import|url\(["']?http""", path.read_text())


def markdown_lines(page: Path) -> list[tuple[str, str]]:
    """Every line of a page outside of code, with the line before it."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = text.splitlines()
    return list(zip(["", *lines], lines, strict=False))


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
def test_a_list_or_a_table_begins_after_an_empty_line(page) -> None:
    """Python-Markdown, unlike GitHub, would append it to the paragraph."""
    begins = re.compile(r"[-*|] |\d+\. ")
    goes_on = re.compile(r"[-*|#] |\d+\. |\||  |#|<!--|$")
    wrong = [
        line
        for before, line in markdown_lines(page)
        if begins.match(line) and not goes_on.match(before)
    ]
    assert wrong == []
