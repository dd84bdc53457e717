"""`asyncrl plan`: plays the buffer's own code on a virtual clock, with the times of a run, and recommends a setting."""
