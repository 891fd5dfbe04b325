"""Access of users to sharded parameters: reads, writes and their model states."""
