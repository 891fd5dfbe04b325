"""Configs of DeepSpeed: their schema, and what each key comes to here."""
