"""DeepSpeed configs: their schema, and the effect of each key in zeroshard."""
