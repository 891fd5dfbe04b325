"""Models whose parameters are sharded or divided while the model is built."""
