"""The drop-in for torch's ZeroRedundancyOptimizer."""
