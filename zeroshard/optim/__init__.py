"""Optimizers, learning-rate schedules and loss scalers."""
