"""What ranks send to one another."""
