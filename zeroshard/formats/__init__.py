"""Other people's files: Hugging Face, DeepSpeed, torch's distributed checkpoint."""
