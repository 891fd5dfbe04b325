"""Reports of a run: memory, progress, monitors and pictures."""
