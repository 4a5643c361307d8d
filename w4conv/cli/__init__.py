"""The command line, one file a command: all printing, all exit codes."""
