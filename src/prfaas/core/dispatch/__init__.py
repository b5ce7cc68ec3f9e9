"""The decision driver: instances, links, the routes a request could take, and their scores.

The dispatcher takes events with the time as an argument and returns actions: an instance is ready
or gone, its queue, a link is up, counters of a link, hits of a prompt, ends of prefills, transfers
and requests. Gateway and simulator drive the same class.
"""
