"""The market of a deployment: from its file, its plan and its price file to the core's prices."""
