"""Modules of torch as streams: what each operation of a module keeps between two pieces of a sequence."""
