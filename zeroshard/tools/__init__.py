"""The command `zeroshard`, and plans."""
