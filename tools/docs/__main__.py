"""Write every generated part of the pages: `python -m tools.docs`."""

from __future__ import annotations

from .pages import PAGES, remade

for page in PAGES:
    before = page.read_text(encoding="utf-8")
    if (after := remade(before)) != before:
        page.write_text(after, encoding="utf-8")
        print(f"{page.name} is written")
