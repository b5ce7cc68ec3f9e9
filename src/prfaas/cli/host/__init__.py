"""Resources of the machine that a deployment takes: memory, disks, ports, pages to scrape."""
