"""Texts of one's own, and shards of documents."""
