"""Tasks in. `SOURCES` names the task sources that come with asyncrl."""

SOURCES: dict[str, str] = {
    "lookup": "asyncrl.data.lookup:LookupSource",
    "json_lines": "asyncrl.data.json_lines:JsonLinesSource",
}
"""Name -> import path. A config names one of these, or gives an import path `package.module:name` of its own."""
