"""Foreign file formats: Hugging Face, DeepSpeed, torch's distributed checkpoint."""
