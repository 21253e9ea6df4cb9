"""Folders of one's own files."""
