"""Where prefill-as-a-service fits: families of models, the transport, and the simulator."""
