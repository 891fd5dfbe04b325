"""What happens when in a step: hooks, units, order."""
