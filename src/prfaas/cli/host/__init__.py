"""What a deployment takes of the machine it runs on: memory, disks, ports, pages to scrape."""
