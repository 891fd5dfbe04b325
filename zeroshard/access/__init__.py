"""Access: how users read and write parameters that are sharded."""
