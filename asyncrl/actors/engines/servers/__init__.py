"""What engines behind an HTTP server share: the server process, its dialects, its errors."""
