"""The one thing that pyproject.toml cannot say: README.md as a package index shows it, where no link is relative."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md")


def without_relative_links(text: str) -> str:
    """Pictures of the repository go, links into it keep their words: they name files that the sdist has."""
    text = re.sub(r"!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(long_description=without_relative_links(README.read_text(encoding="utf-8")),
          long_description_content_type="text/markdown")
