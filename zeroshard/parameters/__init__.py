"""Parameters: sharded at rest, unsharded, resharded."""
