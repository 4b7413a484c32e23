"""Models of other software, read from their files and written as runs. Executes no code of theirs."""
