"""CPU time and throughput of offloaded prompts, beside one engine that prefills them itself."""
