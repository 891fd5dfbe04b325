"""Places where model states rest: accelerator, cpu or disk, behind one interface."""
