"""`asyncrl view`: the rollouts of a run in the browser, live or over (docs/how-to/view.md).

A reader and nothing else: it changes no file of the run, sends no signal, and a live run is asked, never opened.
"""
