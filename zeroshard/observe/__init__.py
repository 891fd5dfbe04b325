"""Reports of a run: memory, monitors, plots and logs."""
