"""The gateway's side of the dispatcher: what it is told of engines, links and transfers."""
