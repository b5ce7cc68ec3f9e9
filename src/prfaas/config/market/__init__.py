"""Tables of a deployment file about prices and classes of service."""
