"""Resources of the machine: memory, disks, ports, processes."""
