"""One thin file per verb: parse, call, print."""
