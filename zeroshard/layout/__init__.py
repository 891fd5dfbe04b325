"""The layout: which rank holds which element, and which parameters are one unit. Integers and names."""
