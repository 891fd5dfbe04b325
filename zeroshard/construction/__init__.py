"""Construction: models whose parameters are sharded while the model is built."""
