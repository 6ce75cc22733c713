#!/usr/bin/env python3
"""Fails where a page of a built site links to a file or an anchor that the site does not have. Links to other hosts are not followed.

    scripts/check_links.py target/site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")


def broken(root: Path) -> list[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    if not pages:
        return [f"{root} has no page"]
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if parts.path.startswith("/") or not target.is_relative_to(root) or not target.is_file():
                found.append(f"{path.name}: {link}: no such file")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{path.name}: {link}: no such anchor")
    return found


def main() -> int:
    found = broken(Path(sys.argv[1]).resolve())
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
