"""The proxy in front of the engines that sites share: it decides whose prompt is next.

It identifies a site by its certificate, refuses a body without a place before it is read, lets only
the fields of a prefill leg pass, and charges the tokens that were computed.
"""
