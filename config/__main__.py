"""`python -m config` writes docs/config.md from the fields of both scripts."""

from config.reference import DOCUMENT, current_document

DOCUMENT.parent.mkdir(exist_ok=True)
DOCUMENT.write_text(current_document(), encoding="utf-8")
print(f"wrote {DOCUMENT}")
