"""Fit of prefill-as-a-service: families of models, the transport, and the simulator."""
