"""`asyncrl doctor`: looks at the machine, the packages and a configuration, and says what to fix."""
