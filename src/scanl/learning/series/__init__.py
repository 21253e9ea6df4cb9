"""One answer to a whole series, a class or a number: filters with a readout in closed form, and what is chosen."""
