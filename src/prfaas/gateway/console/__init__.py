"""The console: a web page that shows what the gateway does and why."""
