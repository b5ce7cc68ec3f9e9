"""The engine of a run: requests under the core's machine, failures, signals, on a virtual clock."""
