"""The gateway's driver of the dispatcher: reports of engines, links and transfers."""
