"""The command line: one parser tree in `main`, and a module for each command."""
