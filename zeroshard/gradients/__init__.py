"""Gradients: collected from autograd, reduced over ranks."""
