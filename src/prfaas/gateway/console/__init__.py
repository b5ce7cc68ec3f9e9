"""The console: a web page that shows the state and decisions of the gateway."""
