#!/usr/bin/env python3
"""Stand in for curl where the system has none, with the options that the documents use: -s, -i, -N, -d DATA."""

import argparse
import sys
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-s", "-i", "-N"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-d", metavar="DATA")
    parser.add_argument("url")
    options = parser.parse_args()
    url = options.url if "://" in options.url else f"http://{options.url}"
    try:
        answer = urllib.request.urlopen(url, options.d.encode() if options.d else None)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        if options.i:
            sys.stdout.write(f"HTTP/1.1 {answer.status}\n{answer.headers}\n")
        sys.stdout.flush()
        sys.stdout.buffer.write(answer.read())


if __name__ == "__main__":
    main()
