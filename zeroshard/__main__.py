"""Owns `python -m zeroshard`: the command-line program."""

from zeroshard.cli.main import main

main()
