"""Pages of the site that lie outside docs/, with their links turned to match."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
         "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files, config):
    for name, source in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files
