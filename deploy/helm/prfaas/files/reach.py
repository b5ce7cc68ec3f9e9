"""Check that all parts of a site answer: HOST:PORT accepts a connection, a URL returns 200."""

import socket
import ssl
import sys
import urllib.request

failed = 0
for place in sys.argv[1:]:
    try:
        if place.startswith("http"):
            # The certificate names what clients call the gateway, not this Service.
            context = ssl._create_unverified_context()  # noqa: S323
            urllib.request.urlopen(place, timeout=10, context=context).close()  # noqa: S310
        else:
            host, _, port = place.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        print(f"ok      {place}")
    except OSError as error:
        failed += 1
        print(f"failed  {place}: {error}")
sys.exit(1 if failed else 0)
