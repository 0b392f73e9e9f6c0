"""Hooks of mkdocs: pages of the site whose text lies outside of docs/, or in a notebook."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md and CHANGELOG.md, with links as seen from docs/, and every notebook."""
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(notebook.src_uri)
        # Its outputs are those that the notebook was saved with.
        text, resources = MarkdownExporter().from_filename(str(notebook.abs_src_path))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, str(path.parent / name), content=picture))
        files.append(File.generated(config, str(path.with_suffix(".md")), content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to a notebook lead to its page."""
    return markdown.replace(".ipynb)", ".md)")
