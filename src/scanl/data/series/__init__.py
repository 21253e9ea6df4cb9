"""Series of tables: read, checked, cut into windows, and asked questions."""
