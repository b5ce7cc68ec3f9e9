"""The pool node: a store of KV blocks beside the engines of a host, and the link to other pools."""
