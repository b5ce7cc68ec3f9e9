"""The record layer of data connections without TLS: keys, records, streams. No I/O."""
