"""SGLang: the backend of its hierarchical cache, against real pool nodes and its own classes."""
