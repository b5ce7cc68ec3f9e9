"""What the gateway compares before it lets requests leave the cluster."""
