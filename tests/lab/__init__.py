"""The WAN lab: links with delay, rate, loss and faults on one machine, for tests and benchmarks."""
