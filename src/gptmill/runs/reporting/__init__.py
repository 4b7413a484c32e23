"""Reports of runs as a page, Markdown or JSON, from events.jsonl."""
