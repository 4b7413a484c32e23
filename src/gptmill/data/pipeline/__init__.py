"""The machinery of preparing: chunks of a source, encoded by many processes, written in order by one."""
