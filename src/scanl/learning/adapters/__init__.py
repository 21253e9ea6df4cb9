"""scanl's models as other libraries have them. Each file needs its own extra."""
