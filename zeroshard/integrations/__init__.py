"""Integrations with trainers of other libraries. Each module here imports its library; no other part of zeroshard does."""
