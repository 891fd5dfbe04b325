"""Integrations with trainers of other libraries. No other part of zeroshard imports such a library."""
