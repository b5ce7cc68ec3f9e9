"""Sources of a site's members, and the follower that connects and disconnects them."""
