"""What a user does with a sharded model: `shard`, `Sharded`, `unsharded`, names, sharded construction, tensor parallelism."""
