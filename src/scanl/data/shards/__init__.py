"""Data that no machine holds: records in many files, read in one order that neither ranks nor workers change."""
