"""Optimizers, schedules and loss scalers."""
