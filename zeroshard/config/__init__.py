"""Configs of DeepSpeed: their schema, and the effect of each key here."""
