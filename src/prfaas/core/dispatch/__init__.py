"""The decision driver: instances, links, the routes a request could take, and their scores."""
