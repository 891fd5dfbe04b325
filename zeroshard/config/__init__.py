"""See docs/design.md, "The rooms"."""
