"""The integration with SGLang: a storage backend of its hierarchical cache, over a pool node."""
