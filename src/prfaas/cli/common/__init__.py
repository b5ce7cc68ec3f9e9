"""Options, output, signals and exit codes that several commands share."""
