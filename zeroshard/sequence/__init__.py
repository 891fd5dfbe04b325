"""Long sequences: slices on several ranks, losses that do not materialize the full logits, and modules that run in tiles."""

from zeroshard.sequence.loss import head_log_probabilities, head_loss, token_mean
from zeroshard.sequence.sequences import Sequences
from zeroshard.sequence.tiles import Tiles, tile

__all__ = ["Sequences", "Tiles", "head_log_probabilities", "head_loss", "tile", "token_mean"]
