"""The order of events in a step: hooks, units, and the schedule between them."""
