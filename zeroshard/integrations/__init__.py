"""What stock trainers need to run on zeroshard; each module imports its trainer's package, and nothing of ours imports it."""
