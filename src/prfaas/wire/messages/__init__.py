"""The messages that control frames carry, as typed structs in msgpack.

Three conversations use them: engine and pool on a unix socket (`engine`), pool and pool (`link`),
gateway and pool (`gateway`). `codec` makes control frames of them, and reads them. Unknown message
types and missing fields are a `PeerError`; unknown fields are ignored, so that one side can be
newer than the other.
"""
