"""Checks the links of a built site: `python tools/check_site.py build/site`.

Every link to a page, a file or an anchor of the site must lead somewhere; links to other sites are not followed.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links = {""}, set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


def broken_links(site: Path) -> Iterator[str]:
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or site not in target.parents:
                yield f"{path.relative_to(site)}: {link}: no such file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link}: no such anchor"


def main(folder: str) -> int:
    broken = list(broken_links(Path(folder)))
    print("\n".join([*broken, f"{len(broken)} broken links in {folder}"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
