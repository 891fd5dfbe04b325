"""Who holds which element, and what is brought together at once: integers and names."""
