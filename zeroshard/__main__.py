"""Owns `python -m zeroshard`: the command-line program."""

from zeroshard.tools.main import main

main()
