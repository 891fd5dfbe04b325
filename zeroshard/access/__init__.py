"""User access to sharded parameters: reads, writes and model states."""
