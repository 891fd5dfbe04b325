"""Parameters: sharded at rest, brought together, given back."""
