"""Whole models of the literature, as functions or classes that return one."""
