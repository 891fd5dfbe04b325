"""Training with a policy: `shard`, and the object that it returns."""
