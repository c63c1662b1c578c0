"""The command line: one small module a command, each a thin shell over public functions."""
