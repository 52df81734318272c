"""Text of PDF, HTML and DOCX files; needs optional packages."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

from cirag_jax.errors import import_optional, parsing
from cirag_jax.io import replace_surrogates

EXTRA = "documents"
_PACKAGES = {
    ".pdf": ("pypdf",),
    ".html": ("lxml", "markdownify"),
    ".htm": ("lxml", "markdownify"),
    ".docx": ("lxml", "markdownify", "mammoth"),
}
SUFFIXES = tuple(_PACKAGES)

_UNREAD = ("script", "style", "noscript", "template", "nav", "footer", "aside", "button", "svg")


def is_installed(suffix: str) -> bool:
    """Returns whether the packages that read files with a suffix are installed."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES[suffix])


def convert(file: Path) -> tuple[str, bool]:
    """Returns the text of a file, and whether the text is Markdown."""
    text, is_markdown = _convert(file, file.suffix.lower())
    return replace_surrogates(text), is_markdown


def _convert(file: Path, suffix: str) -> tuple[str, bool]:
    for name in _PACKAGES[suffix]:
        import_optional(name, f"reading {file}", EXTRA)
    with parsing(f"{file} cannot be read", "; save it as a .txt or .md file, or move it elsewhere"):
        if suffix == ".pdf":
            import pypdf

            logging.getLogger("pypdf").setLevel(logging.ERROR)  # Warns about every odd file.
            return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(file).pages), False
        if suffix == ".docx":
            return _markdown(_docx_html(file)), True
        return _markdown(file.read_bytes()), True


def _docx_html(file: Path) -> str:
    import mammoth

    with file.open("rb") as content:
        return mammoth.convert_to_html(
            content,
            style_map="p[style-name='Title'] => h1:fresh",
            convert_image=mammoth.images.img_element(lambda _: {"src": ""}),
        ).value


def _markdown(html: str | bytes) -> str:
    """Returns the main text of a page; a page without headings gets its title as a heading."""
    import bs4
    import markdownify

    soup = bs4.BeautifulSoup(html, "lxml")  # Closes tags that the page leaves open.
    for tag in soup(_UNREAD):
        tag.decompose()
    body: Any = soup.main or soup.body or soup
    if soup.title and body.h1 is None:
        heading = soup.new_tag("h1")
        heading.string = soup.title.get_text()
        body.insert(0, heading)
    return markdownify.MarkdownConverter(heading_style="atx").convert_soup(body)
