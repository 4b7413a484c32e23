"""The command line, one thin file per verb: parse, call the API, print."""
