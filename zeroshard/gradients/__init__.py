"""Gradients: gathered from autograd, reduced over ranks."""
