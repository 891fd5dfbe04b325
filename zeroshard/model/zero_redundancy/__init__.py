"""The replacement for torch's ZeroRedundancyOptimizer."""
